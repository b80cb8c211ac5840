"""A quantised matrix times one row: float32 multiply and add, as fast as the weights come."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import AVAILABLE, LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.packed_weight import PackedWeight
from octavo.ops.triton.quant.weight_codes import INT4, dot_of_halves, floats, info_of, two_halves


class Gemv(NamedTuple):
    """How the product of one row is cut up."""

    outputs: int  # of a program
    warps: int  # together they read that many times 128 pairs of words of every output at a time


@triton.jit
def _two(pairs, DTYPE: tl.constexpr):
    """Integers of two numbers each -> the numbers, float32."""
    if DTYPE.primitive_bitwidth == 16:
        a = pairs.to(tl.int16)
        b = (pairs >> 16).to(tl.int16)
    else:
        a = pairs.to(tl.int32)
        b = (pairs >> 32).to(tl.int32)
    return a.to(DTYPE, bitcast=True).to(tl.float32), b.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _in_floats(
    codes, x, k, inputs, info, n, block, width, inside, out, KIND: tl.constexpr, GROUP: tl.constexpr, LEAST: tl.constexpr,
    V: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """codes [N, 4 V] times their inputs, the first of which are pairs k [4 V] -> sums [N, V], in float32 throughout."""
    N: tl.constexpr = codes.shape[0]
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    # Parts that have a scale in common; of groups of 16 every part has two, of two threads each.
    SHARED: tl.constexpr = (
        PARTS if GROUP == 0 or GROUP >= 32 * PARTS else 1 if GROUP == 16 else GROUP // 32
    )
    GROUPS: tl.constexpr = PARTS // SHARED  # in a block
    # Of 4 bits the parts are 1 + code / 16: what must be subtracted is a multiple of the inputs' sum.
    ZERO: tl.constexpr = 0.0 if KIND != INT4 else 1.0 if LEAST else 1.5
    FACTOR: tl.constexpr = 16.0 if KIND == INT4 else 1.0
    parts = floats(codes, KIND, ASM)
    total = tl.zeros([N, V], tl.float32)
    for j in tl.static_range(PARTS):
        a, b = _two(
            tl.load(x + k + 16 * j, mask=_below(k + 16 * j, inputs, EVEN), other=0),
            out.dtype.element_ty,
        )
        if j % SHARED == 0:
            product = parts[2 * j] * a[None, :]
            sum_x = a + b
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
                    group = ((block * PARTS + j) * 2 + tl.arange(0, V) // 2 % 2)[None, :]
                else:
                    group = (block * GROUPS + j // SHARED)[None, :]
                scale, least = info_of(info, n[:, None], group, width, inside, LEAST)
                result *= scale
                if LEAST:
                    result += least * shift
            total += result
    return total


@triton.jit
def _in_halves(
    codes, x, k, inputs, info, n, block, width, inside, out, LEAST: tl.constexpr, V: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The same for 4-bit codes in groups of 128, a block, at half the instructions: sixteen products at a time are added in
    float16, the rest in float32. A thread's 32 inputs are first multiplied by a power of two, so that the largest is 2^14."""
    N: tl.constexpr = codes.shape[0]
    DTYPE: tl.constexpr = out.dtype.element_ty
    a0, b0 = _two(tl.load(x + k, mask=_below(k, inputs, EVEN), other=0), DTYPE)
    a1, b1 = _two(tl.load(x + k + 16, mask=_below(k + 16, inputs, EVEN), other=0), DTYPE)
    a2, b2 = _two(tl.load(x + k + 32, mask=_below(k + 32, inputs, EVEN), other=0), DTYPE)
    a3, b3 = _two(tl.load(x + k + 48, mask=_below(k + 48, inputs, EVEN), other=0), DTYPE)
    most = tl.maximum(
        tl.maximum(_larger(a0, b0), _larger(a1, b1)), tl.maximum(_larger(a2, b2), _larger(a3, b3))
    )
    # the power of two below the largest
    most = tl.max(most.reshape(V, 4), 1).to(tl.int32, bitcast=True) & 0x7F800000
    most = tl.maximum(most, 0x10000000)  # 2^-95, so that its inverse is a number
    # 2^14 over it; of infinity it makes what is no number
    f = (0x7F000000 - most).to(tl.float32, bitcast=True) * 16384.0
    f = tl.broadcast_to(f[:, None], (V, 4)).reshape(V * 4)
    g = f * 0.0625
    x0 = two_halves(a0 * f, b0 * f).reshape(1, V, 4)
    x1 = two_halves(a1 * g, b1 * g).reshape(1, V, 4)
    x2 = two_halves(a2 * f, b2 * f).reshape(1, V, 4)
    x3 = two_halves(a3 * g, b3 * g).reshape(1, V, 4)
    result = dot_of_halves(codes.reshape(N, V, 4), x0, x1, x2, x3)
    unit = most.to(tl.float32, bitcast=True) * 1024.0  # 2^24 / 2^14
    shift = tl.sum((((a0 + b0) + (a1 + b1)) + ((a2 + b2) + (a3 + b3))).reshape(V, 4), 1)[None, :]
    scale, least = info_of(info, n[:, None], block[None, :], width, inside, LEAST)
    if LEAST:
        return result * unit[None, :] * scale + shift * least
    else:
        return (result * unit[None, :] - 8.0 * shift) * scale


