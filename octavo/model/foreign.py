"""Checkpoints that other programs quantised to 4 bits: GPTQ, AWQ and compressed-tensors, read onto our groups.

    GPTQ                 qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out], g_idx [in]
    AWQ                  qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    compressed-tensors   weight_packed [out, in / 8], weight_scale [out, groups], weight_shape [2]

An int32 holds eight codes, the first in its lowest bits; value = (code - zero) * scale. Where every zero is 8 that is exactly one
of our symmetric formats; else least = -zero * scale is rounded to float16, by at most 0.8% of a step. Knows formats, no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.model import quant
from octavo.model.checkpoint import StoredTensor
from octavo.ops.weight import Format, QuantWeight

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in an int32 the outputs 0 to 7 are
METHODS = ("gptq", "awq", "compressed-tensors")
PACKED = ("qweight", "qzeros", "weight_packed")


class Scheme(NamedTuple):
    """How the weights of a checkpoint are quantised, from its config.json."""

    form: Format
    # The tensors NAME.part that a weight is made of; a weight is quantised if the first is there.
    parts: tuple[str, ...]
    # The parts as codes, scale and zeros (None: all are 8), each [out, ..].
    read: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor, Tensor | None]]
    size: Callable[[tuple[int, ...]], tuple[int, int]]  # the first part's shape -> outputs, inputs
    # Outputs, inputs, groups -> the shape of every part.
    shapes: Callable[[int, int, int], dict[str, tuple[int, ...]]]


def joined(
    tensors: dict[str, StoredTensor], config: dict[str, Any], source: str
) -> dict[str, StoredTensor]:
    """A directory's tensors, with those that belong to one weight quantised by others as one."""
    about = config.get("quantization_config")
    if not isinstance(about, dict) or "quant_method" not in about:
        return tensors
    scheme = _scheme(about, f"{source}/config.json")
    found = dict(tensors)
    for name in tensors:
        base = name.removesuffix(f".{scheme.parts[0]}")
        if base != name:
            given = {part: found.pop(f"{base}.{part}", None) for part in scheme.parts}
            if absent := [
                part for part, tensor in given.items() if tensor is None and part != "g_idx"
            ]:
                raise CheckpointError(
                    f"{source}: {name} is there, but not {', '.join(absent)} beside it. Download it again"
                )
            found[f"{base}.weight"] = _join(
                scheme, {p: t for p, t in given.items() if t is not None}, f"{source}: {base}"
            )
    return found


def _join(scheme: Scheme, parts: dict[str, StoredTensor], what: str) -> StoredTensor:
    form = scheme.form
    outputs, inputs = _size(scheme, parts, what)

    def read() -> tuple[Tensor, Tensor, Tensor | None]:
        tensors = {name: part.read() for name, part in parts.items()}
        kinds = {name: tensor.dtype for name, tensor in tensors.items()}
        if any(
            kind.is_floating_point != ("scale" in name) or (name in PACKED and kind != torch.int32)
            for name, kind in kinds.items()
        ):
            found = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
            raise CheckpointError(
                f"{what} must have codes of int32 and scales of floats, not {found}"
            )
        return scheme.read(tensors)

    def codes() -> QuantWeight:
        packed, scale, zeros = read()
        half = scale.half()
        if not torch.equal(half.to(scale.dtype), scale):
            raise CheckpointError(
                f'{what} has scales that float16 cannot hold: load it with quantization="none"'
            )
        if form.least:
            zeros = torch.full_like(half, 8.0) if zeros is None else zeros
            return QuantWeight(form, inputs, packed, half, (-zeros.float() * half.float()).half())
        if zeros is not None and bool((zeros != 8).any()):
            raise CheckpointError(
                f'{what} has zeros that are not 8, though it is said to be symmetric: use quantization="none"'
            )
        return QuantWeight(form, inputs, packed, half, None)

    def numbers() -> Tensor:
        packed, scale, zeros = read()
        plain = QuantWeight(Format(4, form.group), inputs, packed, scale, None)
        shift = 8.0 if zeros is None else zeros.float().repeat_interleave(form.group, 1)
        return (plain.unpacked().float() - shift) * scale.float().repeat_interleave(form.group, 1)

    return StoredTensor(
        (outputs, inputs), sum(part.nbytes for part in parts.values()), numbers, form, codes
    )


def _size(scheme: Scheme, parts: dict[str, StoredTensor], what: str) -> tuple[int, int]:
    """Outputs and inputs of a weight, whose parts all have the shapes that follow from them."""
    given = {name: part.shape for name, part in parts.items()}
    first = given[scheme.parts[0]]
    if len(first) == 2:
        outputs, inputs = scheme.size(first)
        wanted = scheme.shapes(outputs, inputs, inputs // scheme.form.group)
        fits = inputs % scheme.form.group == 0 and ("qzeros" not in given or outputs % 8 == 0)
        if fits and all(shape == wanted[name] for name, shape in given.items()):
            return outputs, inputs
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in given.items())
    raise CheckpointError(
        f"{what} has tensors whose shapes make no weight in groups of {scheme.form.group}: {shapes}"
    )


