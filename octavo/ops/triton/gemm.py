"""Matrix products with few rows, where cuBLAS leaves memory bandwidth unused: it reads a 0.6B model's weights at 1.1 TB/s
with one row. Each program owns some outputs and walks along the whole input; the weights are read once.

    gemv_kernel     1 row: multiply and add, no tensor cores
    narrow_kernel   2..16 rows: the weight tile is the left operand of a tensor-core product, the rows its columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16


@triton.jit
def gemv_kernel(
    x, weight, bias, out, outputs, inputs, BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    mask = n < outputs
    at = weight + n.to(tl.int64)[:, None] * inputs + k[None, :]
    acc = tl.zeros([N, K], tl.float32)
    for start in range(0, inputs, K):
        inside = start + k < inputs
        w = tl.load(at + start, mask=mask[:, None] & inside[None, :], other=0.0)
        acc += w.to(tl.float32) * tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
    value = tl.sum(acc, 1)
    if BIAS:
        value += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + n, value, mask=mask)


@triton.jit
def narrow_kernel(
    x, weight, bias, out, rows, outputs, inputs,
    BIAS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, k, r = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K), tl.arange(0, R)
    mask = n < outputs
    at = weight + n.to(tl.int64)[:, None] * inputs + k[None, :]
    acc = tl.zeros([N, R], tl.float32)
    for start in range(0, inputs, K):
        inside = start + k < inputs
        w = tl.load(at + start, mask=mask[:, None] & inside[None, :], other=0.0)
        columns = tl.load(x + r[None, :] * inputs + start + k[:, None], mask=(r[None, :] < rows) & inside[:, None], other=0.0)
        acc = tl.dot(w, columns, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)[:, None]
    tl.store(out + r[None, :] * outputs + n[:, None], acc, mask=(r[None, :] < rows) & mask[:, None])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] with at most MAX_ROWS rows, weight [out, in] -> [rows, out]"""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = x.new_empty(rows, outputs)
    if rows == 1:
        n, k, warps = gemv_shape(outputs, inputs)
        gemv_kernel[triton.cdiv(outputs, n),](x, weight, bias, out, outputs, inputs, bias is not None, n, k, num_warps=warps)
    else:
        n = 16 if outputs <= 4096 else 32 if outputs <= 16384 else 64
        narrow_kernel[triton.cdiv(outputs, n),](
            x, weight, bias, out, rows, outputs, inputs, bias is not None, n, 256, 16,
            "ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=4,
        )  # fmt: skip
    return out


def gemv_shape(outputs: int, inputs: int) -> tuple[int, int, int]:
    """Outputs a program, inputs a step, warps."""
    return (4 if outputs <= 8192 else 16), min(1024, triton.next_power_of_2(inputs)), 4