@triton.jit
def _part(
    codes, x, start, first, inputs, info, n, row_pairs, width, inside, out, KIND: tl.constexpr, GROUP: tl.constexpr,
    LEAST: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """What the words from `start` on add to the sums [N, V]."""
    k = start * (4 if KIND == INT4 else 2) + first
    block = tl.minimum(start + tl.arange(0, V) * 4, row_pairs - 1) // 16
    if HALVES:
        return _in_halves(codes, x, k, inputs, info, n, block, width, inside, out, LEAST, V, EVEN)
    else:
        return _in_floats(
            codes,
            x,
            k,
            inputs,
            info,
            n,
            block,
            width,
            inside,
            out,
            KIND,
            GROUP,
            LEAST,
            V,
            EVEN,
            ASM,
        )


@triton.jit
def _below(i, limit, EVEN: tl.constexpr):
    """A mask of what lies inside; EVEN: all of it, which costs nothing."""
    if EVEN:
        return tl.full(i.shape, 1, tl.int1)
    else:
        return i < limit


@triton.jit
def _larger(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b))


@triton.jit
def gemv_kernel(
    x, words, info, bias, add, out, outputs, inputs, row_pairs, width, KIND: tl.constexpr, GROUP: tl.constexpr,
    LEAST: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, N: tl.constexpr, V: tl.constexpr, ASM: tl.constexpr,
    EVEN: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """N outputs; x, `inputs` and words in pairs. A thread reads 4 pairs of each row at a time, V threads together; the next ones
    are under way meanwhile, the first ones even while the kernel that makes x may still run. Layouts are such that no value
    moves between threads before the end."""
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    n = tl.program_id(0) * N + tl.arange(0, N)
    pair = tl.arange(0, V * 4)
    inside = _below(n, outputs, EVEN)[:, None]
    first = (pair // 16) * (16 * PARTS) + pair % 16  # the pair of inputs that first parts belong to
    at = words + n.to(tl.int64)[:, None] * row_pairs + pair[None, :]
    codes = tl.load(at, mask=inside & _below(pair, row_pairs, EVEN)[None, :], other=0)
    wait_for_inputs()
    total = tl.zeros([N, V], tl.float32)
    for start in range(V * 4, row_pairs, V * 4):
        ahead = tl.load(
            at + start, mask=inside & _below(start + pair, row_pairs, EVEN)[None, :], other=0
        )
        total += _part(
            codes, x, start - V * 4, first, inputs, info, n, row_pairs, width, inside, out, KIND, GROUP, LEAST, V,
            EVEN, ASM, HALVES,
        )  # fmt: skip
        codes = ahead
    total += _part(
        codes, x, tl.cdiv(row_pairs, V * 4) * V * 4 - V * 4, first, inputs, info, n, row_pairs, width, inside, out, KIND, GROUP,
        LEAST, V, EVEN, ASM, HALVES,
    )  # fmt: skip
    value = tl.sum(total, 1)
    if GROUP == 0:
        value *= tl.load(info + n, mask=n < outputs, other=0.0)
    if BIAS:
        value += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(add + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, value, mask=n < outputs)


def gemv(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, add: Tensor | None, how: Gemv
) -> Tensor:
    """x [1, in] -> [1, out], written over add where there is one"""
    (outputs, inputs) = weight.shape
    form = weight.format
    out = x.new_empty(1, outputs) if add is None else add
    if inputs % 2:
        x = F.pad(x, (0, 1))
    row_pairs = weight.words.shape[1] // 2
    even = (
        outputs % how.outputs == 0
        and row_pairs % (128 * how.warps) == 0
        and inputs == row_pairs * 2 * weight.parts
    )
    pairs = torch.int64 if x.dtype == torch.float32 else torch.int32
    gemv_kernel[triton.cdiv(outputs, how.outputs),](
        x.view(pairs), weight.words.view(torch.int32), weight.info, bias, add, out, outputs, x.shape[1] // 2,
        row_pairs, weight.info.shape[-1], weight.kind, form.group_size, form.asymmetric, bias is not None,
        add is not None, how.outputs, 32 * how.warps, AVAILABLE, even,
        AVAILABLE and form.bits == 4 and form.group_size == 128 and x.dtype != torch.float32, num_warps=how.warps, **LAUNCH,
    )  # fmt: skip
    return out
