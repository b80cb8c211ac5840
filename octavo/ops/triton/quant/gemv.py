"""A quantised matrix times one row: float32 multiply and add, as fast as the weights come."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.overlap import AVAILABLE, LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.codes import INT4, floats, info_of
from octavo.ops.triton.quant.packed import PackedWeight


class Gemv(NamedTuple):
    """How the product of one row is cut up."""

    outputs: int  # of a program
    warps: int  # together they read that many times 128 pairs of words of every output at a time


@triton.jit
def _two(pairs, DTYPE: tl.constexpr):
    """Integers of two numbers each -> the numbers, float32."""
    if DTYPE.primitive_bitwidth == 16:
        a, b = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    else:
        a, b = pairs.to(tl.int32), (pairs >> 32).to(tl.int32)
    return a.to(DTYPE, bitcast=True).to(tl.float32), b.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def gemv_kernel(
    x, words, info, bias, add, out, outputs, inputs, row_pairs, width, KIND: tl.constexpr, GROUP: tl.constexpr,
    LEAST: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, N: tl.constexpr, V: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """N outputs; x, `inputs` and words in pairs. A thread reads 4 pairs of each row at a time, V threads together; the next ones
    are under way meanwhile, the first ones even while the kernel that makes x may still run. Layouts are such that no value
    moves between threads before the end."""
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    # Parts that have a scale in common; of groups of 16 every part has two, of two threads each.
    SHARED: tl.constexpr = PARTS if GROUP == 0 or GROUP >= 32 * PARTS else 1 if GROUP == 16 else GROUP // 32
    GROUPS: tl.constexpr = PARTS // SHARED  # in a block
    # Of 4 bits the parts are 1 + code / 16: what must be subtracted is a multiple of the inputs' sum.
    ZERO: tl.constexpr = 0.0 if KIND != INT4 else 1.0 if LEAST else 1.5
    FACTOR: tl.constexpr = 16.0 if KIND == INT4 else 1.0
    n, v, pair = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, V), tl.arange(0, V * 4)
    inside = (n < outputs)[:, None]
    first = (pair // 16) * (16 * PARTS) + pair % 16  # the pair of inputs that first parts belong to
    at = words + n.to(tl.int64)[:, None] * row_pairs + pair[None, :]
    ahead = tl.load(at, mask=inside & (pair < row_pairs)[None, :], other=0)
    wait_for_inputs()
    total = tl.zeros([N, V], tl.float32)
    for start in range(0, row_pairs, V * 4):
        parts = floats(ahead, KIND, ASM)
        ahead = tl.load(at + start + V * 4, mask=inside & (start + V * 4 + pair < row_pairs)[None, :], other=0)
        block = tl.minimum(start + v * 4, row_pairs - 1) // 16
        for j in tl.static_range(PARTS):
            k = start * PARTS + first + 16 * j
            a, b = _two(tl.load(x + k, mask=k < inputs, other=0), out.dtype.element_ty)
            if j % SHARED == 0:
                product, sum_x = parts[2 * j] * a[None, :], a + b
            else:
                product += parts[2 * j] * a[None, :]
                sum_x += a + b
            product += parts[2 * j + 1] * b[None, :]
            if j % SHARED == SHARED - 1:
                result = tl.sum(product.reshape(N, V, 4), 2)
                if KIND == INT4 or LEAST:
                    shift = tl.sum(sum_x.reshape(V, 4), 1)[None, :]
                if KIND == INT4:
                    result = (result - ZERO * shift) * FACTOR
                if GROUP > 0:
                    if GROUP == 16:
                        group = ((block * PARTS + j) * 2 + v // 2 % 2)[None, :]
                    else:
                        group = (block * GROUPS + j // SHARED)[None, :]
                    scale, least = info_of(info, n[:, None], group, width, inside, LEAST)
                    result *= scale
                    if LEAST:
                        result += least * shift
                total += result
    value = tl.sum(total, 1)
    if GROUP == 0:
        value *= tl.load(info + n, mask=n < outputs, other=0.0)
    if BIAS:
        value += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(add + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, value, mask=n < outputs)


def gemv(x: Tensor, weight: PackedWeight, bias: Tensor | None, add: Tensor | None, how: Gemv) -> Tensor:
    """x [1, in] -> [1, out], written over add where there is one"""
    (outputs, inputs), form = weight.shape, weight.form
    out = x.new_empty(1, outputs) if add is None else add
    if inputs % 2:
        x = F.pad(x, (0, 1))
    pairs = torch.int64 if x.dtype == torch.float32 else torch.int32
    gemv_kernel[triton.cdiv(outputs, how.outputs),](
        x.view(pairs), weight.words.view(torch.int32), weight.info, bias, add, out, outputs, x.shape[1] // 2,
        weight.words.shape[1] // 2, weight.info.shape[-1], weight.kind, form.group, form.least, bias is not None,
        add is not None, how.outputs, 32 * how.warps, AVAILABLE, num_warps=how.warps, **LAUNCH,
    )  # fmt: skip
    return out
