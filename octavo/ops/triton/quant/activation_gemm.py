"""Products of 8-bit weights with 8-bit activations. Each row of activations has its own scale."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.packed_weight import TritonWeight
from octavo.ops.triton.quant.quant_gemm import Gemm, cut, write


class Rounded(NamedTuple):
    """The tiling of a product with rounded activations."""

    tile: Gemm


@triton.jit
def round_kernel(
    input_ptr, codes_ptr, scale_ptr, num_inputs, WORDS_PADDED: tl.constexpr, row_words
):
    """Round one row to 8 bits in each program. Its codes have the layout of weights."""
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    word_offsets = tl.arange(0, WORDS_PADDED)
    input_offsets = (word_offsets // 32) * 64 + word_offsets % 32
    first = tl.load(
        input_ptr + row * num_inputs + input_offsets, mask=input_offsets < num_inputs, other=0.0
    ).to(tl.float32)
    second = tl.load(
        input_ptr + row * num_inputs + input_offsets + 32,
        mask=input_offsets + 32 < num_inputs,
        other=0.0,
    ).to(tl.float32)
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


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def int8_kernel(
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
    ADD_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a tile [TILE_OUTPUTS, TILE_ROWS] of the transposed product of bytes with bytes."""
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
    sums = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.int32)
    for start in tl.range(begin, end, TILE_BYTES, num_stages=STAGES):
        weights = tl.load(
            word_ptr + start, mask=(start + byte_offsets < row_bytes)[None, :], other=0
        )
        sums = tl.dot(
            weights,
            tl.load(
                tile_input_ptr + start, mask=(start + byte_offsets < row_bytes)[:, None], other=0
            ),
            sums,
            out_dtype=tl.int32,
        )
    accumulator = (
        sums.to(tl.float32)
        * tl.load(info_ptr + output_index)[:, None]
        * tl.load(input_scale_ptr + row_index)[None, :]
    )
    write(
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
    (num_outputs, num_inputs) = weight.shape
    row_words = weight.words.shape[1]
    codes = torch.empty(num_rows, row_words, dtype=torch.int16, device=hidden.device)
    scale = torch.empty(num_rows, 1, dtype=torch.float32, device=hidden.device)
    words_padded = triton.next_power_of_2(row_words)
    num_warps = min(16, max(1, words_padded // 256))
    round_kernel[num_rows,](
        hidden, codes, scale, num_inputs, words_padded, row_words, num_warps=num_warps, **LAUNCH
    )
    output = hidden.new_empty(num_rows, num_outputs) if residual is None else residual
    tile = config.tile
    num_tiles, num_splits, partial = cut(num_rows, weight, tile)
    int8_kernel[num_tiles, num_splits](
        codes.view(torch.int8),
        scale,
        weight.words.view(torch.int8),
        weight.info,
        bias,
        output,
        partial,
        weight.locks,
        num_rows,
        num_outputs,
        2 * row_words,
        num_splits,
        bias is not None,
        residual is not None,
        num_splits > 1,
        tile.rows,
        tile.outputs,
        64 * tile.blocks,
        tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **LAUNCH,
    )
    return output
