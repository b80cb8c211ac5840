"""Quantised weights as every backend receives them: small integers in rows, a scale for each group of neighbours in a row.

    value[n, k] = (code[n, k] - zero) * scale[n, k // group]                     symmetric: zero is 128 or 8
    value[n, k] =  code[n, k] * scale[n, k // group] + least[n, k // group]      asymmetric
    value[n, k] = e4m3(code[n, k]) * scale[n]                                    float: the code's bits are a number's

A backend may lay them out anew (`ops.pack`); what they mean is defined here, by dequantize(). How numbers become codes is
octavo.model.quant's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Format(NamedTuple):
    bits: int  # 8 or 4
    group: int  # inputs that share a scale; 0: a whole row
    least: bool = False  # asymmetric: a smallest value for each group
    float: bool = False  # codes are numbers of their own, of type e4m3: 8 bits, no groups
    # activations become 8 bits too, with a scale for each row, where a backend multiplies faster
    # so
    rounds: bool = False
    # scales and least values are float32, for those that float16 does not hold: groups only
    wide: bool = False

    @property
    def zero(self) -> int:
        return 0 if self.least or self.float else 1 << (self.bits - 1)

    def __str__(self) -> str:
        if self.float:
            return "fp8"
        group = f"-g{self.group}" if self.group else ""
        return (
            f"int{self.bits}{group}"
            + "-asym" * self.least
            + "-a8" * self.rounds
            + "-f32" * self.wide
        )


class QuantWeight(nn.Module):
    """A weight [out, in]. Codes are unsigned; of 4-bit ones a byte holds two neighbours, the first in its low half."""

    codes: Tensor  # [out, in] uint8, or [out, ceil(in / 2)]
    scale: Tensor  # [out, groups] float16, or float32 where the format is wide
    least: Tensor | None  # the same

    def __init__(
        self, form: Format, inputs: int, codes: Tensor, scale: Tensor, least: Tensor | None
    ):
        super().__init__()
        self.form = form
        self.shape = torch.Size((len(codes), inputs))
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("least", least)

    @staticmethod
    def empty(form: Format, outputs: int, inputs: int) -> QuantWeight:
        """Allocated on the default device, to be filled."""
        groups = -(-inputs // form.group) if form.group else 1
        codes = torch.empty(
            outputs, inputs if form.bits == 8 else -(-inputs // 2), dtype=torch.uint8
        )
        scale, least = (
            torch.empty(outputs, groups, dtype=torch.float32 if form.wide else torch.float16)
            for _ in range(2)
        )
        return QuantWeight(form, inputs, codes, scale, least if form.least else None)

    def __getitem__(self, rows: slice | Tensor) -> QuantWeight:
        """Some rows; for a slice a view, so that what is written to it is written to this weight."""
        least = None if self.least is None else self.least[rows]
        return QuantWeight(self.form, self.shape[1], self.codes[rows], self.scale[rows], least)

    def unpacked(self) -> Tensor:
        """The codes, one in a byte: [out, in] uint8."""
        if self.form.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), 2).flatten(1)[:, : self.shape[1]]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]; computed in float32, every step rounded, as GGUF defines it."""
        inputs = self.shape[1]
        group = self.form.group or self.shape[1]
        if self.form.float:
            values = self.codes.view(torch.float8_e4m3fn).float()
        else:
            values = self.unpacked().float() - self.form.zero
        values *= self.scale.float().repeat_interleave(group, 1)[:, :inputs]
        if self.least is not None:
            values += self.least.float().repeat_interleave(group, 1)[:, :inputs]
        return values.to(dtype)


class JoinedWeight(nn.Module):
    """A weight whose rows are several weights, one below the other, of formats of their own."""

    def __init__(self, parts: Iterable[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def __getitem__(self, rows: slice) -> QuantWeight:
        """The part with exactly these rows."""
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
    """A weight as numbers, whatever it was: what backends without kernels for a format compute with."""
    return weight.dequantize(dtype) if isinstance(weight, QuantWeight | JoinedWeight) else weight  # type: ignore[return-value]
