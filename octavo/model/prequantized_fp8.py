"""Reads checkpoints whose weights are fp8 (e4m3), as other programs write them.

    quant_method         scales beside NAME.weight                activations
    fp8                  weight_scale [1]                         a scale for each row, input_scale
    fp8, blocks          weight_scale_inv [out / 128, in / 128]   a scale for each 128 of a row
    compressed-tensors   weight_scale [1], [out, 1] or, for       a scale for each row, input_scale,
    (float-quantized)    blocks, [out / 128, in / 128]            or not rounded; blocks as above

value = e4m3(code) * scale, although the name of a block's scale says "inv". A weight without a
scale beside it is not quantised. Scales are kept as float32, one for each output, or one for each
output and 128 inputs, so nothing is rounded. Scales of KV are dropped: octavo.ops.kv computes them.
This module depends on no model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.model.checkpoint import StoredTensor
from octavo.ops.weight import QuantWeight, WeightFormat

BLOCK = 128  # outputs and inputs of a block
KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "output_scale")
FORMATS = ("float-quantized", "naive-quantized")  # formats of compressed-tensors


class Fp8Scheme(NamedTuple):
    """The way in which the weights and activations of a checkpoint are quantised."""

    format: WeightFormat
    scale_name: str


def is_fp8(config: dict[str, Any]) -> bool:
    """Return whether a quantization_config describes fp8 weights."""
    method = config.get("quant_method")
    return method == "fp8" or (method == "compressed-tensors" and config.get("format") in FORMATS)


def joined(
    tensors: dict[str, StoredTensor], config: dict[str, Any], source: str
) -> dict[str, StoredTensor]:
    """Return a directory's tensors, with the scales of each quantised weight joined to it."""
    described = f"{source}/config.json"
    is_plain_fp8 = config["quant_method"] == "fp8"
    scheme = _fp8(config, described) if is_plain_fp8 else _compressed(config, described)
    result = {}
    for name, tensor in tensors.items():
        prefix, _, tensor_kind = name.rpartition(".")
        if tensor_kind in KV_SCALES or tensor_kind in (scheme.scale_name, "input_scale"):
            continue
        scale = tensors.get(f"{prefix}.{scheme.scale_name}") if tensor_kind == "weight" else None
        if scale is None:
            result[name] = tensor
            continue
        input_scale = tensors.get(f"{prefix}.input_scale")
        if scheme.format.static_activations and input_scale is None:
            raise CheckpointError(
                f"{source} has {name}, but lacks {prefix}.input_scale, which static scales of "
                "activations need. Download the checkpoint again"
            )
        result[name] = _join(scheme.format, tensor, scale, input_scale, f"{source}: {name}")
    return result


def _join(
    weight_format: WeightFormat,
    weight: StoredTensor,
    scale: StoredTensor,
    input_scale: StoredTensor | None,
    description: str,
) -> StoredTensor:
    """Return one tensor that reads codes and scales. Shapes are checked now, and dtypes when the
    tensor is read."""
    if len(weight.shape) != 2 or _scale_shape(weight_format, weight.shape, scale.shape) is None:
        raise CheckpointError(
            f"{description} {list(weight.shape)} has a scale of shape {list(scale.shape)}, which "
            f"does not fit the format {weight_format} of config.json"
        )
    outputs, inputs = weight.shape

    def codes() -> QuantWeight:
        weight_codes = weight.read()
        scale_values = scale.read()
        if weight_codes.dtype != torch.float8_e4m3fn or not scale_values.dtype.is_floating_point:
            raise CheckpointError(
                f"{description} must have float8_e4m3fn values and scales of floats, not "
                f"{weight_codes.dtype} and {scale_values.dtype}"
            )
        row_scale = _expanded(weight_format, scale_values.float(), outputs, inputs)
        _check_finite(row_scale, description)
        static_scale = None
        if weight_format.static_activations:
            assert input_scale is not None
            static_scale = input_scale.read().float().amax().expand(outputs, 1).contiguous()
            _check_finite(static_scale, description)
        return QuantWeight(
            weight_format, inputs, weight_codes.view(torch.uint8), row_scale, None, static_scale
        )

    return StoredTensor(
        weight.shape,
        weight.nbytes + scale.nbytes,
        lambda: codes().dequantize(),
        weight_format,
        codes,
    )


