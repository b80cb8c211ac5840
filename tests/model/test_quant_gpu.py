"""A quantised model on the GPU backend computes what the same quantised model computes in plain
PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.model import quant
from octavo.model import quantized as quantized_files
from octavo.model.load import LoadOptions, load_model, open_checkpoint
from octavo.ops import Ops
from octavo.ops.reference import ReferenceOps
from tests import tiny
from tests.batch import empty_kv, make_batch, scattered_tables
from tests.conftest import DEVICE

pytest.importorskip("triton")
from octavo.ops.triton import TritonOps
from octavo.ops.triton.quant import TritonWeight

CHUNKS = [([5, 99, 17, 200, 3], 0), ([42], 0), (list(range(60, 81)), 0)]


def logits(ops: Ops, architecture: str, name: str) -> torch.Tensor:
    model, _ = load_model(
        tiny.model_dir(architecture),
        LoadOptions(dtype="float32", device=DEVICE, quantization=name),
        ops=ops,
        progress=False,
    )
    tables = scattered_tables([len(ids) for ids, _ in CHUNKS], 8)
    batch = make_batch(CHUNKS, tables, 8, DEVICE)
    with torch.inference_mode():
        return model.logits(model(batch, empty_kv(model.config, tables, 8, DEVICE)))


@pytest.mark.parity
@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", "int4-g32-asym"), ("qwen2", "int8"), ("gemma3", "fp8-a16"), ("gpt2", "int4-g64")],
)
def test_logits(architecture: str, name: str) -> None:
    got, want = logits(TritonOps(), architecture, name), logits(ReferenceOps(), architecture, name)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_nothing_of_a_quantised_model_stays_unpacked() -> None:
    model, _ = load_model(
        tiny.model_dir("qwen2"),
        LoadOptions(dtype="float32", quantization="int4-g128"),
        ops=TritonOps(),
        progress=False,
    )
    assert {str(m.format) for m in model.modules() if isinstance(m, TritonWeight)} == {
        "int4-g128",
        "int8-g32",
    }
    assert all(p.dim() == 1 for p in model.parameters())  # norms and biases


PROMPTS = [[(7 * i + 3 * k) % 250 for k in range(5 + 9 * i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OPTIONS = dict(max_model_len=200, max_num_seqs=8, num_gpu_blocks_override=40, progress=False)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("name", ["int8", "fp8-a16", "int4-g32", "int4-g128-asym"])
def test_tokens(name: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's, whose steps are graphs, against plain PyTorch's."""

    def tokens() -> list[list[int]]:
        llm = LLM(
            tiny.model_dir(architecture),
            quantization=name,
            dtype="float32",
            device="cuda",
            **OPTIONS,
        )
        return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    got = tokens()
    monkeypatch.setattr("octavo.assemble.select", lambda *_: ReferenceOps())
    assert got == tokens()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int8-a8", "fp8", "fp8-a16", "int4-g128", "int8-g32"])
def test_random_weights_in_bfloat16(name: str) -> None:
    """As benchmarks load them. Every sequence gets its tokens."""
    llm = LLM(
        tiny.model_dir("qwen3"),
        load_format="dummy",
        quantization=name,
        dtype="bfloat16",
        device="cuda",
        **OPTIONS,
    )
    assert [len(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == [
        12
    ] * len(PROMPTS)


@pytest.mark.gpu
def test_a_quantised_checkpoint_runs_from_its_own_codes(tmp_path: Path) -> None:
    quantized_files.write(
        open_checkpoint(tiny.model_dir()), quant.FORMATS["int4-g32"], tmp_path / "small"
    )
    llm = LLM(str(tmp_path / "small"), device="cuda", **OPTIONS)
    assert {str(m.format) for m in llm.model.modules() if isinstance(m, TritonWeight)} == {
        "int4-g32",
        "int8-g32",
    }
