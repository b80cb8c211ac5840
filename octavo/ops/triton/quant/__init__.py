"""Products with quantised weights on a GPU.

Reading order: packed_weight, weight_codes, quant_gemv, quant_gemm, hopper_gemm, activation_gemm,
wide_gemm.

    rows                kernel
    1                   quant_gemv: multiplies and adds in float32
    up to FEW_ROWS      quant_gemm: dequantises to bfloat16 in registers, for the tensor cores
    more                hopper_gemm: the same, overlapped with the tensor cores, on a Hopper GPU
                        and for formats and shapes that it supports; otherwise:
    up to DENSE_ROWS    quant_gemm
    more                dequantize: writes the weight as plain numbers for cuBLAS

For formats that round activations (int8-a8 with more than EXACT_ROWS rows, fp8 with any number of
rows), activation_gemm rounds them and the tensor cores multiply 8 bits by 8 bits. With more than
FEW_ROWS rows on a Hopper GPU, wide_gemm multiplies. The tiling follows from the shape alone: the
result of a row depends on the number of rows, and never on the values of other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.triton.dependent_launch import HOPPER_OR_LATER
from octavo.ops.triton.quant.activation_gemm import Rounded, rounded
from octavo.ops.triton.quant.dequantize import Dense, dense, embedding
from octavo.ops.triton.quant.hopper_gemm import (
    Hopper,
    fastest_hopper_tiling,
    hopper,
    hopper_supports,
)
from octavo.ops.triton.quant.packed_weight import TritonWeight
from octavo.ops.triton.quant.quant_gemm import Gemm, gemm
from octavo.ops.triton.quant.quant_gemv import Gemv, gemv
from octavo.ops.triton.quant.weight_codes import FP8, INT4, INT8
from octavo.ops.triton.quant.wide_gemm import ALIGNED_OUTPUTS
from octavo.ops.weight import rounds_activations

__all__ = ["Tiling", "TritonWeight", "choose_tiling", "embedding", "linear"]

Tiling = Gemv | Gemm | Hopper | Rounded | Dense
EXACT_ROWS = 16
FEW_ROWS = 64
DENSE_ROWS = 1024
FEW_OUTPUTS = 8192

# The tiling of products: by kind of code, by the largest number of rows, and for few or many
# outputs. Many outputs give enough programs that each can compute over all inputs.
# `octavo bench linear SHAPE --tune` tries other tilings.
TILINGS: dict[int, dict[int, tuple[Gemv | Gemm, Gemv | Gemm]]] = {
    INT4.value: {
        1: (Gemv(16, 4), Gemv(8, 2)),
        16: (Gemm(16, 64, 2, 4, 3, scale_sums=True),) * 2,
        32: (Gemm(32, 64, 1, 4, 4, scale_sums=True),) * 2,
        64: (Gemm(64, 64, 1, 3, 3), Gemm(64, 128, 1, 4, 2)),
        128: (Gemm(128, 64, 1, 3, 2),) * 2,
        DENSE_ROWS: (Gemm(128, 64, 1, 3, 2), Gemm(128, 128, 1, 3, 2, outputs_per_warp=32)),
    },
    INT8.value: {
        1: (Gemv(4, 4),) * 2,
        16: (Gemm(16, 64, 2, 4, 4),) * 2,
        32: (Gemm(32, 64, 2, 4, 3),) * 2,
        64: (Gemm(64, 64, 1, 4, 4), Gemm(64, 128, 2, 3, 2)),
        128: (Gemm(64, 128, 2, 3, 2), Gemm(128, 128, 1, 4, 2)),
        DENSE_ROWS: (Gemm(128, 128, 1, 4, 2, outputs_per_warp=32), Gemm(128, 128, 1, 4, 2)),
    },
}
TILINGS[FP8.value] = TILINGS[INT8.value]
ROUNDED = {
    64: Rounded(Gemm(64, 128, 2, 4, 2)),
    128: Rounded(Gemm(128, 128, 2, 4, 1)),
    1 << 31: Rounded(Gemm(256, 128, 2, 4, 1)),
}
# A tile covers 128 inputs, which is the size of a group of fp8 weights. A tile of 128 rows and 128
# outputs would need more registers than there are, because sums of groups are added outside of the
# tensor cores.
ROUNDED_FP8 = {
    16: Rounded(Gemm(16, 64, 2, 4, 4)),
    32: Rounded(Gemm(32, 64, 2, 4, 3)),
    1 << 31: Rounded(Gemm(64, 128, 2, 4, 2)),
}
# The tiling for float32 activations, which tensor cores do not support, and for GPUs before Hopper.
FALLBACK_TILING = Gemm(16, 64, 1, 2, 2)
BEFORE_HOPPER = torch.cuda.is_available() and not HOPPER_OR_LATER


def linear(
    hidden: Tensor,
    weight: TritonWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """hidden [T, in] -> [T, out], plus the residual, which is overwritten"""
    hidden = hidden.contiguous()
    tiling = tiling or choose_tiling(len(hidden), hidden.dtype, weight)
    if isinstance(tiling, Gemv):
        return gemv(hidden, weight, bias, residual, tiling)
    if isinstance(tiling, Gemm):
        return gemm(hidden, weight, bias, residual, tiling)
    if isinstance(tiling, Hopper):
        return hopper(hidden, weight, bias, residual, tiling)
    if isinstance(tiling, Rounded):
        return rounded(hidden, weight, bias, residual, tiling)
    output = dense(hidden, weight, bias, tiling)
    return output if residual is None else residual.add_(output)


def choose_tiling(rows: int, dtype: torch.dtype, weight: TritonWeight) -> Tiling:
    if rounds_activations(weight.format) or (
        rows > EXACT_ROWS and weight.format.quantizes_activations
    ):
        return choose_rounded_tiling(rows, dtype, weight)
    if rows > FEW_ROWS and hopper_supports(dtype, weight):
        return fastest_hopper_tiling(rows, *weight.shape)
    if rows > DENSE_ROWS:
        return Dense()
    if rows > 1 and (dtype == torch.float32 or BEFORE_HOPPER):
        return FALLBACK_TILING
    few_outputs_tiling, many_outputs_tiling = next(
        tilings for max_rows, tilings in TILINGS[weight.kind].items() if rows <= max_rows
    )
    return few_outputs_tiling if weight.shape[0] <= FEW_OUTPUTS else many_outputs_tiling


def choose_rounded_tiling(rows: int, dtype: torch.dtype, weight: TritonWeight) -> Rounded:
    is_wide = rows > FEW_ROWS and weight.shape[0] % ALIGNED_OUTPUTS == 0
    if is_wide and HOPPER_OR_LATER and dtype != torch.float32:
        return Rounded(None)
    if not weight.format.is_float and BEFORE_HOPPER:
        return Rounded(FALLBACK_TILING)
    tilings = ROUNDED_FP8 if weight.format.is_float else ROUNDED
    return next(tiling for max_rows, tiling in tilings.items() if rows <= max_rows)
