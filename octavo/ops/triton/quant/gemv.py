"""A quantised matrix times one row: float32 multiply and add, as fast as the weights come."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.overlap import AVAILABLE, LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.codes import INT4, floats, group_info
from octavo.ops.triton.quant.packed import PackedWeight


class Gemv(NamedTuple):
    """How the product of one row is cut up."""

    outputs: int  # of a program
    warps: int  # each reads 256 words of every output at a time


@triton.jit
def gemv_kernel(
    x, words, info, bias, out, outputs, inputs, row_words, KIND: tl.constexpr, GROUP: tl.constexpr, LEAST: tl.constexpr,
    BIAS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """N outputs. A thread reads 8 words of each at a time, all together V times 8; the next ones are under way meanwhile, the
    first ones even while the kernel that makes x may still run."""
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    SHARED: tl.constexpr = PARTS if GROUP == 0 or GROUP >= 32 * PARTS else GROUP // 32  # parts that have a scale in common
    GROUPS: tl.constexpr = PARTS // SHARED  # in a block
    # Of 4 bits the parts are 1 + code / 16: what must be subtracted is a multiple of the inputs' sum.
    ZERO: tl.constexpr = 0.0 if KIND != INT4 else 1.0 if LEAST else 1.5
    FACTOR: tl.constexpr = 16.0 if KIND == INT4 else 1.0
    n, v = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, V)
    row = tl.minimum(n, outputs - 1)
    word = v[:, None] * 8 + tl.arange(0, 8)[None, :]
    first = (word // 32) * (32 * PARTS) + word % 32  # the input that a word's first part belongs to
    at = words + row.to(tl.int64)[:, None, None] * row_words + word[None, :, :]
    ahead = tl.load(at, mask=(word < row_words)[None, :, :], other=0)
    wait_for_inputs()
    total = tl.zeros([N, V], tl.float32)
    for start in range(0, row_words, V * 8):
        parts = floats(ahead, KIND, ASM)
        ahead = tl.load(at + start + V * 8, mask=(start + V * 8 + word < row_words)[None, :, :], other=0)
        block = tl.minimum(start + v * 8, row_words - 1) // 32
        for j in tl.static_range(PARTS):
            k = start * PARTS + first + 32 * j
            value = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
            if j % SHARED == 0:
                product = parts[j] * value[None, :, :]
                sum_x = value
            else:
                product += parts[j] * value[None, :, :]
                sum_x += value
            if j % SHARED == SHARED - 1:
                result = (tl.sum(product, 2) - ZERO * tl.sum(sum_x, 1)[None, :]) * FACTOR
                if GROUP > 0:
                    scale, least = group_info(info + row[:, None], (block * GROUPS + j // SHARED)[None, :], outputs, LEAST)
                    result *= scale
                    if LEAST:
                        result += least * tl.sum(sum_x, 1)[None, :]
                total += result
    value = tl.sum(total, 1)
    if GROUP == 0:
        value *= tl.load(info + row)
    if BIAS:
        value += tl.load(bias + row).to(tl.float32)
    tl.store(out + n, value, mask=n < outputs)


def gemv(x: Tensor, weight: PackedWeight, bias: Tensor | None, how: Gemv) -> Tensor:
    """x [1, in] -> [1, out]"""
    (outputs, inputs), form = weight.shape, weight.form
    out = x.new_empty(1, outputs)
    gemv_kernel[triton.cdiv(outputs, how.outputs),](
        x, weight.words, weight.info, bias, out, outputs, inputs, weight.words.shape[1], weight.kind, form.group,
        form.least, bias is not None, how.outputs, 32 * how.warps, AVAILABLE, num_warps=how.warps, **LAUNCH,
    )  # fmt: skip
    return out
