"""Writes rows of a quantised matrix as plain numbers, for cuBLAS and for embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import HOPPER_OR_LATER, LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.packed_weight import TritonWeight
from octavo.ops.triton.quant.weight_codes import INT4, floats, info_of


class Dense(NamedTuple):
    """The tiling of a product with many rows."""

    # The numbers that are written at a time: 32 MB stay in the L2 cache until they are read.
    chunk: int = 1 << 24


@triton.jit
def expand_kernel(
    ids_ptr,
    words_ptr,
    info_ptr,
    output_ptr,
    first_row,
    num_rows,
    num_inputs,
    row_pairs,
    info_width,
    factor,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    USE_IDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    THREADS: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Write rows of the weight as numbers, times a factor.

    The rows are those in ids_ptr, or num_rows rows from first_row on. Each step is rounded as in
    QuantWeight.dequantize().
    """
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    row_offsets = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    threads = tl.program_id(1) * THREADS + tl.arange(0, THREADS)
    pair_offsets = tl.program_id(1) * THREADS * 4 + tl.arange(0, THREADS * 4)
    word_offsets = tl.program_id(1) * THREADS * 8 + tl.arange(0, THREADS * 8)
    in_range = (row_offsets < num_rows)[:, None]
    wait_for_inputs()
    if USE_IDS:
        weight_row = tl.load(ids_ptr + row_offsets, mask=row_offsets < num_rows, other=0)
    else:
        weight_row = first_row + row_offsets
    tile_ptr = words_ptr + weight_row.to(tl.int64)[:, None] * row_pairs + pair_offsets[None, :]
    codes = floats(
        tl.load(tile_ptr, mask=in_range & (pair_offsets < row_pairs)[None, :], other=0),
        KIND,
        USE_ASM,
    )
    blocks = tl.minimum(threads * 4, row_pairs - 1) // 16
    for part in tl.static_range(PARTS):
        values = tl.join(codes[2 * part], codes[2 * part + 1]).reshape(TILE_ROWS, THREADS, 8)
        if KIND == INT4:
            values = values * 16 - (16 if ASYMMETRIC else 24)
        if GROUP_SIZE == 0:
            values *= tl.load(info_ptr + weight_row, mask=row_offsets < num_rows, other=0.0)[
                :, None, None
            ]
        else:
            if GROUP_SIZE == 16:  # a part of a block has two groups, of two threads each
                groups = ((blocks * PARTS + part) * 2 + threads // 2 % 2)[None, :]
            else:
                groups = ((blocks * PARTS + part) // (GROUP_SIZE // 32))[None, :]
            scale, least = info_of(
                info_ptr, weight_row[:, None], groups, info_width, in_range, ASYMMETRIC
            )
            values *= scale[:, :, None]
            if ASYMMETRIC:
                values += least[:, :, None]
        columns = (word_offsets // 32) * (32 * PARTS) + word_offsets % 32 + 32 * part
        target_ptr = output_ptr + row_offsets.to(tl.int64)[:, None] * num_inputs + columns[None, :]
        tl.store(
            target_ptr,
            (values * factor).reshape(TILE_ROWS, THREADS * 8),
            mask=in_range & (columns < num_inputs)[None, :],
        )


def expand(
    weight: TritonWeight,
    output: Tensor,
    first_row: int,
    token_ids: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Write rows of the weight to output [rows, in]: those in token_ids, or from first_row on."""
    num_rows = len(output)
    row_pairs = weight.words.shape[1] // 2
    tile_rows = 4
    threads = 128
    grid = triton.cdiv(num_rows, tile_rows), triton.cdiv(row_pairs, 4 * threads)
    expand_kernel[grid](
        output if token_ids is None else token_ids,
        weight.words.view(torch.int32),
        weight.info,
        output,
        first_row,
        num_rows,
        weight.shape[1],
        row_pairs,
        weight.info.shape[-1],
        factor,
        weight.kind,
        weight.format.group_size,
        weight.format.asymmetric,
        token_ids is not None,
        tile_rows,
        threads,
        HOPPER_OR_LATER,
        num_warps=4,
        enable_fp_fusion=False,
        **LAUNCH,
    )


def dense(hidden: Tensor, weight: TritonWeight, bias: Tensor | None, config: Dense) -> Tensor:
    """hidden [T, in] -> [T, out]"""
    num_outputs, num_inputs = weight.shape
    output = hidden.new_empty(len(hidden), num_outputs)
    chunk_rows = max(1, config.chunk // num_inputs)
    buffer = hidden.new_empty(min(chunk_rows, num_outputs), num_inputs)
    for first_row in range(0, num_outputs, chunk_rows):
        chunk = buffer[: min(chunk_rows, num_outputs - first_row)]
        expand(weight, chunk, first_row)
        torch.mm(hidden, chunk.t(), out=output[:, first_row : first_row + chunk_rows])
    return output if bias is None else output.add_(bias)


def embedding(token_ids: Tensor, weight: TritonWeight, scale: float) -> Tensor:
    """token_ids [T] -> [T, in] in float32"""
    output = torch.empty(
        len(token_ids), weight.shape[1], dtype=torch.float32, device=token_ids.device
    )
    expand(weight, output, 0, token_ids, scale)
    return output