# ---- how each method says what it did ---------------------------------------------------------------------


def _scheme(about: dict[str, Any], where: str) -> Scheme:
    method = about["quant_method"]
    if method not in METHODS:
        raise CheckpointError(
            f"{where}: weights quantised by {method!r} are not read; known are octavo, {', '.join(METHODS)}. "
            "Take the checkpoint it was made from, and --quant"
        )
    if method == "compressed-tensors":
        return _compressed(about, where)
    _want(where, "bits", about.get("bits"), 4)
    group: Any = about.get("group_size")
    if method == "gptq":
        _want(where, "desc_act", about.get("desc_act", False), False)
        symmetric = about.get("sym", True) is True
        first = about.get("checkpoint_format", "gptq")
        _want(where, "checkpoint_format", first, "gptq", "gptq_v2")
        return Scheme(
            _form(group, not symmetric, where),
            ("qweight", "qzeros", "scales", "g_idx"),
            lambda parts: _read_gptq(parts, group, 1 if first == "gptq" else 0, where),
            lambda shape: (shape[1], shape[0] * 8),
            lambda outputs, inputs, groups: {
                "qweight": (inputs // 8, outputs),
                "qzeros": (groups, outputs // 8),
                "scales": (groups, outputs),
                "g_idx": (inputs,),
            },
        )
    _want(where, "version", str(about.get("version", "gemm")).lower(), "gemm")
    return Scheme(
        _form(group, True, where),
        ("qweight", "qzeros", "scales"),
        _read_awq,
        lambda shape: (shape[1] * 8, shape[0]),
        lambda outputs, inputs, groups: {
            "qweight": (inputs, outputs // 8),
            "qzeros": (groups, outputs // 8),
            "scales": (groups, outputs),
        },
    )


def _compressed(about: dict[str, Any], where: str) -> Scheme:
    _want(where, "format", about.get("format"), "pack-quantized")
    groups: Any = about.get("config_groups")
    entries = list(groups.values()) if isinstance(groups, dict) else []
    objects = [entry for entry in entries if isinstance(entry, dict)]
    weights = [entry.get("weights") for entry in objects]
    if not weights or len(objects) != len(entries) or any(w != weights[0] for w in weights):
        raise CheckpointError(
            f"{where}: quantization_config.config_groups must hold one way to quantise weights"
        )
    wanted = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "actorder": None,
    }
    first = weights[0] if isinstance(weights[0], dict) else {}
    for field, value in wanted.items():
        _want(where, field, first.get(field, value), value)
    for entry in objects:
        _want(where, "input_activations", entry.get("input_activations"), None)
    return Scheme(
        _form(first.get("group_size"), False, where),
        ("weight_packed", "weight_scale", "weight_shape"),
        lambda parts: (_bytes(parts["weight_packed"]), parts["weight_scale"], None),
        lambda shape: (shape[0], shape[1] * 8),
        lambda outputs, inputs, groups: {
            "weight_packed": (outputs, inputs // 8),
            "weight_scale": (outputs, groups),
            "weight_shape": (2,),
        },
    )


def _want(where: str, field: str, given: Any, *allowed: Any) -> None:
    if given not in allowed:
        names = " or ".join(map(repr, allowed))
        raise CheckpointError(
            f"{where}: quantization_config has {field} {given!r}, and only {names} is read"
        )


def _form(group: Any, least: bool, where: str) -> Format:
    _want(where, "group_size", group, *quant.GROUPS)
    return Format(4, group, least)


# ---- codes --------------------------------------------------------------------------------------------------


def _bytes(words: Tensor) -> Tensor:
    """int32 [n, m], eight codes each -> [n, 4 m], two neighbours in a byte: the same bits."""
    return words.contiguous().view(torch.uint8)


def _nibbles(words: Tensor) -> Tensor:
    """int32 [n, m] -> the codes in their order, [n, 8 m] uint8."""
    pairs = _bytes(words)
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)


def _read_gptq(
    parts: dict[str, Tensor], group: int, add: int, where: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """add: what the first version of the format leaves out of its zeros."""
    codes = _bytes(parts["qweight"].t())
    index = parts.get("g_idx")
    if index is not None and not torch.equal(
        index.long(), torch.arange(2 * codes.shape[1]) // group
    ):
        raise CheckpointError(
            f"{where}: inputs are grouped in another order than they have (desc_act), which is not read"
        )
    return codes, parts["scales"].t(), _nibbles(parts["qzeros"]).t() + add


def _read_awq(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    def outputs_in_order(words: Tensor) -> Tensor:
        return _nibbles(words).unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1).t()

    codes = outputs_in_order(parts["qweight"])
    return (
        codes[:, 0::2] | codes[:, 1::2] << 4,
        parts["scales"].t(),
        outputs_in_order(parts["qzeros"]),
    )
