"""Quantised weights as every backend receives them: rows of small integers, with group scales.

    symmetric     value[n, k] = (code[n, k] - zero_point) * scale[n, k // group_size]
    asymmetric    value[n, k] = code[n, k] * scale[n, k // group_size] + least[n, k // group_size]
    float         value[n, k] = e4m3(code[n, k]) * scale[n, k // group_size]

The zero point is 128 or 8, and `least` is the minimum of each group. dequantize() defines the
meaning of codes; a backend may change their layout (`ops.pack`). octavo.model.quant quantises
numbers to codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class WeightFormat(NamedTuple):
    """The storage format of a weight."""

    bits: int  # 8 or 4
    group_size: int  # the number of inputs that share a scale; 0 means a whole row
    asymmetric: bool = False  # each group has a minimum
    is_float: bool = False  # codes are e4m3 floats: 8 bits, whole rows or groups of 128 inputs
    # Integers: a backend may quantise activations to 8 bits, with one scale for each row, if that
    # is faster. Floats: every backend rounds activations to e4m3 (octavo.ops.fp8_linear).
    quantizes_activations: bool = False
    float32_scales: bool = False  # scales and minima are float32 instead of float16
    static_activations: bool = False  # the weight has the scale of its activations: floats only

    @property
    def zero_point(self) -> int:
        return 0 if self.asymmetric or self.is_float else 1 << (self.bits - 1)

    def __str__(self) -> str:
        group = f"-g{self.group_size}" if self.group_size else ""
        scales = "-f32" * self.float32_scales
        if self.is_float:
            static = "-static" * self.static_activations
            return f"fp8{group}{static}" + "-a16" * (not self.quantizes_activations) + scales
        activations = "-a8" * self.quantizes_activations
        return f"int{self.bits}{group}" + "-asym" * self.asymmetric + activations + scales


def rounds_activations(weight_format: WeightFormat) -> bool:
    """Whether every backend rounds the activations of a product with such a weight."""
    return weight_format.is_float and weight_format.quantizes_activations


class QuantWeight(nn.Module):
    """A quantised weight [out, in].

    Codes are unsigned. A byte holds two neighbouring 4-bit codes, the first in its low half.
    """

    codes: Tensor  # [out, in] uint8, or [out, ceil(in / 2)] for 4 bits
    scale: Tensor  # [out, groups] float16, or float32 if the format has float32_scales
    least: Tensor | None  # the minimum of each group, like scale
    # [out, 1] float32, the static scale of activations. A product uses the largest one of its rows:
    # the parts of a weight, such as q, k and v, have the same input.
    input_scale: Tensor | None

    def __init__(
        self,
        weight_format: WeightFormat,
        inputs: int,
        codes: Tensor,
        scale: Tensor,
        least: Tensor | None,
        input_scale: Tensor | None = None,
    ):
        super().__init__()
        self.format = weight_format
        self.shape = torch.Size((len(codes), inputs))
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("least", least)
        self.register_buffer("input_scale", input_scale)

    @staticmethod
    def empty(weight_format: WeightFormat, outputs: int, inputs: int) -> QuantWeight:
        """Allocate a weight on the default device, without filling it."""
        groups = -(-inputs // weight_format.group_size) if weight_format.group_size else 1
        codes = torch.empty(
            outputs, inputs if weight_format.bits == 8 else -(-inputs // 2), dtype=torch.uint8
        )
        scale, least = (
            torch.empty(
                outputs,
                groups,
                dtype=torch.float32 if weight_format.float32_scales else torch.float16,
            )
            for _ in range(2)
        )
        return QuantWeight(
            weight_format,
            inputs,
            codes,
            scale,
            least if weight_format.asymmetric else None,
            torch.empty(outputs, 1, dtype=torch.float32)
            if weight_format.static_activations
            else None,
        )

    def __getitem__(self, rows: slice | Tensor) -> QuantWeight:
        """Return some rows. A slice gives a view, through which this weight can be written."""
        least = None if self.least is None else self.least[rows]
        input_scale = None if self.input_scale is None else self.input_scale[rows]
        return QuantWeight(
            self.format, self.shape[1], self.codes[rows], self.scale[rows], least, input_scale
        )

    def columns(self, first: int, stop: int) -> QuantWeight:
        """Return a view of some inputs, which must be whole groups."""
        per_byte = 8 // self.format.bits
        group_size = self.format.group_size
        codes = self.codes[:, first // per_byte : -(-stop // per_byte)]
        scale = self.scale
        least = self.least
        if group_size:
            groups = slice(first // group_size, -(-stop // group_size))
            scale = scale[:, groups]
            least = None if least is None else least[:, groups]
        return QuantWeight(self.format, stop - first, codes, scale, least, self.input_scale)

    def unpacked(self) -> Tensor:
        """Return the codes, one in each byte: [out, in] uint8."""
        if self.format.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), 2).flatten(1)[:, : self.shape[1]]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [out, in]. They are computed in float32, as GGUF defines them."""
        inputs = self.shape[1]
        group_size = self.format.group_size or self.shape[1]
        if self.format.is_float:
            values = self.codes.view(torch.float8_e4m3fn).float()
        else:
            values = self.unpacked().float() - self.format.zero_point
        values *= self.scale.float().repeat_interleave(group_size, 1)[:, :inputs]
        if self.least is not None:
            values += self.least.float().repeat_interleave(group_size, 1)[:, :inputs]
        return values.to(dtype)


class JoinedWeight(nn.Module):
    """A weight whose rows consist of several weights with different formats."""

    def __init__(self, parts: Iterable[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def __getitem__(self, rows: slice) -> QuantWeight:
        """Return the part that has exactly these rows."""
        first = 0
        for part in self.parts:
            assert isinstance(part, QuantWeight)
            if (rows.start, rows.stop) == (first, first + part.shape[0]):
                return part
            first += part.shape[0]
        raise IndexError(f"no part has rows {rows.start} to {rows.stop}")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([part.dequantize(dtype) for part in self.parts])  # type: ignore[operator]


def dense(weight: Tensor | nn.Module, dtype: torch.dtype) -> Tensor:
    """Return a weight as plain numbers, for backends without kernels for its format."""
    if isinstance(weight, QuantWeight | JoinedWeight):
        return weight.dequantize(dtype)
    return weight  # type: ignore[return-value]
