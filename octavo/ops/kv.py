"""Compressed KV as every backend receives it: a byte for each number and one float32 scale for each vector of a head.

    value[block, kind, head, offset, d] = code[block, kind, head, offset, d] * scale[block, kind, head, offset]

A vector is compressed when it is written and never touched again, so neither chunks nor neighbours nor copies of a block change
it. A byte is an int8 in -127..127 or a float8 (e4m3), whose largest value is 448: the largest number of a vector gets the
largest code. What the codes mean is defined here, by compress() and expand(); a backend's kernels do the same in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST = 1e-30  # a vector below this is zero: its scale would have no inverse


@dataclass(frozen=True, slots=True, eq=False)
class QuantKV:
    """KV of one layer, or of all. Indexing takes the same part of both."""

    codes: Tensor  # [N, 2, Hk, B, D] or [N, layers, 2, Hk, B, D]: int8 or float8_e4m3fn
    scales: Tensor  # the same without D: float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    def __getitem__(self, index: Any) -> QuantKV:
        return QuantKV(self.codes[index], self.scales[index])


KV: TypeAlias = Tensor | QuantKV


def dtype_name(dtype: torch.dtype) -> str:
    """As users write it."""
    return next(
        (name for name, kind in CODES.items() if kind == dtype), str(dtype).removeprefix("torch.")
    )


def compress(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes [..., D], scales [...]. A vector with an infinity or a NaN in it becomes NaN throughout."""
    x = x.float()
    peak = x.abs().amax(-1, keepdim=True)
    scale = torch.where(peak < SMALLEST, 0.0, peak / LARGEST[dtype])
    codes = x * torch.where(peak < SMALLEST, 0.0, LARGEST[dtype] / peak)
    codes = torch.where(peak.isfinite(), codes, 0.0)
    scale = torch.where(peak.isfinite(), scale, torch.nan)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale.squeeze(-1)


def expand(kv: QuantKV) -> Tensor:
    """The numbers that the codes stand for, in float32."""
    return kv.codes.float() * kv.scales.unsqueeze(-1)
