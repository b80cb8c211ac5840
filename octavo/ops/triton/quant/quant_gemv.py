"""A quantised matrix times one row: multiplies and adds in float32, at memory speed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import HOPPER_OR_LATER, LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.packed_weight import TritonWeight
from octavo.ops.triton.quant.weight_codes import INT4, dot_of_halves, floats, info_of, pack_halves


class Gemv(NamedTuple):
    """The tiling of a product with one row."""

    outputs: int  # the number of outputs of a program
    warps: int  # each warp reads 128 pairs of words of every output at a time


@triton.jit
def _unpack_pair(pairs, DTYPE: tl.constexpr):
    """Integers that hold two numbers each -> the two numbers as float32"""
    if DTYPE.primitive_bitwidth == 16:
        first = pairs.to(tl.int16)
        second = (pairs >> 16).to(tl.int16)
    else:
        first = pairs.to(tl.int32)
        second = (pairs >> 32).to(tl.int32)
    return first.to(DTYPE, bitcast=True).to(tl.float32), second.to(DTYPE, bitcast=True).to(
        tl.float32
    )


@triton.jit
def _multiply_in_float32(
    codes,
    input_ptr,
    input_pairs,
    num_input_pairs,
    info_ptr,
    output_offsets,
    blocks,
    info_width,
    in_range,
    output_ptr,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    THREADS: tl.constexpr,
    EVEN: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Multiply codes [TILE_OUTPUTS, 4 THREADS] with their inputs in float32.

    input_pairs [4 THREADS] are the inputs of the first parts. Returns sums [TILE_OUTPUTS, THREADS].
    """
    TILE_OUTPUTS: tl.constexpr = codes.shape[0]
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    # The number of parts that share a scale. In groups of 16, each part has two scales, one for two
    # threads each.
    SHARED: tl.constexpr = (
        PARTS
        if GROUP_SIZE == 0 or GROUP_SIZE >= 32 * PARTS
        else 1
        if GROUP_SIZE == 16
        else GROUP_SIZE // 32
    )
    GROUPS: tl.constexpr = PARTS // SHARED  # in a block
    # 4-bit parts are 1 + code / 16, so a multiple of the sum of the inputs must be subtracted.
    ZERO_POINT: tl.constexpr = 0.0 if KIND != INT4 else 1.0 if ASYMMETRIC else 1.5
    FACTOR: tl.constexpr = 16.0 if KIND == INT4 else 1.0
    values = floats(codes, KIND, USE_ASM)
    total = tl.zeros([TILE_OUTPUTS, THREADS], tl.float32)
    for part in tl.static_range(PARTS):
        first, second = _unpack_pair(
            tl.load(
                input_ptr + input_pairs + 16 * part,
                mask=_below(input_pairs + 16 * part, num_input_pairs, EVEN),
                other=0,
            ),
            output_ptr.dtype.element_ty,
        )
        if part % SHARED == 0:
            product = values[2 * part] * first[None, :]
            input_sum = first + second
        else:
            product += values[2 * part] * first[None, :]
            input_sum += first + second
        product += values[2 * part + 1] * second[None, :]
        if part % SHARED == SHARED - 1:
            result = tl.sum(product.reshape(TILE_OUTPUTS, THREADS, 4), 2)
            if KIND == INT4 or ASYMMETRIC:
                input_total = tl.sum(input_sum.reshape(THREADS, 4), 1)[None, :]
            if KIND == INT4:
                result = (result - ZERO_POINT * input_total) * FACTOR
            if GROUP_SIZE > 0:
                if GROUP_SIZE == 16:
                    groups = ((blocks * PARTS + part) * 2 + tl.arange(0, THREADS) // 2 % 2)[None, :]
                else:
                    groups = (blocks * GROUPS + part // SHARED)[None, :]
                scale, least = info_of(
                    info_ptr, output_offsets[:, None], groups, info_width, in_range, ASYMMETRIC
                )
                result *= scale
                if ASYMMETRIC:
                    result += least * input_total
            total += result
    return total


@triton.jit
def _multiply_in_float16(
    codes,
    input_ptr,
    input_pairs,
    num_input_pairs,
    info_ptr,
    output_offsets,
    blocks,
    info_width,
    in_range,
    output_ptr,
    ASYMMETRIC: tl.constexpr,
    THREADS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Do _multiply_in_float32 for 4-bit codes in groups of 128, with half the instructions.

    Sixteen products at a time are added in float16, the rest in float32. The 32 inputs of a thread
    are first multiplied by a power of two, so that the largest is about 2^14.
    """
    TILE_OUTPUTS: tl.constexpr = codes.shape[0]
    DTYPE: tl.constexpr = output_ptr.dtype.element_ty
    first0, second0 = _unpack_pair(
        tl.load(input_ptr + input_pairs, mask=_below(input_pairs, num_input_pairs, EVEN), other=0),
        DTYPE,
    )
    first1, second1 = _unpack_pair(
        tl.load(
            input_ptr + input_pairs + 16,
            mask=_below(input_pairs + 16, num_input_pairs, EVEN),
            other=0,
        ),
        DTYPE,
    )
    first2, second2 = _unpack_pair(
        tl.load(
            input_ptr + input_pairs + 32,
            mask=_below(input_pairs + 32, num_input_pairs, EVEN),
            other=0,
        ),
        DTYPE,
    )
    first3, second3 = _unpack_pair(
        tl.load(
            input_ptr + input_pairs + 48,
            mask=_below(input_pairs + 48, num_input_pairs, EVEN),
            other=0,
        ),
        DTYPE,
    )
    largest = tl.maximum(
        tl.maximum(_larger_magnitude(first0, second0), _larger_magnitude(first1, second1)),
        tl.maximum(_larger_magnitude(first2, second2), _larger_magnitude(first3, second3)),
    )
    # Clearing the mantissa rounds the largest input down to a power of two.
    largest = tl.max(largest.reshape(THREADS, 4), 1).to(tl.int32, bitcast=True) & 0x7F800000
    largest = tl.maximum(largest, 0x10000000)  # 2^-95, so that the inverse is finite
    # The factor is 2^14 / largest. An infinite input gives NaN.
    factor = (0x7F000000 - largest).to(tl.float32, bitcast=True) * 16384.0
    factor = tl.broadcast_to(factor[:, None], (THREADS, 4)).reshape(THREADS * 4)
    factor_sixteenth = factor * 0.0625
    inputs0 = pack_halves(first0 * factor, second0 * factor).reshape(1, THREADS, 4)
    inputs1 = pack_halves(first1 * factor_sixteenth, second1 * factor_sixteenth).reshape(
        1, THREADS, 4
    )
    inputs2 = pack_halves(first2 * factor, second2 * factor).reshape(1, THREADS, 4)
    inputs3 = pack_halves(first3 * factor_sixteenth, second3 * factor_sixteenth).reshape(
        1, THREADS, 4
    )
    result = dot_of_halves(
        codes.reshape(TILE_OUTPUTS, THREADS, 4), inputs0, inputs1, inputs2, inputs3
    )
    unit = largest.to(tl.float32, bitcast=True) * 1024.0  # 2^24 / 2^14
    input_total = tl.sum(
        (
            ((first0 + second0) + (first1 + second1)) + ((first2 + second2) + (first3 + second3))
        ).reshape(THREADS, 4),
        1,
    )[None, :]
    scale, least = info_of(
        info_ptr, output_offsets[:, None], blocks[None, :], info_width, in_range, ASYMMETRIC
    )
    if ASYMMETRIC:
        return result * unit[None, :] * scale + input_total * least
    else:
        return (result * unit[None, :] - 8.0 * input_total) * scale


@triton.jit
def _partial_sums(
    codes,
    input_ptr,
    start,
    first_pairs,
    num_input_pairs,
    info_ptr,
    output_offsets,
    row_pairs,
    info_width,
    in_range,
    output_ptr,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    THREADS: tl.constexpr,
    EVEN: tl.constexpr,
    USE_ASM: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Compute what the words from `start` on add to the sums [TILE_OUTPUTS, THREADS]."""
    input_pairs = start * (4 if KIND == INT4 else 2) + first_pairs
    blocks = tl.minimum(start + tl.arange(0, THREADS) * 4, row_pairs - 1) // 16
    if HALVES:
        return _multiply_in_float16(
            codes,
            input_ptr,
            input_pairs,
            num_input_pairs,
            info_ptr,
            output_offsets,
            blocks,
            info_width,
            in_range,
            output_ptr,
            ASYMMETRIC,
            THREADS,
            EVEN,
        )
    else:
        return _multiply_in_float32(
            codes,
            input_ptr,
            input_pairs,
            num_input_pairs,
            info_ptr,
            output_offsets,
            blocks,
            info_width,
            in_range,
            output_ptr,
            KIND,
            GROUP_SIZE,
            ASYMMETRIC,
            THREADS,
            EVEN,
            USE_ASM,
        )


@triton.jit
def _below(index, limit, EVEN: tl.constexpr):
    """Return the mask index < limit. With EVEN it is always true, which costs nothing."""
    if EVEN:
        return tl.full(index.shape, 1, tl.int1)
    else:
        return index < limit


@triton.jit
def _larger_magnitude(first, second):
    return tl.maximum(tl.abs(first), tl.abs(second))


@triton.jit
def gemv_kernel(
    input_ptr,
    words_ptr,
    info_ptr,
    bias_ptr,
    residual_ptr,
    output_ptr,
    num_outputs,
    num_input_pairs,
    row_pairs,
    info_width,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    THREADS: tl.constexpr,
    USE_ASM: tl.constexpr,
    EVEN: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Compute TILE_OUTPUTS outputs. Inputs and words are counted in pairs.

    THREADS threads read 4 pairs of each row at a time. The next codes are prefetched; the first are
    loaded while the kernel that computes the input may still run. The layouts are chosen such that
    no value moves between threads before the end.
    """
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    output_offsets = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    pair_offsets = tl.arange(0, THREADS * 4)
    in_range = _below(output_offsets, num_outputs, EVEN)[:, None]
    first_pairs = (pair_offsets // 16) * (
        16 * PARTS
    ) + pair_offsets % 16  # the inputs of the first parts
    tile_ptr = words_ptr + output_offsets.to(tl.int64)[:, None] * row_pairs + pair_offsets[None, :]
    codes = tl.load(
        tile_ptr, mask=in_range & _below(pair_offsets, row_pairs, EVEN)[None, :], other=0
    )
    wait_for_inputs()
    total = tl.zeros([TILE_OUTPUTS, THREADS], tl.float32)
    for start in range(THREADS * 4, row_pairs, THREADS * 4):
        next_codes = tl.load(
            tile_ptr + start,
            mask=in_range & _below(start + pair_offsets, row_pairs, EVEN)[None, :],
            other=0,
        )
        total += _partial_sums(
            codes,
            input_ptr,
            start - THREADS * 4,
            first_pairs,
            num_input_pairs,
            info_ptr,
            output_offsets,
            row_pairs,
            info_width,
            in_range,
            output_ptr,
            KIND,
            GROUP_SIZE,
            ASYMMETRIC,
            THREADS,
            EVEN,
            USE_ASM,
            HALVES,
        )
        codes = next_codes
    total += _partial_sums(
        codes,
        input_ptr,
        tl.cdiv(row_pairs, THREADS * 4) * THREADS * 4 - THREADS * 4,
        first_pairs,
        num_input_pairs,
        info_ptr,
        output_offsets,
        row_pairs,
        info_width,
        in_range,
        output_ptr,
        KIND,
        GROUP_SIZE,
        ASYMMETRIC,
        THREADS,
        EVEN,
        USE_ASM,
        HALVES,
    )
    results = tl.sum(total, 1)
    if GROUP_SIZE == 0:
        results *= tl.load(info_ptr + output_offsets, mask=output_offsets < num_outputs, other=0.0)
    if ADD_BIAS:
        results += tl.load(
            bias_ptr + output_offsets, mask=output_offsets < num_outputs, other=0.0
        ).to(tl.float32)
    if ADD_RESIDUAL:
        results += tl.load(
            residual_ptr + output_offsets, mask=output_offsets < num_outputs, other=0.0
        ).to(tl.float32)
    tl.store(output_ptr + output_offsets, results, mask=output_offsets < num_outputs)


def gemv(
    hidden: Tensor, weight: TritonWeight, bias: Tensor | None, residual: Tensor | None, config: Gemv
) -> Tensor:
    """hidden [1, in] -> [1, out], plus the residual, which is overwritten"""
    (num_outputs, num_inputs) = weight.shape
    weight_format = weight.format
    output = hidden.new_empty(1, num_outputs) if residual is None else residual
    if num_inputs % 2:
        hidden = F.pad(hidden, (0, 1))
    row_pairs = weight.words.shape[1] // 2
    even = (
        num_outputs % config.outputs == 0
        and row_pairs % (128 * config.warps) == 0
        and num_inputs == row_pairs * 2 * weight.parts
    )
    pair_dtype = torch.int64 if hidden.dtype == torch.float32 else torch.int32
    gemv_kernel[triton.cdiv(num_outputs, config.outputs),](
        hidden.view(pair_dtype),
        weight.words.view(torch.int32),
        weight.info,
        bias,
        residual,
        output,
        num_outputs,
        hidden.shape[1] // 2,
        row_pairs,
        weight.info.shape[-1],
        weight.kind,
        weight_format.group_size,
        weight_format.asymmetric,
        bias is not None,
        residual is not None,
        config.outputs,
        32 * config.warps,
        HOPPER_OR_LATER,
        even,
        HOPPER_OR_LATER
        and weight_format.bits == 4
        and weight_format.group_size == 128
        and hidden.dtype != torch.float32,
        num_warps=config.warps,
        **LAUNCH,
    )
    return output
