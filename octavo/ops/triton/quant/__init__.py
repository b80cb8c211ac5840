"""Products with quantised weights on a GPU. Reading order: packed, codes, gemv, gemm, hopper.

    rows                what computes
    1                   gemv: float32 multiply and add
    up to FEW_ROWS      gemm: weights become bfloat16 in registers, then tensor cores
    more                hopper: the same while the tensor cores are at work, on a Hopper GPU, if format and shape fit; else
    up to DENSE_ROWS    gemm
    more                dense: the weight is written out as numbers, then cuBLAS: that many rows pay for it

In the format that rounds activations (int8-a8), above EXACT_ROWS rows, a kernel rounds them and the tensor cores multiply 8
bits by 8 bits. How a product is cut up follows from its shape alone, so a row's result depends on how many rows there are and
never on what the others hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.triton.dependent_launch import AVAILABLE
from octavo.ops.triton.quant.activation_gemm import Rounded, rounded
from octavo.ops.triton.quant.dequantize import Dense, dense, embedding
from octavo.ops.triton.quant.hopper_gemm import Hopper, fastest, fits, hopper
from octavo.ops.triton.quant.packed_weight import PackedWeight
from octavo.ops.triton.quant.quant_gemm import Gemm, gemm
from octavo.ops.triton.quant.quant_gemv import Gemv, gemv
from octavo.ops.triton.quant.weight_codes import FP8, INT4, INT8

__all__ = ["How", "PackedWeight", "choose", "embedding", "linear"]

How = Gemv | Gemm | Hopper | Rounded | Dense
EXACT_ROWS = 16
FEW_ROWS = 64
DENSE_ROWS = 1024
FEW_OUTPUTS = 8192

# How products are cut up: by kind of code, by the most rows that an entry is for, and whether they have few outputs or many: with
# many there are programs enough that each can have all inputs. `octavo bench linear SHAPE --tune` tries others.
ROWS: dict[int, dict[int, tuple[Gemv | Gemm, Gemv | Gemm]]] = {
    INT4.value: {
        1: (Gemv(16, 4), Gemv(8, 2)),
        16: (Gemm(16, 64, 2, 4, 3, after=True),) * 2,
        32: (Gemm(32, 64, 1, 4, 4, after=True),) * 2,
        64: (Gemm(64, 64, 1, 3, 3), Gemm(64, 128, 1, 4, 2)),
        128: (Gemm(128, 64, 1, 3, 2),) * 2,
        DENSE_ROWS: (Gemm(128, 64, 1, 3, 2), Gemm(128, 128, 1, 3, 2, tall=32)),
    },
    INT8.value: {
        1: (Gemv(4, 4),) * 2,
        16: (Gemm(16, 64, 2, 4, 4),) * 2,
        32: (Gemm(32, 64, 2, 4, 3),) * 2,
        64: (Gemm(64, 64, 1, 4, 4), Gemm(64, 128, 2, 3, 2)),
        128: (Gemm(64, 128, 2, 3, 2), Gemm(128, 128, 1, 4, 2)),
        DENSE_ROWS: (Gemm(128, 128, 1, 4, 2, tall=32), Gemm(128, 128, 1, 4, 2)),
    },
}
ROWS[FP8.value] = ROWS[INT8.value]
ROUNDED = {
    64: Rounded(Gemm(64, 128, 2, 4, 2)),
    128: Rounded(Gemm(128, 128, 2, 4, 1)),
    1 << 31: Rounded(Gemm(256, 128, 2, 4, 1)),
}
# for activations of four bytes, which no tensor core takes, and GPUs before Hopper
SMALL = Gemm(16, 64, 1, 2, 2)
OLD = torch.cuda.is_available() and not AVAILABLE


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    how: How | None = None,
) -> Tensor:
    """x [T, in] -> [T, out], written over add where there is one"""
    x = x.contiguous()
    how = how or choose(len(x), x.dtype, weight)
    if isinstance(how, Gemv):
        return gemv(x, weight, bias, add, how)
    if isinstance(how, Gemm):
        return gemm(x, weight, bias, add, how)
    if isinstance(how, Hopper):
        return hopper(x, weight, bias, add, how)
    if isinstance(how, Rounded):
        return rounded(x, weight, bias, add, how)
    out = dense(x, weight, bias, how)
    return out if add is None else add.add_(out)


def choose(rows: int, dtype: torch.dtype, weight: PackedWeight) -> How:
    if rows > EXACT_ROWS and weight.format.quantizes_activations:
        return Rounded(SMALL) if OLD else next(how for most, how in ROUNDED.items() if rows <= most)
    if rows > FEW_ROWS and fits(dtype, weight):
        return fastest(rows, *weight.shape)
    if rows > DENSE_ROWS:
        return Dense()
    if rows > 1 and (dtype == torch.float32 or OLD):
        return SMALL
    few, many = next(hows for most, hows in ROWS[weight.kind].items() if rows <= most)
    return few if weight.shape[0] <= FEW_OUTPUTS else many
