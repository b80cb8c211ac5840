"""Checkpoints of fp8 weights, as AutoFP8, compressed-tensors, DeepSeek and Qwen3 ship them, compute
what a plain model computes that rounds weights and activations in the same places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from octavo.model.load import LoadOptions, load_model, open_checkpoint
from octavo.ops.backends import select
from octavo.ops.weight import QuantWeight
from tests.batch import empty_kv, make_batch, scattered_tables
from tests.conftest import DEVICE

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

TOKENS = [3, 50, 7, 21, 90, 11, 4, 66, 2, 35, 18, 80]
BLOCK = 128
CONFIG: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=256,
    intermediate_size=320,  # two blocks and a half
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,  # 64 outputs: half a block
    max_position_embeddings=128,
    tie_word_embeddings=False,
)


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"dynamic": False} | weights,
        "input_activations": None if activations is None else common | activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
TOKEN = {"strategy": "token", "dynamic": True}
GROUP = {"strategy": "group", "group_size": BLOCK, "dynamic": True}
STATIC = {"strategy": "tensor", "dynamic": False}
IN_BLOCKS = {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
# quantization_config, and what has a scale: of weights, of activations
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp8-dynamic": (FP8, "tensor", "token"),
    "fp8-static": (FP8 | {"activation_scheme": "static"}, "tensor", "static"),
    "fp8-blocks": (BLOCKS, "block", "group"),
    "compressed-channel-token": (compressed({"strategy": "channel"}, TOKEN), "channel", "token"),
    "compressed-tensor-static": (compressed({"strategy": "tensor"}, STATIC), "tensor", "static"),
    "compressed-blocks": (compressed(IN_BLOCKS, GROUP), "block", "group"),
    "compressed-weights-only": (compressed({"strategy": "channel"}, None), "channel", "none"),
}
FORMATS = {
    "fp8-dynamic": "fp8-f32",
    "fp8-static": "fp8-static-f32",
    "fp8-blocks": "fp8-g128-f32",
    "compressed-channel-token": "fp8-f32",
    "compressed-tensor-static": "fp8-static-f32",
    "compressed-blocks": "fp8-g128-f32",
    "compressed-weights-only": "fp8-a16-f32",
}


def e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


class PlainLinear(nn.Module):
    """A product in float64 that rounds as a format says, with scales that are computed one by one."""

    def __init__(self, linear: nn.Linear, weights: str, activations: str, input_scale: float):
        super().__init__()
        self.activations, self.input_scale = activations, input_scale
        weight = linear.weight.detach()
        outputs, inputs = weight.shape
        tall = {"tensor": outputs, "channel": 1, "block": BLOCK}[weights]
        wide = BLOCK if weights == "block" else inputs
        self.codes = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
        self.values = torch.empty(outputs, inputs, dtype=torch.float64)
        self.scale = torch.empty(-(-outputs // tall), -(-inputs // wide))
        for i in range(self.scale.shape[0]):
            for j in range(self.scale.shape[1]):
                place = slice(i * tall, (i + 1) * tall), slice(j * wide, (j + 1) * wide)
                scale = (weight[place].abs().max() / 448).bfloat16().float()
                self.scale[i, j] = scale
                self.codes[place] = e4m3(weight[place] / scale)
                self.values[place] = self.codes[place].double() * scale.double()

    def rounded(self, row: Tensor) -> Tensor:
        if self.activations == "none":
            return row.double()
        wide = BLOCK if self.activations == "group" else len(row)
        parts = []
        for part in row.split(wide):
            scale = part.abs().max() / 448
            if self.activations == "static":
                scale = torch.tensor(self.input_scale)
            parts.append(e4m3(part / scale).double() * scale.double())
        return torch.cat(parts)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = [self.rounded(row) for row in hidden.flatten(0, -2)]
        return (torch.stack(rows) @ self.values.T).view(*hidden.shape[:-1], -1).float()

    def stored(self, scale_name: str) -> dict[str, Tensor]:
        scale = self.scale if self.scale.numel() > 1 else self.scale.flatten()
        found = {"weight": self.codes, scale_name: scale.bfloat16().clone()}
        if self.activations == "static":
            found["input_scale"] = torch.tensor([self.input_scale])
        return found


def write(path: Path, case: str) -> nn.Module:
    """Write a random model, and return it with plain products that round in the same places."""
    about, weights, activations = CASES[case]
    torch.manual_seed(7)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG, head_dim=64)).float()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scale_name = "weight_scale_inv" if case == "fp8-blocks" else "weight_scale"
    # q, k and v have the same input, and gate and up too: all of them use the largest scale
    scales = {
        "q": 0.011,
        "k": 0.009,
        "v": 0.01,
        "o": 0.0005,
        "gate": 0.01,
        "up": 0.011,
        "down": 2e-5,
    }
    for number, layer in enumerate(model.model.layers):
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if not isinstance(linear, nn.Linear):
                    continue
                short = name.removesuffix("_proj")
                group = {"k": "q", "v": "q", "gate": "up"}.get(short, short)
                plain = PlainLinear(linear, weights, activations, scales[group])
                setattr(parent, name, plain)
                home = "self_attn" if parent is layer.self_attn else "mlp"
                prefix = f"model.layers.{number}.{home}.{name}"
                stored = plain.stored(scale_name)
                if "input_scale" in stored:
                    stored["input_scale"] = torch.tensor([scales[short]])
                tensors |= {f"{prefix}.{part}": tensor for part, tensor in stored.items()}
        tensors[f"model.layers.{number}.self_attn.k_scale"] = torch.ones(1)
        tensors[f"model.layers.{number}.self_attn.v_scale"] = torch.ones(1)
    save_file(tensors, path / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": about, "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    return model


def our_logits(path: Path, quantization: str, kv_dtype: torch.dtype = torch.float32) -> Tensor:
    options = LoadOptions(device=DEVICE, dtype="float32", quantization=quantization)
    model, _ = load_model(path, options, ops=select(DEVICE), progress=False)
    tables = scattered_tables([len(TOKENS)], 4)
    kv = empty_kv(model.config, tables, 4, DEVICE, kv_dtype)
    with torch.inference_mode():
        prompt = make_batch([(TOKENS[:-2], 0)], tables, 4, DEVICE)
        logits = [model.logits(model(prompt, kv))]
        for position in (len(TOKENS) - 2, len(TOKENS) - 1):
            step = make_batch([(TOKENS[position : position + 1], position)], tables, 4, DEVICE)
            logits.append(model.logits(model(step, kv)))
    return torch.cat(logits).float().cpu()


def distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_are_those_of_a_plain_model_that_rounds_alike(case: str, tmp_path: Path) -> None:
    """A row that is one unit off in its last bit may be rounded to the next code: hence 2e-3. Where
    activations are rounded at all, not to round them is much further away."""
    plain = write(tmp_path, case)
    want = plain(torch.tensor([TOKENS])).logits[0]
    assert distance(our_logits(tmp_path, "auto"), want) < 2e-3
    assert distance(our_logits(tmp_path, "fp8"), want) < 2e-3, "vLLM's name of a stored format"
    exact = distance(our_logits(tmp_path, "none"), want)
    assert exact < 1e-5 if CASES[case][2] == "none" else exact > 1e-2
    # compressed KV beside it
    assert distance(our_logits(tmp_path, "auto", torch.float8_e4m3fn), want) < 0.1


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_kept(case: str, tmp_path: Path) -> None:
    plain = write(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    for number, layer in enumerate(plain.model.layers):
        stored = checkpoint.tensors[f"model.layers.{number}.mlp.down_proj.weight"]
        assert str(stored.format) == FORMATS[case] and stored.codes is not None
        assert torch.equal(stored.codes().dequantize().double(), layer.mlp.down_proj.values)
    options = LoadOptions(device="cpu", dtype="float32", quantization="auto")
    model, _ = load_model(tmp_path, options, ops=select("cpu"), progress=False)
    formats = {str(part.format) for part in model.modules() if isinstance(part, QuantWeight)}
    assert formats == {FORMATS[case]}


@pytest.mark.parametrize("case", ["compressed-channel-token", "fp8-static", "fp8-blocks"])
def test_a_model_generates_the_same_alone_and_in_a_batch(case: str, tmp_path: Path) -> None:
    write(tmp_path, case)
    options: dict[str, Any] = dict(device="cpu", dtype="bfloat16", kv_cache_dtype="fp8")
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, **options)
    scales = [m.input_scale for m in llm.model.modules() if isinstance(m, QuantWeight)]
    assert {scale.dtype for scale in scales if scale is not None} <= {torch.float32}
    prompts = [{"prompt_token_ids": TOKENS[:count]} for count in (3, 7, 12)]
    params = SamplingParams(temperature=0, max_tokens=8)
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize(
    ("case", "about", "message"),
    [
        ("fp8-dynamic", FP8 | {"fmt": "e5m2"}, "fmt 'e5m2', but only 'e4m3' is supported"),
        ("fp8-dynamic", FP8 | {"activation_scheme": "online"}, "activation_scheme 'online'"),
        (
            "fp8-dynamic",
            FP8 | {"activation_scheme": "static"},
            "lacks .*input_scale, which static scales",
        ),
        ("fp8-blocks", BLOCKS | {"weight_block_size": [64, 128]}, "weight_block_size"),
        ("fp8-blocks", BLOCKS | {"activation_scheme": "static"}, "activation_scheme 'static'"),
        ("fp8-blocks", BLOCKS | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        ("compressed-channel-token", compressed({"strategy": "group"}, TOKEN), "weights.strategy"),
        (
            "compressed-channel-token",
            compressed({"strategy": "channel"}, TOKEN | {"strategy": "tensor"}),
            "input_activations.strategy 'tensor', but only 'token' is supported",
        ),
        (
            "compressed-channel-token",
            compressed({"strategy": "channel", "num_bits": 4}, TOKEN),
            "num_bits 4, but only 8",
        ),
        ("compressed-channel-token", compressed(IN_BLOCKS, GROUP), "does not fit the format fp8-g"),
        (
            "compressed-channel-token",
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            "one format of weights and activations, got 0",
        ),
    ],
)
def test_what_is_not_read_is_told(
    case: str, about: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, case)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_bad_scale_is_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write(tmp_path, "fp8-dynamic")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight_scale"].fill_(float("nan"))
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(256, 320, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="negative or not finite"):
        checkpoint.read(f"{name}.weight")
    with pytest.raises(CheckpointError, match="must have float8_e4m3fn values"):
        checkpoint.read("model.layers.0.mlp.down_proj.weight")


@pytest.mark.parametrize("case", ["fp8-static", "fp8-blocks"])
def test_a_rank_holds_some_rows_and_columns_with_their_scales(case: str, tmp_path: Path) -> None:
    write(tmp_path, case)
    stored = open_checkpoint(tmp_path).tensors["model.layers.0.mlp.gate_proj.weight"]
    assert stored.codes is not None
    whole = stored.codes()
    part = whole[30:300].columns(128, 256)
    assert torch.equal(part.dequantize(), whole.dequantize()[30:300, 128:256])
    if case == "fp8-static":
        assert part.input_scale is not None and part.input_scale.shape == (270, 1)
