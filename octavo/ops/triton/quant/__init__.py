"""Products with quantised weights on a GPU. Reading order: packed, codes, gemv, gemm.

    rows                what computes
    1                   gemv: float32 multiply and add
    up to DENSE_ROWS    gemm: weights become bfloat16 in registers, then tensor cores
    more                dense: the weight is written out as numbers, then cuBLAS: that many rows pay for it

In formats that round activations (fp8, int8-a8), above ROUNDED_ROWS rows, a kernel rounds them and the tensor cores multiply 8
bits by 8 bits. How a product is cut up follows from its shape alone, so a row's result depends on how many rows there are and
never on what the others hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.triton.overlap import AVAILABLE
from octavo.ops.triton.quant.codes import FP8, INT4, INT8
from octavo.ops.triton.quant.dense import dense, embedding
from octavo.ops.triton.quant.gemm import Gemm, gemm
from octavo.ops.triton.quant.gemv import Gemv, gemv
from octavo.ops.triton.quant.packed import PackedWeight
from octavo.ops.triton.quant.rounded import rounded

__all__ = ["PackedWeight", "embedding", "linear"]

DENSE_ROWS = 1024
ROUNDED_ROWS = 16

# How products are cut up: by kind of code, and by the most rows that an entry is for. `octavo bench linear SHAPE --tune` tries
# others and prints the best.
ONE_ROW = {INT4.value: Gemv(4, 4), INT8.value: Gemv(4, 4), FP8.value: Gemv(4, 4)}
ROWS = {
    INT4.value: {
        16: Gemm(16, 64, 2, 4, 4, after=True),
        32: Gemm(32, 64, 1, 4, 3, after=True),
        64: Gemm(64, 128, 1, 4, 2),
        128: Gemm(128, 128, 1, 4, 1),
        DENSE_ROWS: Gemm(256, 128, 1, 3, 1),
    },
    INT8.value: {
        16: Gemm(16, 64, 2, 4, 4),
        32: Gemm(32, 64, 2, 4, 3),
        64: Gemm(64, 128, 2, 4, 2),
        128: Gemm(128, 128, 2, 4, 1),
        DENSE_ROWS: Gemm(256, 128, 1, 4, 1),
    },
}
ROWS[FP8.value] = ROWS[INT8.value]
ROUNDED = {64: Gemm(64, 128, 2, 4, 2), 128: Gemm(128, 128, 2, 4, 1), 1 << 31: Gemm(256, 128, 2, 4, 1)}


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out]"""
    x, rows = x.contiguous(), len(x)
    if rows > ROUNDED_ROWS and weight.form.rounds and _can_round(x, weight):
        return rounded(x, weight, bias, pick(ROUNDED, rows))
    if rows == 1:
        return gemv(x, weight, bias, ONE_ROW[weight.kind])
    if rows <= DENSE_ROWS:
        return gemm(x, weight, bias, pick(ROWS[weight.kind], rows))
    return dense(x, weight, bias)


def pick(table: dict[int, Gemm], rows: int) -> Gemm:
    return next(how for most, how in table.items() if rows <= most)


def _can_round(x: Tensor, weight: PackedWeight) -> bool:
    """Integers always; e4m3 where the library multiplies it: a Hopper GPU, bfloat16, outputs in sixteens."""
    return not weight.form.float or (AVAILABLE and x.dtype == torch.bfloat16 and weight.shape[0] % 16 == 0)
