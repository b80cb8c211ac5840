"""A GGUF file's own blocks are the model's weights: rounded only where the CPU's kernels ask for
it, and never unpacked whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.model.base import CausalLM
from octavo.model.dequant import CODED, FORMATS
from octavo.model.load import LoadOptions, load_model
from octavo.ops import Ops
from octavo.ops.cpu import CpuOps
from octavo.ops.cpu.cpu_features import instruction_set
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import JoinedWeight, QuantWeight
from tests.batch import empty_kv, make_batch, scattered_tables
from tests.conftest import DEVICE
from tests.model.test_quant import gguf_blocks

gguf = pytest.importorskip("gguf")
needs_kernels = pytest.mark.skipif(
    isinstance(instruction_set(), str), reason=str(instruction_set())
)
KINDS = {FORMATS[kind].name: kind for kind in CODED}
ROWS = {
    "attn_q": 256,
    "attn_k": 128,
    "attn_v": 128,
    "attn_output": 256,
    "ffn_gate": 256,
    "ffn_up": 256,
    "ffn_down": 256,
}
# As llama.cpp's Q4_K_M: some of v and down, and the head, have more bits. In layer 1 a format each.
MIXED = {"token_embd": "Q6_K", "blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "blk.1.attn_q": "Q8_0", "blk.1.attn_k": "Q4_0",
         "blk.1.attn_v": "Q5_K", "blk.1.ffn_gate": "Q2_K", "blk.1.ffn_up": "Q3_K", "blk.1.ffn_down": "Q5_0",
         "blk.1.attn_output": "Q5_1"}  # fmt: skip
CHUNKS = [([5, 60, 17, 3], 0), ([42], 0)]


def write(path: Path, kinds: dict[str, str], default: str = "Q4_K") -> Path:
    """A Llama of two layers whose matrices are random blocks of these kinds."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"embedding_length": 256, "block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2,
             "feed_forward_length": 256, "context_length": 128, "rope.dimension_count": 64}  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    layers = {f"blk.{i}.{name}": rows for i in range(2) for name, rows in ROWS.items()}
    for name, rows in ({"token_embd": 64} | layers).items():
        kind = KINDS[kinds.get(name, default)]
        form = FORMATS[kind]
        data = gguf_blocks(kind, rows * 256 // form.values, size=2e-4).numpy().reshape(rows, -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType(kind))
    for name in (
        "output_norm",
        *(f"blk.{i}.{norm}" for i in range(2) for norm in ("attn_norm", "ffn_norm")),
    ):
        writer.add_tensor(f"{name}.weight", np.ones(256, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, ops: Ops, quantization: str = "auto") -> CausalLM:
    return load_model(
        path,
        LoadOptions(dtype="float32", device=DEVICE, quantization=quantization),
        ops=ops,
        progress=False,
    )[0]


def logits(model: CausalLM) -> Tensor:
    tables = scattered_tables([len(ids) for ids, _ in CHUNKS], 8)
    with torch.inference_mode():
        hidden = model(
            make_batch(CHUNKS, tables, 8, DEVICE), empty_kv(model.config, tables, 8, DEVICE)
        )
        # one row alone is another kernel's
        return torch.cat([model.logits(hidden), model.logits(hidden[-1:])])


def forms(model: CausalLM) -> dict[str, str]:
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, JoinedWeight):
            found[name] = " ".join(str(part.format) for part in weight.parts)
        elif hasattr(weight, "format"):
            found[name] = str(weight.format)
    return found


EXACT = {
    "embed": "int8-g16-f32",
    "layers.0.qkv": "int4-g32-asym-f32 int4-g32-asym-f32 int8-g16-f32",
    "layers.0.out": "int4-g32-asym-f32",
    "layers.0.gate_up": "int4-g32-asym-f32",
    "layers.0.down": "int8-g16-f32",
    "layers.1.qkv": "int8-g32 int4-g32 int8-g32-asym-f32",
    "layers.1.out": "int8-g32-asym",
    "layers.1.gate_up": "int8-g16-asym-f32 int8-g16-f32",
    "layers.1.down": "int8-g32",
}


def test_every_matrix_has_the_format_its_tensors_have(tmp_path: Path) -> None:
    """Layer by layer, and where several tensors make one matrix, part by part."""
    path = write(tmp_path / "m.gguf", MIXED)
    kept, plain = load(path, ReferenceOps()), load(path, ReferenceOps(), "none")
    assert forms(kept) == EXACT
    for name in EXACT:
        weight = kept.get_submodule(name).weight
        assert torch.equal(weight.dequantize(), plain.get_submodule(name).weight), name
    torch.testing.assert_close(logits(kept), logits(plain), atol=0, rtol=0)


@pytest.mark.parity
def test_triton_computes_what_the_file_says(tmp_path: Path) -> None:
    triton = pytest.importorskip("octavo.ops.triton")
    path = write(tmp_path / "m.gguf", MIXED)
    model, plain = load(path, triton.TritonOps()), load(path, ReferenceOps(), "none")
    assert forms(model) == EXACT and all(p.dim() == 1 for p in model.parameters())
    want = logits(plain)
    torch.testing.assert_close(logits(model), want, atol=2e-5 * float(want.abs().max()), rtol=2e-5)


@needs_kernels
def test_on_a_cpu_four_bits_stay_four_and_the_rest_becomes_eight(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MIXED)
    model, plain = load(path, CpuOps()), load(path, ReferenceOps(), "none")
    four, eight = "int4-g32-asym", "int8-g32"
    assert forms(model) == {
        "embed": eight, "layers.0.qkv": eight, "layers.0.out": four, "layers.0.gate_up": four, "layers.0.down": eight,
        "layers.1.qkv": eight, "layers.1.out": eight, "layers.1.gate_up": eight, "layers.1.down": eight,
    }  # fmt: skip
    off = (logits(model) - (want := logits(plain))).norm() / want.norm()
    assert off < 0.03  # activations are rounded to 8 bits too


@pytest.mark.parametrize("ops", [ReferenceOps(), CpuOps()], ids=lambda ops: ops.name)
@needs_kernels
def test_a_matrix_of_one_kind_is_never_unpacked(
    ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks become codes a few at a time."""

    def whole(*_: object) -> Tensor:
        raise AssertionError("dequantised")

    path = write(tmp_path / "m.gguf", {"token_embd": "Q4_0"})
    monkeypatch.setattr("octavo.model.gguf.dequantize", whole)
    monkeypatch.setattr(QuantWeight, "dequantize", whole)
    assert set(forms(load(path, ops)).values()) >= {"int4-g32"}
