"""Weight formats: what they hold, what they lose, and that what is quantised already comes in
unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.bench.measure_quant import measure
from octavo.errors import CheckpointError, InvalidRequest
from octavo.model import embedded, quant
from octavo.model import quantized as quantized_files
from octavo.model.dequant import CODED, FORMATS, as_codes, dequantize
from octavo.model.load import LoadOptions, load_model, open_checkpoint
from octavo.ops.backends import select
from octavo.ops.cpu.cpu_features import instruction_set
from octavo.ops.kv import CODES
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import QuantWeight, WeightFormat
from tests import tiny
from tests.batch import empty_kv, make_batch, scattered_tables

installed = pytest.mark.skipif(
    embedded.find_spec(embedded.PACKAGE) is None, reason=embedded.INSTALL
)
needs_kernels = pytest.mark.skipif(
    isinstance(instruction_set(), str), reason=str(instruction_set())
)
# Largest relative error of normal values: a step is the range over the number of codes.
ERRORS = {
    "int8": 0.02, "int8-a8": 0.02, "int8-g32": 0.007, "fp8": 0.04, "fp8-a16": 0.04, "int4-g32": 0.1, "int4-g64": 0.11, "int4-g128": 0.13,
    "int4-g32-asym": 0.09, "int4-g64-asym": 0.1, "int4-g128-asym": 0.12,
}  # fmt: skip


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gguf_blocks(kind: int, count: int, size: float = 0.02) -> torch.Tensor:
    """Bytes of that many blocks: any codes, scales that are numbers of about this size."""
    form, generator = FORMATS[kind], torch.Generator().manual_seed(kind)
    blocks = torch.randint(0, 256, (count, form.nbytes), dtype=torch.uint8, generator=generator)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(
        form.name, (0, 2) if CODED[kind].asymmetric else (0,)
    ):
        scale = torch.rand(count, 1, generator=generator) * size + size / 20
        blocks[:, at : at + 2] = scale.half().view(torch.uint8)
    return blocks.flatten()


def quantized(name: str, weight: torch.Tensor) -> QuantWeight:
    target = QuantWeight.empty(quant.FORMATS[name], *weight.shape)
    quant.fill(target, weight)
    return target


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 31), (17, 100), (40, 257), (5, 640)])
def test_a_format_loses_no_more_than_its_steps(name: str, outputs: int, inputs: int) -> None:
    weight = values(outputs, inputs)
    got = quantized(name, weight).dequantize()
    assert got.shape == weight.shape
    assert (got - weight).norm() <= ERRORS[name] * weight.norm()


@pytest.mark.parametrize("name", ERRORS)
def test_names_are_read_and_written(name: str) -> None:
    form = quant.parse(name)
    assert isinstance(form, WeightFormat) and str(form) == name


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(
        InvalidRequest,
        match=r"quantization \(--quant\) must be one of auto, none, int8, .*int4-g64.*, not 'int3'",
    ):
        quant.parse("int3")


@pytest.mark.parametrize("name", ERRORS)
def test_quantising_twice_changes_nothing(name: str) -> None:
    once = quantized(name, values(20, 96))
    again = QuantWeight.empty(once.format, 20, 96)
    quant.fill(again, once)
    assert torch.equal(once.dequantize(), again.dequantize())


@pytest.mark.parametrize("name", ERRORS)
def test_rows_are_filled_part_by_part(name: str) -> None:
    weight, parts = values(30, 70), QuantWeight.empty(quant.FORMATS[name], 30, 70)
    for rows in (slice(0, 11), slice(11, 30)):
        quant.fill(parts[rows], weight[rows])
    assert torch.equal(parts.dequantize(), quantized(name, weight).dequantize())


def test_zeros_stay_zeros_and_one_outlier_stays() -> None:
    weight = torch.zeros(4, 64)
    weight[1, 5] = -3.0
    for name in ERRORS:
        got = quantized(name, weight).dequantize()
        assert torch.equal(got[0], weight[0])
        assert abs(float(got[1, 5]) + 3) < 0.05


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: FORMATS[kind].name)
def test_blocks_of_gguf_are_taken_over_exactly(kind: int) -> None:
    """Every bit as the library that belongs to llama.cpp has it; in more blocks than are unpacked
    at a time."""
    gguf = pytest.importorskip("gguf")
    data, inputs = gguf_blocks(kind, 603), 3 * FORMATS[kind].values
    want = torch.from_numpy(
        gguf.quants.dequantize(
            data.numpy().reshape(-1, FORMATS[kind].nbytes), gguf.GGMLQuantizationType(kind)
        )
    )
    got = as_codes(data, kind, inputs)
    assert got.shape == (201, inputs) and got.format == CODED[kind]
    assert torch.equal(
        got.dequantize().flatten().view(torch.int32), want.flatten().contiguous().view(torch.int32)
    )
    assert torch.equal(
        dequantize(data, kind).view(torch.int32), want.flatten().contiguous().view(torch.int32)
    )


def test_k_blocks_lose_less_as_four_bits_with_float16_scales_than_as_eight_bits_anew() -> None:
    """Why a CPU, whose kernels read scales of float16, gets them so."""
    exact = as_codes(gguf_blocks(12, 300), 12, 768)
    assert quant.for_cpu(exact.format) == quant.FORMATS["int4-g32-asym"]
    four, eight = (
        QuantWeight.empty(form, *exact.shape)
        for form in (quant.for_cpu(exact.format), quant.EDGE_FORMAT)
    )
    quant.fill(four, exact)
    quant.fill(eight, exact.dequantize())
    off = [
        float((w.dequantize() - exact.dequantize()).norm() / exact.dequantize().norm())
        for w in (four, eight)
    ]
    assert off[0] < 5e-4 and off[0] < off[1] / 5 and torch.equal(four.codes, exact.codes)


def test_scales_beyond_float16_are_refused_not_made_infinite() -> None:
    exact = as_codes(gguf_blocks(12, 1), 12, 256)
    exact.scale[0, 3] = 1e6
    with pytest.raises(CheckpointError, match="float16 cannot hold"):
        quant.fill(QuantWeight.empty(quant.for_cpu(exact.format), 1, 256), exact)


@installed
@needs_kernels
def test_the_embedded_model_runs_from_its_own_blocks() -> None:
    model, checkpoint = load_model(
        None, LoadOptions(dtype="float32", quantization="auto"), ops=ReferenceOps(), progress=False
    )
    assert {str(m.format) for m in model.modules() if isinstance(m, QuantWeight)} == {
        "int4-g32-asym",
        "int8-g32",
    }
    layer = model.layers[7]
    for name, part in {"q_proj": layer.qkv.weight[:576], "v_proj": layer.qkv.weight[768:]}.items():
        assert torch.equal(
            part.dequantize(), checkpoint.read(f"model.layers.7.self_attn.{name}.weight")
        )
    assert torch.equal(
        model.embed.weight.dequantize(), checkpoint.read("model.embed_tokens.weight")
    )
    assert (
        sum(b.numel() * b.element_size() for b in model.buffers())
        < 1.05 * Path(open_checkpoint(None).source).stat().st_size
    )


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * k) % 250 for k in range(5 + 9 * i)] for i in range(6)]


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("name", ["int8", "int4-g32"])
def test_tokens_do_not_depend_on_the_schedule(architecture: str, name: str) -> None:
    """Chunked, batched, preempted, in flight: a row's arithmetic is the same, so its tokens are."""
    seen = set()
    for options in (
        dict(max_num_seqs=1),
        dict(),
        dict(max_num_batched_tokens=9, depth=2),
        dict(num_gpu_blocks_override=19, block_size=4, enable_prefix_caching=False, depth=2),
    ):
        options = {
            "max_model_len": 200,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 200,
            "progress": False,
            **options,
        }
        llm = LLM(tiny.model_dir(architecture), quantization=name, **options)
        seen.add(
            str([o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
        )
    assert len(seen) == 1


# Sizes that are no multiples of a vector: the layers are computed op by op, with heads of 12 that
# are padded.
ODD_LLAMA = dict(
    architectures=["LlamaForCausalLM"], vocab_size=300, hidden_size=72, intermediate_size=100, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=256,
)  # fmt: skip
GPT2_CONFIG = dict(
    architectures=["GPT2LMHeadModel"], vocab_size=300, n_embd=64, n_layer=3, n_head=4, n_positions=256
)  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("name", ["int8", "int4-g32"])
@pytest.mark.parametrize("config", [ODD_LLAMA, GPT2_CONFIG], ids=["llama", "gpt2"])
def test_op_by_op_a_rows_hidden_states_do_not_depend_on_chunks(
    config: dict[str, Any], name: str, kv: str
) -> None:
    """Compares bits, not tokens: a difference in the last bit changes one token of thousands."""
    model, _ = load_model(
        config,
        LoadOptions(dtype="float32", load_format="dummy", quantization=name),
        ops=select("cpu"),
    )
    assert getattr(model, "fused", None) is None
    lengths = [70, 33]
    tables = scattered_tables(lengths, 16)
    ids = torch.randint(0, 300, (max(lengths),), generator=torch.Generator().manual_seed(3))

    def run(chunk: int) -> list[torch.Tensor]:
        cache = empty_kv(model.config, tables, 16, "cpu", CODES.get(kv, torch.float32))
        hidden: list[list[torch.Tensor]] = [[] for _ in lengths]
        for first in range(0, max(lengths), chunk):
            live = [i for i, length in enumerate(lengths) if first < length]
            parts = [(ids[first : min(first + chunk, lengths[i])].tolist(), first) for i in live]
            batch = make_batch(parts, [tables[i] for i in live], 16, "cpu")
            out = model(batch, cache)
            for i, span in zip(live, batch.spans, strict=True):
                hidden[i].append(out[span.first : span.first + span.num].clone())
        return [torch.cat(pieces) for pieces in hidden]

    whole = run(max(lengths))
    for chunk in (1, 7, 16):
        for got, want in zip(run(chunk), whole, strict=True):
            assert torch.equal(got, want)


# ---- as files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4-g32-asym", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_a_quantised_checkpoint_equals_quantising_on_the_fly(
    architecture: str, name: str, tmp_path: Path
) -> None:
    source = tiny.model_dir(architecture)
    quantized_files.write(open_checkpoint(source), quant.FORMATS[name], tmp_path / "small")
    options = dict(max_model_len=100, num_gpu_blocks_override=40, progress=False)
    on_the_fly = LLM(source, quantization=name, **options)
    stored = LLM(str(tmp_path / "small"), quantization=name, **options)
    want = on_the_fly.generate(PROMPTS, GREEDY, use_tqdm=False)
    got = stored.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    assert stored.memory.weights == on_the_fly.memory.weights


def test_every_matrix_of_gpt2_is_quantised_in_the_file(tmp_path: Path) -> None:
    source = open_checkpoint(tiny.model_dir("gpt2"))
    quantized_files.write(source, quant.FORMATS["int8"], tmp_path / "small")
    small = tmp_path / "small"
    listed = json.loads((small / "config.json").read_text())["quantization_config"]["weights"]
    matrices = [name for name, tensor in source.tensors.items() if len(tensor.shape) == 2]
    assert sorted(listed) == sorted(matrices)
    assert listed["transformer.h.0.mlp.c_fc.weight"] == ["int8", 32]
    assert listed["transformer.h.0.mlp.c_proj.weight"] == ["int8", 128]
    assert open_checkpoint(small).nbytes < 0.4 * source.nbytes
    modes = {path.name: path.stat().st_mode for path in small.iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_a_head_of_its_own_is_quantised_and_untied_in_the_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny.model_dir("qwen2"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    quantized_files.write(open_checkpoint(source), quant.FORMATS["int8"], tmp_path / "small")
    written = json.loads((tmp_path / "small" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    assert "lm_head.weight" in written["quantization_config"]["weights"]


def test_without_kernels_a_quantised_checkpoint_is_dequantised(tmp_path: Path) -> None:
    source = open_checkpoint(tiny.model_dir())
    quantized_files.write(source, quant.FORMATS["int8"], tmp_path / "small")
    name = "model.layers.1.mlp.up_proj.weight"
    got = open_checkpoint(tmp_path / "small").read(name)
    assert torch.equal(got, quantized("int8", source.read(name).float()).dequantize())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda about: about["weights"].update({"model.norm.weight": ["int8", 32]}),
            "model.norm.weight in format int8 needs",
        ),
        (lambda about: about.update(weights=3), "has no list of weights"),
        (
            lambda about: about["weights"].update({"model.embed_tokens.weight": ["int5", 32]}),
            "has no valid format for",
        ),
        (
            lambda about: about["weights"].update({"model.embed_tokens.weight": [["int8"], 32]}),
            "has no valid format for",
        ),
        (
            lambda about: about["weights"].update({"model.embed_tokens.weight": ["int8", 31]}),
            "needs codes, scale of 300 rows",
        ),
    ],
)
def test_damage_is_told(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    quantized_files.write(
        open_checkpoint(tiny.model_dir()), quant.FORMATS["int8"], tmp_path / "small"
    )
    path = tmp_path / "small" / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "small")


# ---- on real text --------------------------------------------------------------------------------


@installed
@needs_kernels
@pytest.mark.slow
def test_perplexity_stays_near_full_precision() -> None:
    def load(name: str) -> LLM:
        return LLM(
            quantization=name,
            max_model_len=600,
            num_gpu_blocks_override=80,
            enable_prefix_caching=False,
            progress=False,
        )

    rows = {
        r["format"]: r["perplexity_ratio"]
        for r in measure(load, ("auto", "int8", "int4-g32-asym"), 1, 3, 512)
    }
    assert rows["auto"] < 1.02 and rows["int8"] < 1.02 and rows["int4-g32-asym"] < 1.06
