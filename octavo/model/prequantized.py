"""Reads checkpoints that other programs quantised to 4 bits: GPTQ, AWQ and compressed-tensors.

Checkpoints of fp8 weights are read by octavo.model.prequantized_fp8.

    GPTQ                 qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out],
                         g_idx [in]
    AWQ                  qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    compressed-tensors   weight_packed [out, in / 8], weight_scale [out, groups], weight_shape [2]

An int32 holds eight codes, the first in its lowest bits, and value = (code - zero) * scale. If
every zero is 8, this is exactly one of Octavo's symmetric formats. Otherwise the minimum of a group
is -zero * scale, rounded to float16 by at most 0.8% of a step. This module depends on no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.model import prequantized_fp8, quant
from octavo.model.checkpoint import StoredTensor
from octavo.model.prequantized_fp8 import check_field
from octavo.ops.weight import QuantWeight, WeightFormat

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the positions of the outputs 0 to 7 in an int32
METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
PACKED = ("qweight", "qzeros", "weight_packed")


class Scheme(NamedTuple):
    """The way in which the weights of a checkpoint are quantised."""

    format: WeightFormat
    # A weight consists of the tensors NAME.part. It is quantised if the first of them exists.
    parts: tuple[str, ...]
    # Converts the parts to codes, scales and zeros, each [out, ..]. No zeros means that all are 8.
    read: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor, Tensor | None]]
    size: Callable[[tuple[int, ...]], tuple[int, int]]  # the first part's shape -> outputs, inputs
    # outputs, inputs, groups -> the shape of every part
    shapes: Callable[[int, int, int], dict[str, tuple[int, ...]]]


def joined(
    tensors: dict[str, StoredTensor], config: dict[str, Any], source: str
) -> dict[str, StoredTensor]:
    """Return a directory's tensors, with the parts of each quantised weight joined."""
    quantization_config = config.get("quantization_config")
    if not isinstance(quantization_config, dict) or "quant_method" not in quantization_config:
        return tensors
    if prequantized_fp8.is_fp8(quantization_config):
        return prequantized_fp8.joined(tensors, quantization_config, source)
    scheme = _scheme(quantization_config, f"{source}/config.json")
    result = dict(tensors)
    for name in tensors:
        weight_name = name.removesuffix(f".{scheme.parts[0]}")
        if weight_name != name:
            parts = {
                part_name: result.pop(f"{weight_name}.{part_name}", None)
                for part_name in scheme.parts
            }
            missing = [
                part_name
                for part_name, tensor in parts.items()
                if tensor is None and part_name != "g_idx"
            ]
            if missing:
                raise CheckpointError(
                    f"{source} has {name}, but lacks {', '.join(missing)} of the same weight. "
                    "Download the checkpoint again"
                )
            result[f"{weight_name}.weight"] = _join(
                scheme,
                {part_name: stored for part_name, stored in parts.items() if stored is not None},
                f"{source}: {weight_name}",
            )
    return result


def _join(scheme: Scheme, parts: dict[str, StoredTensor], description: str) -> StoredTensor:
    weight_format = scheme.format
    outputs, inputs = _size(scheme, parts, description)

    def codes() -> QuantWeight:
        packed, scale, zeros = _read_parts(scheme, parts, description)
        half_scale = scale.half()
        if not torch.equal(half_scale.to(scale.dtype), scale):
            raise CheckpointError(
                f"{description} has scales that float16 cannot hold: load it with "
                'quantization="none"'
            )
        if weight_format.asymmetric:
            zeros = torch.full_like(half_scale, 8.0) if zeros is None else zeros
            return QuantWeight(
                weight_format,
                inputs,
                packed,
                half_scale,
                (-zeros.float() * half_scale.float()).half(),
            )
        if zeros is not None and bool((zeros != 8).any()):
            raise CheckpointError(
                f"{description} has zeros other than 8, although config.json says that it is "
                'symmetric: use quantization="none"'
            )
        return QuantWeight(weight_format, inputs, packed, half_scale, None)

    def read_values() -> Tensor:
        packed, scale, zeros = _read_parts(scheme, parts, description)
        codes_weight = QuantWeight(
            WeightFormat(4, weight_format.group_size), inputs, packed, scale, None
        )
        zero_point = (
            8.0 if zeros is None else zeros.float().repeat_interleave(weight_format.group_size, 1)
        )
        return (codes_weight.unpacked().float() - zero_point) * scale.float().repeat_interleave(
            weight_format.group_size, 1
        )

    return StoredTensor(
        (outputs, inputs),
        sum(part.nbytes for part in parts.values()),
        read_values,
        weight_format,
        codes,
    )


