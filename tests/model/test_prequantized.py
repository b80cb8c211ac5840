"""Checkpoints quantised by GPTQ, AWQ and compressed-tensors mean here what their makers say they
mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.model.load import LoadOptions, load_model, open_checkpoint
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import QuantWeight

CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=40, max_position_embeddings=64, torch_dtype="float16",
)  # fmt: skip
LAYER = "model.layers.0."
MATRICES = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
}  # fmt: skip
# which of eight outputs the i-th four bits of an int32 are
AWQ_POSITIONS = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(codes: Tensor, order: list[int] | None = None) -> Tensor:
    """[n, 8 m] -> int32 [n, m]; code by code."""
    n, width = codes.shape
    out = torch.zeros(n, width // 8, dtype=torch.int64)
    for i in range(8):
        out |= codes[:, (order[i] if order else i) :: 8].long() << 4 * i
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


class Made:
    """Random weights [out, in] as a method stores them, and what they are worth."""

    def __init__(self, outputs: int, inputs: int, group: int, symmetric: bool, seed: int):
        g = torch.Generator().manual_seed(seed)
        groups = inputs // group
        self.group, self.inputs = group, inputs
        self.codes = torch.randint(0, 16, (outputs, inputs), generator=g)
        # GPTQ's first version cannot say that a zero is 0. compressed-tensors has bfloat16 scales.
        self.zeros = (
            torch.full((outputs, groups), 8)
            if symmetric
            else torch.randint(1, 16, (outputs, groups), generator=g)
        )
        self.scale = (torch.rand(outputs, groups, generator=g) * 0.01 + 0.001).half()
        if symmetric:
            self.scale = self.scale.bfloat16().half()
        zeros, scale = (t.repeat_interleave(group, 1).float() for t in (self.zeros, self.scale))
        self.values = (self.codes.float() - zeros) * scale

    def gptq(self, add: int = 1) -> dict[str, Tensor]:
        return {
            "qweight": packed(self.codes).t().contiguous(),
            "qzeros": packed((self.zeros - add).t() % 16),
            "scales": self.scale.t().contiguous(),
            "g_idx": (torch.arange(self.inputs) // self.group).to(torch.int32),
        }

    def awq(self) -> dict[str, Tensor]:
        return {
            "qweight": packed(self.codes.t(), AWQ_POSITIONS),
            "qzeros": packed(self.zeros.t(), AWQ_POSITIONS),
            "scales": self.scale.t().contiguous(),
        }

    def compressed(self) -> dict[str, Tensor]:
        shape = torch.tensor(self.codes.shape)
        return {
            "weight_packed": packed(self.codes),
            "weight_scale": self.scale.bfloat16(),
            "weight_shape": shape,
        }


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
            },
        }
    },
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CASES: dict[str, tuple[dict[str, Any], bool, Callable[[Made], dict[str, Tensor]]]] = {
    "gptq": (GPTQ, True, Made.gptq),
    "gptq-asym": (GPTQ | {"sym": False}, False, Made.gptq),
    "gptq-v2": (
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        False,
        lambda made: made.gptq(add=0),
    ),
    "awq": (AWQ, False, Made.awq),
    "compressed-tensors": (COMPRESSED, True, Made.compressed),
}


def write(
    path: Path, about: dict[str, Any], symmetric: bool, store: Callable[[Made], dict[str, Tensor]]
) -> dict[str, Made]:
    tensors = {
        f"{LAYER}{n}.weight": torch.ones(64)
        for n in ("input_layernorm", "post_attention_layernorm")
    }
    tensors |= {
        "model.norm.weight": torch.ones(64),
        "model.embed_tokens.weight": torch.randn(40, 64),
    }
    tensors["lm_head.weight"] = torch.randn(40, 64)
    made = {}
    for seed, (name, shape) in enumerate(MATRICES.items()):
        made[name] = Made(*shape, 32, symmetric, seed)
        tensors |= {f"{LAYER}{name}.{part}": tensor for part, tensor in store(made[name]).items()}
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": about}))
    return made


@pytest.mark.parametrize("case", CASES)
def test_dequantised_they_are_what_was_meant(case: str, tmp_path: Path) -> None:
    made = write(tmp_path, *CASES[case])
    checkpoint = open_checkpoint(tmp_path)
    for name, weight in made.items():
        assert torch.equal(checkpoint.read(f"{LAYER}{name}.weight"), weight.values)


@pytest.mark.parametrize("case", CASES)
def test_as_codes_they_lose_nothing_or_next_to_nothing(case: str, tmp_path: Path) -> None:
    """Symmetric ones nothing. Else a group's least value is rounded: by less than 0.8% of a
    step."""
    made = write(tmp_path, *CASES[case])
    tensors = open_checkpoint(tmp_path).tensors
    for name, weight in made.items():
        stored = tensors[f"{LAYER}{name}.weight"]
        assert stored.codes is not None
        got, step = stored.codes().dequantize(), weight.scale.float().repeat_interleave(32, 1)
        if CASES[case][1]:
            assert torch.equal(got, weight.values)
        else:
            assert float(((got - weight.values).abs() / step).max()) < 0.008


@pytest.mark.parametrize("case", CASES)
def test_models_run_from_the_codes(case: str, tmp_path: Path) -> None:
    made = write(tmp_path, *CASES[case])
    model, _ = load_model(
        tmp_path,
        LoadOptions(device="cpu", dtype="float32", quantization="auto"),
        ops=ReferenceOps(),
        progress=False,
    )
    forms = {str(m.format) for m in model.modules() if isinstance(m, QuantWeight)}
    if forms:  # where this machine has kernels for them
        assert forms == {"int4-g32" if CASES[case][1] else "int4-g32-asym"}
        values = model.layers[0].down.weight.dequantize()
        assert (values - made["mlp.down_proj"].values).abs().max() < 1e-4
    plain, _ = load_model(
        tmp_path,
        LoadOptions(device="cpu", dtype="float32", quantization="none"),
        ops=ReferenceOps(),
        progress=False,
    )
    assert torch.equal(plain.layers[0].down.weight, made["mlp.down_proj"].values)


def changed(about: dict[str, Any], **fields: Any) -> dict[str, Any]:
    about = json.loads(json.dumps(about))
    target = (
        about["config_groups"]["group_0"]["weights"]
        if "config_groups" in about and "format" not in fields
        else about
    )
    return (target.update(fields) or about) if fields else about


@pytest.mark.parametrize(
    ("case", "about", "message"),
    [
        ("gptq", changed(GPTQ, desc_act=True), "has desc_act True, but only False is supported"),
        ("gptq", changed(GPTQ, bits=3), "has bits 3, but only 4 is supported"),
        ("gptq", changed(GPTQ, group_size=-1), "has group_size -1, but only 32 or 64 or 128"),
        ("gptq", changed(GPTQ, checkpoint_format="marlin"), "has checkpoint_format 'marlin'"),
        ("awq", changed(AWQ, version="gemv"), "has version 'gemv', but only 'gemm' is supported"),
        ("compressed-tensors", changed(COMPRESSED, symmetric=False), "has symmetric False"),
        (
            "compressed-tensors",
            changed(COMPRESSED, actorder="group"),
            "has actorder 'group', but only None",
        ),
        ("compressed-tensors", changed(COMPRESSED, num_bits=8), "has num_bits 8"),
        (
            "compressed-tensors",
            changed(COMPRESSED, format="int-quantized"),
            "has format 'int-quantized'",
        ),
        (
            "compressed-tensors",
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "must describe one format",
        ),
        (
            "awq",
            {"quant_method": "bitsandbytes"},
            "method 'bitsandbytes' is not supported, only octavo, gptq, awq",
        ),
    ],
)
def test_what_is_not_read_is_told(
    case: str, about: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, about, *CASES[case][1:])
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def spoil(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )


Q = f"{LAYER}self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t[f"{Q}.g_idx"].copy_(t[f"{Q}.g_idx"].flip(0)),
            "groups in activation order \\(desc_act\\)",
        ),
        (lambda t: t[f"{Q}.qzeros"].fill_(0), "zeros other than 8"),
        (
            lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].float() / 3}),
            "scales that float16 cannot hold",
        ),
        (
            lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"].float()}),
            "must have int32 codes and floating-point scales",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_told(
    change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, *CASES["gptq"])
    spoil(tmp_path, change)
    stored = open_checkpoint(tmp_path).tensors[f"{Q}.weight"]
    assert stored.codes is not None
    with pytest.raises(CheckpointError, match=message):
        stored.codes()


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("scales", lambda tensor: tensor[:1]),
        ("qzeros", lambda tensor: tensor.flatten()),
        ("qweight", lambda tensor: tensor.flatten()),
        ("qweight", lambda tensor: tensor[:-1]),
        ("g_idx", lambda tensor: tensor[:-1]),
    ],
)
def test_parts_whose_shapes_contradict_each_other_are_told(
    part: str, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    write(tmp_path, *CASES["gptq"])
    spoil(tmp_path, lambda t: t.update({f"{Q}.{part}": change(t[f"{Q}.{part}"])}))
    with pytest.raises(CheckpointError, match="shapes do not fit a weight with groups of 32"):
        open_checkpoint(tmp_path)


def test_a_part_that_is_missing_is_told(tmp_path: Path) -> None:
    write(tmp_path, *CASES["awq"])
    spoil(tmp_path, lambda t: t.pop(f"{Q}.qzeros"))
    with pytest.raises(
        CheckpointError, match=r"q_proj.qweight, but lacks qzeros of the same weight"
    ):
        open_checkpoint(tmp_path)
