"""Products of 8-bit weights with 8-bit activations, integers or e4m3 floats.

Each row of activations has a scale of its own. For e4m3 weights in groups of 128 inputs, each group
of a row has one. octavo.ops.fp8_linear defines the rounding to e4m3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.fused_kernels import code_of
from octavo.ops.triton.quant.packed_weight import TritonWeight
from octavo.ops.triton.quant.quant_gemm import Gemm, plan_splits, write_tile
from octavo.ops.triton.quant.wide_gemm import Codes, wide_product


class Rounded(NamedTuple):
    """The tiling of a product with rounded activations. None leaves it to wide_gemm.py."""

    tile: Gemm | None


@triton.jit
def round_kernel(
    input_ptr, codes_ptr, scale_ptr, num_inputs, WORDS_PADDED: tl.constexpr, row_words
):
    """Round one row to 8 bits in each program. Its codes have the layout of weights."""
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    word_offsets = tl.arange(0, WORDS_PADDED)
    first, second = _inputs_of_words(input_ptr + row * num_inputs, word_offsets, num_inputs)
    largest = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
    unit = tl.maximum(largest, 1e-30) / 127.0
    tl.store(scale_ptr + row, unit)
    tl.store(
        codes_ptr + row * row_words + word_offsets,
        _code(first / unit) | _code(second / unit) << 8,
        mask=word_offsets < row_words,
    )


@triton.jit
def _code(value):
    return (tl.floor(value + 0.5).to(tl.int32) & 255).to(tl.int16)


@triton.jit
def _inputs_of_words(row_ptr, word_offsets, num_inputs):
    """Load the two inputs of each word, in the order of weights."""
    input_offsets = (word_offsets // 32) * 64 + word_offsets % 32
    first = tl.load(row_ptr + input_offsets, mask=input_offsets < num_inputs, other=0.0)
    second_offsets = input_offsets + 32
    second = tl.load(row_ptr + second_offsets, mask=second_offsets < num_inputs, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def round_fp8_kernel(
    input_ptr,
    codes_ptr,
    scale_ptr,
    static_scale_ptr,
    num_inputs,
    row_words,
    num_groups,
    WORDS_PADDED: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    IS_STATIC: tl.constexpr,
):
    """Round one row to e4m3 in each program. Its codes have the layout of weights."""
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    GROUPS_PADDED: tl.constexpr = WORDS_PADDED // GROUP_WORDS
    group_offsets = tl.arange(0, GROUPS_PADDED)
    word_offsets = group_offsets[:, None] * GROUP_WORDS + tl.arange(0, GROUP_WORDS)[None, :]
    first, second = _inputs_of_words(input_ptr + row * num_inputs, word_offsets, num_inputs)
    # This is NaN if an input of the group is not finite, and otherwise 0.
    not_finite = tl.sum(first * 0.0, 1) + tl.sum(second * 0.0, 1)
    if IS_STATIC:
        scale = tl.zeros([GROUPS_PADDED], tl.float32) + tl.load(static_scale_ptr)
    else:
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        scale = tl.div_rn(tl.maximum(largest, 1e-30), tl.full([GROUPS_PADDED], 448.0, tl.float32))
    tl.store(
        scale_ptr + row * num_groups + group_offsets,
        scale + not_finite,
        mask=group_offsets < num_groups,
    )
    inverse = tl.div_rn(tl.full([GROUPS_PADDED], 1.0, tl.float32), scale)
    low = _fp8_code(first, inverse)
    high = _fp8_code(second, inverse)
    tl.store(
        codes_ptr + row * row_words + word_offsets,
        (low | high << 8).to(tl.int16),
        mask=word_offsets < row_words,
    )


@triton.jit
def _fp8_code(values, inverse):
    """values [groups, words], inverse scales [groups] -> the bits of e4m3 numbers, as int32"""
    scaled = values * inverse[:, None]
    clamped = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return code_of(clamped, 448.0).to(tl.int32) & 255


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def bytes_kernel(
    input_ptr,
    input_scale_ptr,
    words_ptr,
    info_ptr,
    bias_ptr,
    output_ptr,
    partial_ptr,
    locks_ptr,
    num_rows,
    num_outputs,
    row_bytes,
    num_splits,
    num_groups,
    ADD_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a tile [TILE_OUTPUTS, TILE_ROWS] of the transposed product of bytes with bytes.

    Tensor cores of a Hopper GPU add e4m3 products with fewer bits than a float32 has. The sum of
    TILE_BYTES products is therefore added to a float32 outside of them. For a grouped weight,
    TILE_BYTES is the size of a group, and its sum is scaled before it is added.
    """
    start_next()
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    row_offsets = (tile % row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output_offsets = (tile // row_tiles) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    byte_offsets = tl.arange(0, TILE_BYTES)
    output_index = tl.minimum(output_offsets, num_outputs - 1)
    row_index = tl.minimum(row_offsets, num_rows - 1)
    split_bytes = tl.cdiv(row_bytes, TILE_BYTES * num_splits) * TILE_BYTES
    begin = tl.program_id(1) * split_bytes
    end = tl.minimum(begin + split_bytes, row_bytes)
    word_ptr = words_ptr + output_index.to(tl.int64)[:, None] * row_bytes + byte_offsets[None, :]
    tile_input_ptr = input_ptr + row_index[None, :] * row_bytes + byte_offsets[:, None]
    wait_for_inputs()
    sums = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32 if IS_FLOAT else tl.int32)
    for start in tl.range(begin, end, TILE_BYTES, num_stages=STAGES):
        mask = start + byte_offsets < row_bytes
        weights = tl.load(word_ptr + start, mask=mask[None, :], other=0.0)
        inputs = tl.load(tile_input_ptr + start, mask=mask[:, None], other=0.0)
        if IS_GROUPED:
            group = start // TILE_BYTES
            weight_scale = tl.load(info_ptr + group * num_outputs + output_index)
            input_scale = tl.load(input_scale_ptr + row_index * num_groups + group)
            product = tl.dot(weights, inputs, out_dtype=tl.float32)
            sums += product * weight_scale[:, None] * input_scale[None, :]
        elif IS_FLOAT:
            sums = tl.dot(
                weights, inputs, sums, max_num_imprecise_acc=TILE_BYTES, out_dtype=tl.float32
            )
        else:
            sums = tl.dot(weights, inputs, sums, out_dtype=tl.int32)
    accumulator = sums.to(tl.float32)
    if not IS_GROUPED:
        accumulator *= tl.load(info_ptr + output_index)[:, None]
        accumulator *= tl.load(input_scale_ptr + row_index)[None, :]
    write_tile(
        accumulator,
        bias_ptr,
        output_ptr,
        partial_ptr,
        locks_ptr,
        row_offsets,
        output_offsets,
        num_rows,
        num_outputs,
        num_splits,
        ADD_BIAS,
        ADD_RESIDUAL,
        IS_SPLIT,
        TILE_ROWS,
        TILE_OUTPUTS,
    )


def rounded(
    hidden: Tensor,
    weight: TritonWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    config: Rounded,
) -> Tensor:
    """hidden [T, in] -> [T, out], plus the residual, which is overwritten"""
    num_rows = len(hidden)
    num_outputs = weight.shape[0]
    codes, scale = round_rows(hidden, weight)
    byte_type = torch.float8_e4m3fn if weight.format.is_float else torch.int8
    codes = codes.view(byte_type)
    weight_codes = weight.words.view(byte_type)
    output = hidden.new_empty(num_rows, num_outputs) if residual is None else residual
    tile = config.tile
    if tile is None:
        rows = Codes(codes, scale)
        return wide_product(
            rows, Codes(weight_codes, weight.info), output, bias, add_residual=residual is not None
        )
    num_tiles, num_splits, partial = plan_splits(num_rows, weight, tile)
    bytes_kernel[num_tiles, num_splits](
        codes,
        scale,
        weight_codes,
        weight.info,
        bias,
        output,
        partial,
        weight.locks,
        num_rows,
        num_outputs,
        2 * weight.words.shape[1],
        num_splits,
        scale.shape[1],
        bias is not None,
        residual is not None,
        num_splits > 1,
        weight.format.is_float,
        weight.format.group_size > 0,
        tile.rows,
        tile.outputs,
        64 * tile.blocks,
        tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **LAUNCH,
    )
    return output


def round_rows(hidden: Tensor, weight: TritonWeight) -> tuple[Tensor, Tensor]:
    """hidden [T, in] -> codes [T, words] int16, scale [T, groups] float32"""
    num_rows, num_inputs = hidden.shape
    row_words = weight.words.shape[1]
    group_size = weight.format.group_size
    num_groups = -(-num_inputs // group_size) if group_size else 1
    codes = torch.empty(num_rows, row_words, dtype=torch.int16, device=hidden.device)
    scale = torch.empty(num_rows, num_groups, dtype=torch.float32, device=hidden.device)
    words_padded = triton.next_power_of_2(row_words)
    num_warps = min(16, max(1, words_padded // 256))
    if not weight.format.is_float:
        round_kernel[num_rows,](
            hidden, codes, scale, num_inputs, words_padded, row_words, num_warps=num_warps, **LAUNCH
        )
        return codes, scale
    if group_size:
        words_padded = max(words_padded, group_size // 2)
    round_fp8_kernel[num_rows,](
        hidden,
        codes,
        scale,
        weight.input_scale,
        num_inputs,
        row_words,
        num_groups,
        words_padded,
        group_size // 2 if group_size else words_padded,
        weight.input_scale is not None,
        num_warps=num_warps,
        **LAUNCH,
    )
    return codes, scale
