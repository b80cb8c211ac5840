"""Compressed KV as every backend receives it: one byte for each number and one scale per vector.

    value[block, kind, head, offset, d] =
        code[block, kind, head, offset, d] * scale[block, kind, head, offset]

The vector of a head is compressed when it is written and never changed later, so it does not depend
on chunks, neighbours or copies of a block. The scale is float32. A code is an int8 in -127..127 or
a float8 (e4m3), whose largest value is 448. The largest number of a vector gets the largest code.
compress() and expand() define the meaning of codes; the kernels of a backend do the same in
registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST = 1e-30  # a vector with smaller numbers is zero, because its scale would have no inverse


@dataclass(frozen=True, slots=True, eq=False)
class QuantKV:
    """Compressed KV of one layer or of all layers. Indexing applies to codes and scales."""

    codes: Tensor  # [N, 2, Hk, B, D] or [N, layers, 2, Hk, B, D]: int8 or float8_e4m3fn
    scales: Tensor  # the same shape without D: float32

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
    """Return the name of a dtype as users write it."""
    return next(
        (name for name, code_dtype in CODES.items() if code_dtype == dtype),
        str(dtype).removeprefix("torch."),
    )


def compress(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """values [..., D] -> codes [..., D], scales [...]

    If one number of a vector is infinite or NaN, the whole vector becomes NaN.
    """
    values = values.float()
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.where(largest < SMALLEST, 0.0, largest / LARGEST[dtype])
    codes = values * torch.where(largest < SMALLEST, 0.0, LARGEST[dtype] / largest)
    codes = torch.where(largest.isfinite(), codes, 0.0)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale.squeeze(-1)


def expand(kv_cache: QuantKV) -> Tensor:
    """Return the numbers of compressed KV, in float32."""
    return kv_cache.codes.float() * kv_cache.scales.unsqueeze(-1)