def _scale_shape(
    weight_format: WeightFormat, shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return the shape [outputs, groups] of the stored scales, or None if it does not fit."""
    outputs, inputs = shape
    if weight_format.group_size:
        blocks = -(-outputs // BLOCK), -(-inputs // BLOCK)
        return blocks if scale_shape == blocks else None
    count = 1
    for size in scale_shape:
        count *= size
    return (count, 1) if count in (1, outputs) else None


def _expanded(weight_format: WeightFormat, scale: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return the scale of each output and group, [outputs, groups]."""
    shape = _scale_shape(weight_format, (outputs, inputs), tuple(scale.shape))
    assert shape is not None
    scale = scale.reshape(shape)
    if weight_format.group_size:
        return scale.repeat_interleave(BLOCK, 0)[:outputs].contiguous()
    return scale.expand(outputs, 1).contiguous()


def _check_finite(scale: Tensor, description: str) -> None:
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise CheckpointError(
            f"{description} has a scale that is negative or not finite: download the checkpoint "
            "again"
        )


# ---- the quantization_config of each method ------------------------------------------------------


def check_field(source: str, field: str, actual: Any, *allowed: Any) -> None:
    if actual not in allowed:
        names = " or ".join(map(repr, allowed))
        raise CheckpointError(
            f"{source}: quantization_config has {field} {actual!r}, but only {names} is supported"
        )


def _format(is_block: bool, rounds: bool, is_static: bool) -> WeightFormat:
    return WeightFormat(
        bits=8,
        group_size=BLOCK if is_block else 0,
        is_float=True,
        quantizes_activations=rounds,
        float32_scales=True,
        static_activations=is_static,
    )


def _fp8(config: dict[str, Any], source: str) -> Fp8Scheme:
    """Read the configs that AutoFP8 and vLLM write, and those of DeepSeek and Qwen3 with blocks."""
    check_field(source, "fmt", config.get("fmt", "e4m3"), "e4m3")
    check_field(source, "scale_fmt", config.get("scale_fmt"), None)
    blocks = config.get("weight_block_size")
    check_field(source, "weight_block_size", blocks, None, [BLOCK, BLOCK])
    activations = config.get("activation_scheme", "dynamic")
    if blocks is not None:
        check_field(source, "activation_scheme", activations, "dynamic")
        return Fp8Scheme(_format(True, True, False), "weight_scale_inv")
    check_field(source, "activation_scheme", activations, "dynamic", "static")
    return Fp8Scheme(_format(False, True, activations == "static"), "weight_scale")


def _compressed(config: dict[str, Any], source: str) -> Fp8Scheme:
    groups: Any = config.get("config_groups")
    entries = list(groups.values()) if isinstance(groups, dict) else []
    formats = set()
    for entry in entries:
        weights = entry.get("weights") if isinstance(entry, dict) else None
        if not isinstance(weights, dict):
            raise CheckpointError(
                f"{source}: every entry of quantization_config.config_groups must describe weights"
            )
        formats.add(_group_format(weights, entry.get("input_activations"), source))
    if len(formats) != 1:
        raise CheckpointError(
            f"{source}: quantization_config.config_groups must describe one format of weights and "
            f"activations, got {len(formats)}"
        )
    return Fp8Scheme(formats.pop(), "weight_scale")


def _group_format(weights: dict[str, Any], activations: Any, source: str) -> WeightFormat:
    _check_type(weights, source)
    check_field(source, "weights.dynamic", weights.get("dynamic", False), False)
    strategy = weights.get("strategy")
    check_field(source, "weights.strategy", strategy, "tensor", "channel", "block")
    is_block = strategy == "block"
    if is_block:
        check_field(source, "block_structure", weights.get("block_structure"), [BLOCK, BLOCK])
    if activations is None:
        return _format(is_block, False, False)
    if not isinstance(activations, dict):
        raise CheckpointError(f"{source}: input_activations must be an object, got {activations!r}")
    _check_type(activations, source)
    is_static = activations.get("dynamic", False) is False
    expected_strategy = "tensor" if is_static else "token"
    if is_block:
        expected_strategy = "group"
    strategy = activations.get("strategy")
    check_field(source, "input_activations.strategy", strategy, expected_strategy)
    if is_block:
        check_field(source, "input_activations.dynamic", activations.get("dynamic"), True)
        check_field(source, "input_activations.group_size", activations.get("group_size"), BLOCK)
    return _format(is_block, True, is_static)


def _check_type(quantised: dict[str, Any], source: str) -> None:
    check_field(source, "num_bits", quantised.get("num_bits"), 8)
    check_field(source, "type", quantised.get("type"), "float")
    check_field(source, "symmetric", quantised.get("symmetric", True), True)