def _read_parts(
    scheme: Scheme, parts: dict[str, StoredTensor], description: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Read the parts of a weight, check their dtypes, and convert them to codes, scale, zeros."""
    tensors = {part_name: part.read() for part_name, part in parts.items()}
    dtypes = {part_name: tensor.dtype for part_name, tensor in tensors.items()}
    if any(
        dtype.is_floating_point != ("scale" in part_name)
        or (part_name in PACKED and dtype != torch.int32)
        for part_name, dtype in dtypes.items()
    ):
        listing = ", ".join(f"{part_name} {dtype}" for part_name, dtype in dtypes.items())
        raise CheckpointError(
            f"{description} must have int32 codes and floating-point scales, got {listing}"
        )
    return scheme.read(tensors)


def _size(scheme: Scheme, parts: dict[str, StoredTensor], description: str) -> tuple[int, int]:
    """Return outputs and inputs of a weight, and check the shapes of its parts against them."""
    shapes_given = {part_name: part.shape for part_name, part in parts.items()}
    first_shape = shapes_given[scheme.parts[0]]
    if len(first_shape) == 2:
        outputs, inputs = scheme.size(first_shape)
        shapes_expected = scheme.shapes(outputs, inputs, inputs // scheme.format.group_size)
        fits_groups = inputs % scheme.format.group_size == 0 and (
            "qzeros" not in shapes_given or outputs % 8 == 0
        )
        if fits_groups and all(
            shape == shapes_expected[part_name] for part_name, shape in shapes_given.items()
        ):
            return outputs, inputs
    shapes = ", ".join(f"{part_name} {list(shape)}" for part_name, shape in shapes_given.items())
    raise CheckpointError(
        f"{description} has tensors whose shapes do not fit a weight with groups of "
        f"{scheme.format.group_size}: {shapes}"
    )


# ---- the quantization_config of each method ------------------------------------------------------


def _scheme(quantization_config: dict[str, Any], source: str) -> Scheme:
    method = quantization_config["quant_method"]
    if method not in METHODS:
        raise CheckpointError(
            f"{source}: the quantisation method {method!r} is not supported, only octavo, "
            f"{', '.join(METHODS)}. Use the unquantised checkpoint with --quant"
        )
    if method == "compressed-tensors":
        return _compressed(quantization_config, source)
    check_field(source, "bits", quantization_config.get("bits"), 4)
    group_size: Any = quantization_config.get("group_size")
    if method == "gptq":
        check_field(source, "desc_act", quantization_config.get("desc_act", False), False)
        symmetric = quantization_config.get("sym", True) is True
        checkpoint_format = quantization_config.get("checkpoint_format", "gptq")
        check_field(source, "checkpoint_format", checkpoint_format, "gptq", "gptq_v2")
        return Scheme(
            _weight_format(group_size, not symmetric, source),
            ("qweight", "qzeros", "scales", "g_idx"),
            lambda tensors: _read_gptq(
                tensors, group_size, 1 if checkpoint_format == "gptq" else 0, source
            ),
            lambda shape: (shape[1], shape[0] * 8),
            lambda outputs, inputs, groups: {
                "qweight": (inputs // 8, outputs),
                "qzeros": (groups, outputs // 8),
                "scales": (groups, outputs),
                "g_idx": (inputs,),
            },
        )
    check_field(source, "version", str(quantization_config.get("version", "gemm")).lower(), "gemm")
    return Scheme(
        _weight_format(group_size, True, source),
        ("qweight", "qzeros", "scales"),
        _read_awq,
        lambda shape: (shape[1] * 8, shape[0]),
        lambda outputs, inputs, groups: {
            "qweight": (inputs, outputs // 8),
            "qzeros": (groups, outputs // 8),
            "scales": (groups, outputs),
        },
    )


def _compressed(quantization_config: dict[str, Any], source: str) -> Scheme:
    check_field(
        source, "format", quantization_config.get("format"), "pack-quantized", "float-quantized"
    )
    config_groups: Any = quantization_config.get("config_groups")
    entries = list(config_groups.values()) if isinstance(config_groups, dict) else []
    entry_objects = [entry for entry in entries if isinstance(entry, dict)]
    weight_configs = [entry.get("weights") for entry in entry_objects]
    if (
        not weight_configs
        or len(entry_objects) != len(entries)
        or any(weight_config != weight_configs[0] for weight_config in weight_configs)
    ):
        raise CheckpointError(
            f"{source}: quantization_config.config_groups must describe one format of weights"
        )
    expected = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "actorder": None,
    }
    weight_config = weight_configs[0] if isinstance(weight_configs[0], dict) else {}
    for field, value in expected.items():
        check_field(source, field, weight_config.get(field, value), value)
    for entry in entry_objects:
        check_field(source, "input_activations", entry.get("input_activations"), None)
    return Scheme(
        _weight_format(weight_config.get("group_size"), False, source),
        ("weight_packed", "weight_scale", "weight_shape"),
        lambda tensors: (_as_bytes(tensors["weight_packed"]), tensors["weight_scale"], None),
        lambda shape: (shape[0], shape[1] * 8),
        lambda outputs, inputs, config_groups: {
            "weight_packed": (outputs, inputs // 8),
            "weight_scale": (outputs, config_groups),
            "weight_shape": (2,),
        },
    )


def _weight_format(group_size: Any, asymmetric: bool, source: str) -> WeightFormat:
    check_field(source, "group_size", group_size, *quant.GROUPS)
    return WeightFormat(4, group_size, asymmetric)


# ---- codes ---------------------------------------------------------------------------------------


def _as_bytes(words: Tensor) -> Tensor:
    """words int32 [n, m], with eight codes each -> uint8 [n, 4 m], with two neighbours in a byte"""
    return words.contiguous().view(torch.uint8)


def _unpack_nibbles(words: Tensor) -> Tensor:
    """words int32 [n, m] -> the codes in order, uint8 [n, 8 m]"""
    pairs = _as_bytes(words)
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)


def _read_gptq(
    tensors: dict[str, Tensor], group_size: int, zero_offset: int, source: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`zero_offset` is added to the zeros: the first version of the format stores zero - 1."""
    codes = _as_bytes(tensors["qweight"].t())
    group_index = tensors.get("g_idx")
    if group_index is not None and not torch.equal(
        group_index.long(), torch.arange(2 * codes.shape[1]) // group_size
    ):
        raise CheckpointError(f"{source}: groups in activation order (desc_act) are not supported")
    return codes, tensors["scales"].t(), _unpack_nibbles(tensors["qzeros"]).t() + zero_offset


def _read_awq(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    def outputs_in_order(words: Tensor) -> Tensor:
        return _unpack_nibbles(words).unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1).t()

    codes = outputs_in_order(tensors["qweight"])
    return (
        codes[:, 0::2] | codes[:, 1::2] << 4,
        tensors["scales"].t(),
        outputs_in_order(tensors["qzeros"]),
    )
