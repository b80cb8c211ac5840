"""Attention in which the bits of a query row depend on its position and its keys alone.

One kernel computes all rows: those of prompts, whatever their chunks, and those that decode. The
context is divided into parts of PART_KEYS positions, counted from position 0. Each part has its own
maximum, sum and accumulator, over tiles that are aligned to absolute positions too. The parts are
merged from the first to the last.

    position      0         512       1024      1300
    tiles of 64   ||||||||| ||||||||| ||||||
    parts         [ part 0 ][ part 1 ][ part 2 ]
    result        ((part 0 + part 1) + part 2)

    many rows     one program computes all parts of its rows and merges them
    few rows      each part is a program, and a second kernel merges the parts in the same order

A program has TILE_ROWS rows: tokens of one sequence times the query heads that share a key head. A
row that decodes fills only a part of such a tile. A tile of keys that a row does not see changes no
bit of the row: its probabilities are 0 and its factor is 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.kv import KV
from octavo.ops.triton import kv_codes
from octavo.ops.triton.attention_kernels import (
    LOG2E,
    PROGRAMS,
    UNALIGNED_ARGUMENTS,
    _attend,
    _can_prefetch_more,
    _find_item,
    _shape,
    _store_partial,
    _tile,
)
from octavo.ops.triton.dependent_launch import LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.fused_kernels import kv_arguments

PART_KEYS = 512
TILE_ROWS = 64
MAX_PARTIALS = 4096  # tokens times parts whose partial results are kept in memory


@triton.jit
def _merge(total_max, total_sum, total, part_max, part_sum, part):
    """Add the next part to the total of the parts before, [rows] and [rows, HEAD_DIM].

    The operations are written as fma(), because a compiler may choose between two ways to fuse
    a * b + c * d.
    """
    new_max = tl.maximum(total_max, part_max)
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    total_factor = tl.exp2(total_max - shift)
    part_factor = tl.exp2(part_max - shift)
    total_sum = tl.fma(total_sum, total_factor, part_sum * part_factor)
    factors = tl.broadcast_to(total_factor[:, None], total.shape)
    total = tl.fma(total, factors, part * part_factor[:, None])
    return new_max, total_sum, total


@triton.jit(
    do_not_specialize=["num_items", "num_parts"], do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS
)
def attention_kernel(
    query_ptr,
    kv_ptr,
    scales_ptr,
    block_table_ptr,
    table_rows_ptr,
    query_start_ptr,
    seq_lens_ptr,
    output_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    softmax_scale,
    num_items,
    num_parts,
    stride_block,
    stride_kind,
    stride_head,
    stride_token,
    stride_scale_block,
    stride_scale_kind,
    stride_scale_head,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):
    """Compute attention for a tile of query rows.

    With num_parts 0, a program merges all parts. Otherwise it computes every num_programs(2)-th
    part and keeps them for merge_kernel, which has room for num_parts parts. ONE_TOKEN means that
    each item has one token, and therefore one tile.
    """
    start_next()
    wait_for_inputs()
    BLOCK_Q: tl.constexpr = TILE_ROWS // GROUP_PADDED
    head = tl.program_id(1)
    if ONE_TOKEN:
        item = tl.program_id(0)
        token_begin = item
        token_end = item + 1
        first_token = 0
    else:
        # The last tiles of a sequence have the longest context, so they run first.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        item = _find_item(query_start_ptr, tile, num_items, BLOCK_Q)
        token_begin = tl.load(query_start_ptr + item)
        token_end = tl.load(query_start_ptr + item + 1)
        first_token = (tile - token_begin // BLOCK_Q - item) * BLOCK_Q
    if first_token < token_end - token_begin:
        context_length = tl.load(seq_lens_ptr + item) - (token_end - token_begin)
        row_offsets = tl.arange(0, TILE_ROWS)
        dim_offsets = tl.arange(0, HEAD_DIM_PADDED)
        local_tokens = first_token + row_offsets // GROUP_PADDED
        group_head = row_offsets % GROUP_PADDED
        rows = (
            (token_begin + local_tokens).to(tl.int64) * NUM_HEADS + head * GROUP_SIZE + group_head
        )
        in_range = (local_tokens < token_end - token_begin) & (group_head < GROUP_SIZE)
        query_mask = in_range[:, None] & (dim_offsets[None, :] < HEAD_DIM)
        queries = tl.load(
            query_ptr + rows[:, None] * HEAD_DIM + dim_offsets[None, :], mask=query_mask, other=0.0
        )
        row_scale = softmax_scale
        if LARGEST_CODE > 0:
            queries, row_scale = kv_codes.scale_queries(queries, softmax_scale)
        query_positions = context_length + local_tokens
        key_begin = 0
        if WINDOW > 0:
            key_begin = (
                tl.maximum(context_length + first_token - WINDOW + 1, 0) // TILE_KEYS * TILE_KEYS
            )
        # Every row sees all keys before this one.
        unmasked_end = (context_length + first_token + 1) // TILE_KEYS * TILE_KEYS
        key_end = context_length + tl.minimum(first_token + BLOCK_Q, token_end - token_begin)
        block_table_ptr += tl.load(table_rows_ptr + item).to(tl.int64) * stride_table
        key_ptr = kv_ptr + head * stride_head
        value_ptr = kv_ptr + head * stride_head + stride_kind
        key_scale_ptr = scales_ptr
        value_scale_ptr = scales_ptr
        if LARGEST_CODE > 0:
            key_scale_ptr += head * stride_scale_head
            value_scale_ptr = key_scale_ptr + stride_scale_kind
        total_max = tl.full([TILE_ROWS], -float("inf"), tl.float32)
        total_sum = tl.zeros([TILE_ROWS], tl.float32)
        total = tl.zeros([TILE_ROWS, HEAD_DIM_PADDED], tl.float32)
        first_part = key_begin // PART_KEYS + tl.program_id(2)
        for part in range(first_part, tl.cdiv(key_end, PART_KEYS), tl.num_programs(2)):
            part_begin = tl.maximum(part * PART_KEYS, key_begin)
            part_end = tl.minimum((part + 1) * PART_KEYS, key_end)
            masked_begin = tl.maximum(tl.minimum(unmasked_end, part_end), part_begin)
            running_max = tl.full([TILE_ROWS], -float("inf"), tl.float32)
            running_sum = tl.zeros([TILE_ROWS], tl.float32)
            accumulator = tl.zeros([TILE_ROWS, HEAD_DIM_PADDED], tl.float32)
            running_max, running_sum, accumulator = _attend(
                queries,
                key_ptr,
                value_ptr,
                key_scale_ptr,
                value_scale_ptr,
                block_table_ptr,
                part_begin,
                masked_begin,
                query_positions,
                running_max,
                running_sum,
                accumulator,
                row_scale,
                stride_block,
                stride_token,
                stride_scale_block,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                BLOCK_SIZE,
                TILE_KEYS,
                WINDOW,
                False,
                WINDOW > 0,
                PRECISION,
                LARGEST_CODE,
            )
            running_max, running_sum, accumulator = _attend(
                queries,
                key_ptr,
                value_ptr,
                key_scale_ptr,
                value_scale_ptr,
                block_table_ptr,
                masked_begin,
                part_end,
                query_positions,
                running_max,
                running_sum,
                accumulator,
                row_scale,
                stride_block,
                stride_token,
                stride_scale_block,
                HEAD_DIM,
                HEAD_DIM_PADDED,
                BLOCK_SIZE,
                TILE_KEYS,
                WINDOW,
                True,
                True,
                PRECISION,
                LARGEST_CODE,
            )
            if LARGEST_CODE > 0:
                accumulator *= 1.0 / LARGEST_CODE
            if num_parts == 0:
                total_max, total_sum, total = _merge(
                    total_max, total_sum, total, running_max, running_sum, accumulator
                )
            else:
                _store_partial(
                    partial_ptr,
                    partial_max_ptr,
                    partial_sum_ptr,
                    rows * num_parts + part,
                    running_max,
                    running_sum,
                    accumulator,
                    in_range,
                    HEAD_DIM,
                )
        if num_parts == 0:
            tl.store(
                output_ptr + rows[:, None] * HEAD_DIM + dim_offsets[None, :],
                total / total_sum[:, None],
                mask=query_mask,
            )


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    positions_ptr,
    output_ptr,
    num_parts,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PART_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Merge the parts of one query head of one token, from the first that it sees to the last."""
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row // NUM_HEADS).to(tl.int32)
    first_part = 0
    if WINDOW > 0:
        first_part = tl.maximum(position - WINDOW + 1, 0) // PART_KEYS
    one = tl.arange(0, 1)
    dim_offsets = tl.arange(0, HEAD_DIM_PADDED)
    total_max = tl.full([1], -float("inf"), tl.float32)
    total_sum = tl.zeros([1], tl.float32)
    total = tl.zeros([1, HEAD_DIM_PADDED], tl.float32)
    for part in range(first_part, position // PART_KEYS + 1):
        partial = row * num_parts + part + one
        accumulator = tl.load(
            partial_ptr + partial[:, None] * HEAD_DIM + dim_offsets[None, :],
            mask=dim_offsets[None, :] < HEAD_DIM,
            other=0.0,
        )
        total_max, total_sum, total = _merge(
            total_max,
            total_sum,
            total,
            tl.load(partial_max_ptr + partial),
            tl.load(partial_sum_ptr + partial),
            accumulator,
        )
    tl.store(
        output_ptr + (row + one)[:, None] * HEAD_DIM + dim_offsets[None, :],
        total / total_sum[:, None],
        mask=dim_offsets[None, :] < HEAD_DIM,
    )


def attention(
    query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float, window: int
) -> Tensor:
    """Implement Ops.attention."""
    output = torch.empty_like(query)
    shape = _shape(query, kv_cache)
    group_padded = triton.next_power_of_2(shape["GROUP_SIZE"])
    tile_rows = max(group_padded, TILE_ROWS)
    num_tokens, num_heads, head_dim = query.shape
    num_items = len(batch.query_start) - 1
    one_token = all(span.num == 1 for span in batch.spans)
    # An upper bound if items have several tokens: some tiles are empty.
    num_tiles = num_items + (0 if one_token else num_tokens // (tile_rows // group_padded))
    num_kv_heads = kv_cache.shape[2]
    max_length = batch.block_table.shape[1] * shape["BLOCK_SIZE"]
    num_parts = triton.cdiv(max_length, PART_KEYS)
    num_splits = min(num_parts, PROGRAMS // (num_tiles * num_kv_heads))
    if num_splits < 2 or num_tokens * num_parts > MAX_PARTIALS:
        num_parts = 0
        num_splits = 1
    partial = query.new_empty(num_tokens, num_heads, num_parts, head_dim, dtype=torch.float32)
    partial_max, partial_sum = query.new_empty(2, *partial.shape[:3], dtype=torch.float32)
    tensors, strides = kv_arguments(kv_cache)
    tile = _tile(kv_cache, shape["HEAD_DIM_PADDED"])
    if _can_prefetch_more(kv_cache, shape["HEAD_DIM_PADDED"], tile):
        tile["num_stages"] = 6
    attention_kernel[num_tiles, num_kv_heads, num_splits](
        query,
        *tensors,
        batch.block_table,
        batch.slots,
        batch.query_start,
        batch.seq_lens,
        output,
        partial,
        partial_max,
        partial_sum,
        scale * LOG2E,
        num_items,
        num_parts,
        *strides,
        batch.block_table.stride(0),
        GROUP_PADDED=group_padded,
        TILE_ROWS=tile_rows,
        PART_KEYS=PART_KEYS,
        WINDOW=window,
        ONE_TOKEN=one_token,
        num_warps=4 if shape["HEAD_DIM_PADDED"] < 256 else 8,
        **tile,
        **shape,
        **LAUNCH,
    )
    if num_parts:
        merge_kernel[num_tokens * num_heads,](
            partial,
            partial_max,
            partial_sum,
            batch.positions,
            output,
            num_parts,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=shape["HEAD_DIM_PADDED"],
            PART_KEYS=PART_KEYS,
            WINDOW=window,
            num_warps=1,
            **LAUNCH,
        )
    return output
