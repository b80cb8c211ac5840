"""Causal attention over the paged KV cache: one kernel for decode, one for prefill.

Both kernels pack the query heads that share a key head into the rows of one tile (GQA), so that
each key and value is read once. Both use online softmax with a running maximum and sum, in float32
and in base 2. For compressed KV (octavo.ops.kv) they multiply the codes: the scale of a key goes
into its score, the scale of a value into its probability.

    decode    One program for each (sequence, key head, split). The kernel is bound by reading KV,
              so splits only serve to occupy every multiprocessor. The number of splits of a
              sequence follows from its length, which only the device knows. A second kernel
              joins the partial results of several splits (flash decoding).
    prefill   One program for each (tile of query tokens, key head), the longest context first. The
              kernel is bound by matrix products. A few tokens after a long context, as after a
              prefix cache hit, are too few programs, so they are split like decoding sequences.
    prefix    Cascade attention, an option: the decoding sequences that share a prefix
              (shared_prefixes.py) are the rows of one tile, which reads the prefix once. The decode
              kernel then reads the rest of each sequence and adds the result of the prefix.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.kv import KV, LARGEST, QuantKV
from octavo.ops.triton import kv_codes, shared_prefixes
from octavo.ops.triton.dependent_launch import LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.fused_kernels import kv_arguments
from octavo.ops.triton.shared_prefixes import PrefixTiles

LOG2E = 1.4426950408889634
# Bytes of shared memory for tiles. A program may use 227 KiB on Hopper and 99 KiB on small Ampere
# and Ada chips, and needs some of it for other things.
SHARED_MEMORY = 196608
if torch.cuda.is_available():
    SHARED_MEMORY = int(
        0.85 * getattr(torch.cuda.get_device_properties(0), "shared_memory_per_block_optin", 232448)
    )
# These arguments begin at any offset of an upload. Specialising on their alignment would compile
# another kernel while requests are served.
UNALIGNED_ARGUMENTS = ["table_rows_ptr", "query_start_ptr", "seq_lens_ptr"]
# The number of programs that keeps an H200 evenly busy with sequences of different lengths.
PROGRAMS = 8 * 132
# The least number of tiles in a split of a decoding sequence, because a split costs more than
# reading a tile or two. If there are fewer than OCCUPYING_PROGRAMS programs without splits, the
# number is smaller in proportion.
MIN_TILES = 4
OCCUPYING_PROGRAMS = 128
# Decode runs beside prefill if a step has at least this many decoding sequences. With fewer
# sequences the number of splits varies, and each number would compile another kernel.
OVERLAP_MIN_SEQUENCES = 32
# Prefill is split if a step has at most SPLIT_MAX_TOKENS tokens of prompts, and contexts may have
# SPLIT_MIN_CONTEXT or more positions. The number of splits is fixed, so that only one more kernel
# is compiled.
SPLIT_MAX_TOKENS = 64
SPLIT_MIN_CONTEXT = 1024
PREFILL_SPLITS = 8
# Rows of a tile of prefix_kernel, the least number of tiles of keys in a split, and the number of
# programs that occupies the device.
PREFIX_ROWS = 64
PREFIX_MIN_TILES = tl.constexpr(4)
PREFIX_PROGRAMS = 2 * 132
# Cascade attention is used if it saves a layer this many bytes of reading: what an H200 reads from
# its L2 cache in about 10 us, the least time of prefix_kernel. This is an estimate
# (docs/decisions/0019-cascade-attention.md), as are the three numbers above.
PREFIX_BYTES = 75e6
# The least number of decoding sequences among which shared prefixes are searched.
PREFIX_SEQUENCES = 8
# The constants that join_kernel shares with the kernel before it.
JOIN_CONSTANTS = ("NUM_HEADS", "HEAD_DIM", "HEAD_DIM_PADDED", "TILE_KEYS", "MIN_TILES", "WINDOW")


class PrefixParts(NamedTuple):
    """The results of prefix_kernel. None: there is no cascade attention."""

    lengths: Tensor | None = None  # [S] int32, the lengths of prefixes
    partial: Tensor | None = None  # [S, Hq, splits, D] accumulators
    maxima: Tensor | None = None  # [S, Hq, splits]
    sums: Tensor | None = None  # [S, Hq, splits]

    @property
    def splits(self) -> int:
        return 0 if self.partial is None else self.partial.shape[2]


WITHOUT_PREFIXES = PrefixParts()


@triton.jit
def _online_softmax(
    score,
    softmax_scale,
    column_scale,
    positions,
    query_positions,
    running_max,
    running_sum,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,
):
    """Do one step of online softmax with scores [rows, TILE_KEYS].

    `softmax_scale` is a scalar or [rows]; `column_scale` is the same value, broadcastable to the
    scores. MAY_SEE_NOTHING means that a row may not have seen any key yet. Returns the
    probabilities, the factor for earlier sums, the new running maximum and the new running sum.
    """
    if MASKED:
        score = tl.where(positions[None, :] <= query_positions[:, None], score, -float("inf"))
    if WINDOW > 0:
        score = tl.where(
            positions[None, :] > query_positions[:, None] - WINDOW, score, -float("inf")
        )
    new_max = tl.maximum(running_max, tl.max(score, 1) * softmax_scale)
    shift = new_max
    # If a row sees no key of the tile and saw none before, its maximum is still -inf.
    if MAY_SEE_NOTHING:
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    probabilities = tl.exp2(score * column_scale - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    return probabilities, rescale, new_max, running_sum * rescale + tl.sum(probabilities, 1)


@triton.jit
def _attend(
    queries,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_table_ptr,
    key_begin,
    key_end,
    query_positions,
    running_max,
    running_sum,
    accumulator,
    softmax_scale,
    stride_block,
    stride_token,
    stride_scale_block,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,
    PRECISION: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):
    """Attend to the positions key_begin .. key_end - 1, tile by tile.

    Each row sees the positions up to its own in query_positions [rows]. Without MASKED, the tiles
    are full and every row sees all of their keys, except for the window. LARGEST_CODE is the
    largest code of compressed KV, or 0 for plain KV. With codes, softmax_scale is [rows], and the
    accumulator is in units of 1 / LARGEST_CODE.
    """
    dim_offsets = tl.arange(0, HEAD_DIM_PADDED)
    key_offsets = tl.arange(0, TILE_KEYS)
    for start in range(key_begin, key_end, TILE_KEYS):
        positions = start + key_offsets
        # A tile within one block needs one lookup, and its offsets are the same in every round.
        if BLOCK_SIZE % TILE_KEYS == 0:
            offsets = (start % BLOCK_SIZE + key_offsets) * stride_token
            block_offset = (
                tl.load(block_table_ptr + start // BLOCK_SIZE).to(tl.int64) * stride_block
            )
            key_block_ptr = key_ptr + block_offset
            value_block_ptr = value_ptr + block_offset
        else:
            block_offset = tl.load(
                block_table_ptr + positions // BLOCK_SIZE, mask=positions < key_end, other=0
            ).to(tl.int64)
            offsets = block_offset * stride_block + (positions % BLOCK_SIZE) * stride_token
            key_block_ptr = key_ptr
            value_block_ptr = value_ptr
        # Memory after the end may hold NaN, and 0 * NaN is NaN. So zeros are loaded there.
        if MASKED:
            in_range = positions < key_end
            key = tl.load(
                key_block_ptr + (offsets[None, :] + dim_offsets[:, None]),
                mask=in_range[None, :] & (dim_offsets[:, None] < HEAD_DIM),
                other=0.0,
            )
            value = tl.load(
                value_block_ptr + (offsets[:, None] + dim_offsets[None, :]),
                mask=in_range[:, None] & (dim_offsets[None, :] < HEAD_DIM),
                other=0.0,
            )
        elif HEAD_DIM == HEAD_DIM_PADDED:
            key = tl.load(key_block_ptr + (offsets[None, :] + dim_offsets[:, None]))
            value = tl.load(value_block_ptr + (offsets[:, None] + dim_offsets[None, :]))
        else:
            key = tl.load(
                key_block_ptr + (offsets[None, :] + dim_offsets[:, None]),
                mask=dim_offsets[:, None] < HEAD_DIM,
                other=0.0,
            )
            value = tl.load(
                value_block_ptr + (offsets[:, None] + dim_offsets[None, :]),
                mask=dim_offsets[None, :] < HEAD_DIM,
                other=0.0,
            )
        if LARGEST_CODE > 0:
            key_scale, value_scale = _load_scales(
                key_scale_ptr,
                value_scale_ptr,
                block_table_ptr,
                start,
                key_end,
                stride_scale_block,
                BLOCK_SIZE,
                TILE_KEYS,
                MASKED,
            )
            score = tl.dot(queries, kv_codes.convert(key, queries.dtype), input_precision=PRECISION)
            score *= key_scale[None, :]
            probabilities, rescale, running_max, running_sum = _online_softmax(
                score,
                softmax_scale,
                softmax_scale[:, None],
                positions,
                query_positions,
                running_max,
                running_sum,
                WINDOW,
                MASKED,
                MAY_SEE_NOTHING,
            )
            probabilities = (probabilities * (value_scale * LARGEST_CODE)[None, :]).to(
                queries.dtype
            )
            accumulator = tl.dot(
                probabilities,
                kv_codes.convert(value, queries.dtype),
                accumulator * rescale[:, None],
                input_precision=PRECISION,
            )
        else:
            score = tl.dot(queries, key, input_precision=PRECISION)
            probabilities, rescale, running_max, running_sum = _online_softmax(
                score,
                softmax_scale,
                softmax_scale,
                positions,
                query_positions,
                running_max,
                running_sum,
                WINDOW,
                MASKED,
                MAY_SEE_NOTHING,
            )
            accumulator = accumulator * rescale[:, None]
            accumulator = tl.dot(
                probabilities.to(value.dtype), value, accumulator, input_precision=PRECISION
            )
    return running_max, running_sum, accumulator


@triton.jit
def _load_scales(
    key_scale_ptr,
    value_scale_ptr,
    block_table_ptr,
    start,
    key_end,
    stride_scale_block,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the scales of a tile's keys and values, [TILE_KEYS] each, with zeros after the end."""
    key_offsets = tl.arange(0, TILE_KEYS)
    positions = start + key_offsets
    if BLOCK_SIZE % TILE_KEYS == 0:
        scale_offsets = tl.load(block_table_ptr + start // BLOCK_SIZE).to(
            tl.int64
        ) * stride_scale_block + (start % BLOCK_SIZE + key_offsets)
    else:
        scale_offsets = (
            tl.load(
                block_table_ptr + positions // BLOCK_SIZE, mask=positions < key_end, other=0
            ).to(tl.int64)
            * stride_scale_block
            + positions % BLOCK_SIZE
        )
    if MASKED:
        in_range = positions < key_end
        return tl.load(key_scale_ptr + scale_offsets, mask=in_range, other=0.0), tl.load(
            value_scale_ptr + scale_offsets, mask=in_range, other=0.0
        )
    return tl.load(key_scale_ptr + scale_offsets), tl.load(value_scale_ptr + scale_offsets)


@triton.jit
def _attend_words(
    query0,
    query1,
    query2,
    query3,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    block_table_ptr,
    key_begin,
    key_end,
    query_positions,
    running_max,
    running_sum,
    accumulator0,
    accumulator1,
    accumulator2,
    accumulator3,
    softmax_scale,
    stride_block,
    stride_token,
    stride_scale_block,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):
    """Do what _attend does, with codes that are loaded as words of four. Strides are in words.

    Dimensions 4i, 4i + 1, 4i + 2 and 4i + 3 are four problems of a quarter of the width. The tensor
    cores need neighbouring positions of a value in one register. Moving bytes there one by one
    took half of the time; words are unpacked in the registers where they are.
    """
    word_offsets = tl.arange(0, HEAD_DIM_PADDED // 4)
    key_offsets = tl.arange(0, TILE_KEYS)
    for start in range(key_begin, key_end, TILE_KEYS):
        positions = start + key_offsets
        offsets = (start % BLOCK_SIZE + key_offsets) * stride_token
        block_offset = tl.load(block_table_ptr + start // BLOCK_SIZE).to(tl.int64) * stride_block
        if MASKED:
            in_range = positions < key_end
            key = tl.load(
                key_ptr + block_offset + (offsets[None, :] + word_offsets[:, None]),
                mask=in_range[None, :] & (word_offsets[:, None] < HEAD_DIM // 4),
                other=0,
            )
            value = tl.load(
                value_ptr + block_offset + (offsets[:, None] + word_offsets[None, :]),
                mask=in_range[:, None] & (word_offsets[None, :] < HEAD_DIM // 4),
                other=0,
            )
        elif HEAD_DIM == HEAD_DIM_PADDED:
            key = tl.load(key_ptr + block_offset + (offsets[None, :] + word_offsets[:, None]))
            value = tl.load(value_ptr + block_offset + (offsets[:, None] + word_offsets[None, :]))
        else:
            key = tl.load(
                key_ptr + block_offset + (offsets[None, :] + word_offsets[:, None]),
                mask=word_offsets[:, None] < HEAD_DIM // 4,
                other=0,
            )
            value = tl.load(
                value_ptr + block_offset + (offsets[:, None] + word_offsets[None, :]),
                mask=word_offsets[None, :] < HEAD_DIM // 4,
                other=0,
            )
        key_scale, value_scale = _load_scales(
            key_scale_ptr,
            value_scale_ptr,
            block_table_ptr,
            start,
            key_end,
            stride_scale_block,
            BLOCK_SIZE,
            TILE_KEYS,
            MASKED,
        )
        key0, key1, key2, key3 = kv_codes.quarters(key, query0.dtype, LARGEST_CODE)
        score = tl.dot(query0, key0, input_precision=PRECISION)
        score = tl.dot(query1, key1, score, input_precision=PRECISION)
        score = tl.dot(query2, key2, score, input_precision=PRECISION)
        score = tl.dot(query3, key3, score, input_precision=PRECISION)
        score *= key_scale[None, :]
        probabilities, rescale, running_max, running_sum = _online_softmax(
            score,
            softmax_scale,
            softmax_scale[:, None],
            positions,
            query_positions,
            running_max,
            running_sum,
            WINDOW,
            MASKED,
            WINDOW > 0,
        )
        probabilities = (probabilities * (value_scale * LARGEST_CODE)[None, :]).to(query0.dtype)
        value0, value1, value2, value3 = kv_codes.quarters(value, query0.dtype, LARGEST_CODE)
        accumulator0 = tl.dot(
            probabilities, value0, accumulator0 * rescale[:, None], input_precision=PRECISION
        )
        accumulator1 = tl.dot(
            probabilities, value1, accumulator1 * rescale[:, None], input_precision=PRECISION
        )
        accumulator2 = tl.dot(
            probabilities, value2, accumulator2 * rescale[:, None], input_precision=PRECISION
        )
        accumulator3 = tl.dot(
            probabilities, value3, accumulator3 * rescale[:, None], input_precision=PRECISION
        )
    return running_max, running_sum, accumulator0, accumulator1, accumulator2, accumulator3


@triton.jit(do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def decode_kernel(
    query_ptr,
    kv_ptr,
    scales_ptr,
    block_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    output_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    prefix_lens_ptr,
    prefix_ptr,
    prefix_max_ptr,
    prefix_sum_ptr,
    softmax_scale,
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
    TILE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    READ_WORDS: tl.constexpr,
    BESIDE_PREFILL: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
):
    """Compute attention for sequences with one query token each.

    NUM_SPLITS is the largest number of splits. The programs of surplus splits end at once.
    PREFIX_SPLITS is the NUM_SPLITS of prefix_kernel, or 0 without cascade attention. Cascade
    attention has no window.
    BESIDE_PREFILL means that the kernel before is prefill_kernel with LAUNCH_EARLY: the inputs are
    ready, and this kernel waits at its end until that one has finished.
    """
    start_next()
    if not BESIDE_PREFILL:
        wait_for_inputs()
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    sequence_length = tl.load(seq_lens_ptr + sequence)
    # The splits divide what follows the prefix: one position or more, so the first is never empty.
    prefix_length = 0
    if PREFIX_SPLITS > 0:
        prefix_length = tl.load(prefix_lens_ptr + sequence)
    first_tile, num_tiles, splits = _split_context(
        sequence_length - prefix_length, TILE_KEYS, NUM_SPLITS, MIN_TILES, WINDOW
    )
    if split >= splits:
        return
    first_tile += prefix_length // TILE_KEYS
    tiles_per_split = tl.cdiv(num_tiles, splits)
    key_begin = (first_tile + split * tiles_per_split) * TILE_KEYS
    key_end = tl.minimum(key_begin + tiles_per_split * TILE_KEYS, sequence_length)
    group_heads = tl.arange(0, GROUP_PADDED)
    dim_offsets = tl.arange(0, HEAD_DIM_PADDED)
    rows = sequence * NUM_HEADS + head * GROUP_SIZE + group_heads
    query_mask = (group_heads[:, None] < GROUP_SIZE) & (dim_offsets[None, :] < HEAD_DIM)
    row_scale = softmax_scale
    if READ_WORDS:
        word_offsets = tl.arange(0, HEAD_DIM_PADDED // 4)
        query_words_ptr = query_ptr + rows[:, None] * HEAD_DIM + 4 * word_offsets[None, :]
        in_range = (group_heads[:, None] < GROUP_SIZE) & (word_offsets[None, :] < HEAD_DIM // 4)
        query0, query1, query2, query3, row_scale = kv_codes.load_scaled_queries(
            query_words_ptr, in_range, softmax_scale
        )
    else:
        queries = tl.load(
            query_ptr + rows[:, None] * HEAD_DIM + dim_offsets[None, :], mask=query_mask, other=0.0
        )
        if LARGEST_CODE > 0:
            queries, row_scale = kv_codes.scale_queries(queries, softmax_scale)
    query_positions = tl.zeros([GROUP_PADDED], tl.int32) + sequence_length - 1
    running_max = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
    running_sum = tl.zeros([GROUP_PADDED], tl.float32)
    block_table_ptr += tl.load(table_rows_ptr + sequence).to(tl.int64) * stride_table
    key_ptr = kv_ptr + head * stride_head
    value_ptr = kv_ptr + head * stride_head + stride_kind
    key_scale_ptr = scales_ptr
    value_scale_ptr = scales_ptr
    if LARGEST_CODE > 0:
        key_scale_ptr += head * stride_scale_head
        value_scale_ptr = key_scale_ptr + stride_scale_kind
    unmasked_end = tl.maximum(key_end // TILE_KEYS * TILE_KEYS, key_begin)
    if READ_WORDS:
        accumulator0 = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED // 4], tl.float32)
        accumulator1 = accumulator0
        accumulator2 = accumulator0
        accumulator3 = accumulator0
        running_max, running_sum, accumulator0, accumulator1, accumulator2, accumulator3 = (
            _attend_words(
                query0,
                query1,
                query2,
                query3,
                key_ptr,
                value_ptr,
                key_scale_ptr,
                value_scale_ptr,
                block_table_ptr,
                key_begin,
                unmasked_end,
                query_positions,
                running_max,
                running_sum,
                accumulator0,
                accumulator1,
                accumulator2,
                accumulator3,
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
                PRECISION,
                LARGEST_CODE,
            )
        )
        running_max, running_sum, accumulator0, accumulator1, accumulator2, accumulator3 = (
            _attend_words(
                query0,
                query1,
                query2,
                query3,
                key_ptr,
                value_ptr,
                key_scale_ptr,
                value_scale_ptr,
                block_table_ptr,
                unmasked_end,
                key_end,
                query_positions,
                running_max,
                running_sum,
                accumulator0,
                accumulator1,
                accumulator2,
                accumulator3,
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
                PRECISION,
                LARGEST_CODE,
            )
        )
        accumulator = tl.interleave(
            tl.interleave(accumulator0, accumulator2), tl.interleave(accumulator1, accumulator3)
        )
    else:
        accumulator = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
        running_max, running_sum, accumulator = _attend(
            queries,
            key_ptr,
            value_ptr,
            key_scale_ptr,
            value_scale_ptr,
            block_table_ptr,
            key_begin,
            unmasked_end,
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
            unmasked_end,
            key_end,
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
            WINDOW > 0,
            PRECISION,
            LARGEST_CODE,
        )
    if LARGEST_CODE > 0:
        accumulator *= 1.0 / LARGEST_CODE
    if PREFIX_SPLITS > 0:
        _, prefix_tiles, prefix_splits = _split_context(
            prefix_length, TILE_KEYS, PREFIX_SPLITS, PREFIX_MIN_TILES, 0
        )
        # One program adds all parts of the prefix. Without a prefix there are none.
        num_parts = tl.where(split == 0, tl.minimum(prefix_splits, prefix_tiles), 0)
        for part in range(num_parts):
            running_max, running_sum, accumulator = _add_partial(
                prefix_ptr,
                prefix_max_ptr,
                prefix_sum_ptr,
                rows * PREFIX_SPLITS + part,
                running_max,
                running_sum,
                accumulator,
                group_heads < GROUP_SIZE,
                HEAD_DIM,
            )
    if splits == 1:
        tl.store(
            output_ptr + rows[:, None] * HEAD_DIM + dim_offsets[None, :],
            accumulator / running_sum[:, None],
            mask=query_mask,
        )
    else:
        _store_partial(
            partial_ptr,
            partial_max_ptr,
            partial_sum_ptr,
            rows * NUM_SPLITS + split,
            running_max,
            running_sum,
            accumulator,
            group_heads < GROUP_SIZE,
            HEAD_DIM,
        )
    if BESIDE_PREFILL:
        wait_for_inputs()


@triton.jit
def _split_context(
    sequence_length,
    TILE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the first tile of a decoding sequence, its number of tiles and its number of splits.

    A split has at least MIN_TILES tiles.
    """
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(sequence_length - WINDOW, 0) // TILE_KEYS
    num_tiles = tl.cdiv(sequence_length, TILE_KEYS) - first_tile
    splits = 1
    if NUM_SPLITS > 1:
        splits = tl.maximum(1, tl.minimum(NUM_SPLITS, num_tiles // MIN_TILES))
    return first_tile, num_tiles, splits


@triton.jit
def _store_partial(
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    partial_rows,
    running_max,
    running_sum,
    accumulator,
    in_range,
    HEAD_DIM: tl.constexpr,
):
    """Store the partial result of a split, for join_kernel or _add_partial."""
    dim_offsets = tl.arange(0, accumulator.shape[1])
    tl.store(
        partial_ptr + partial_rows[:, None] * HEAD_DIM + dim_offsets[None, :],
        accumulator,
        mask=in_range[:, None] & (dim_offsets[None, :] < HEAD_DIM),
    )
    tl.store(partial_max_ptr + partial_rows, running_max, mask=in_range)
    tl.store(partial_sum_ptr + partial_rows, running_sum, mask=in_range)


@triton.jit
def _add_partial(
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    partial_rows,
    running_max,
    running_sum,
    accumulator,
    in_range,
    HEAD_DIM: tl.constexpr,
):
    """Add a partial result that _store_partial has stored. No running maximum may be -inf."""
    dim_offsets = tl.arange(0, accumulator.shape[1])
    part_max = tl.load(partial_max_ptr + partial_rows, mask=in_range, other=-float("inf"))
    part_sum = tl.load(partial_sum_ptr + partial_rows, mask=in_range, other=0.0)
    part = tl.load(
        partial_ptr + partial_rows[:, None] * HEAD_DIM + dim_offsets[None, :],
        mask=in_range[:, None] & (dim_offsets[None, :] < HEAD_DIM),
        other=0.0,
    )
    new_max = tl.maximum(running_max, part_max)
    rescale = tl.exp2(running_max - new_max)
    weight = tl.exp2(part_max - new_max)
    accumulator = accumulator * rescale[:, None] + part * weight[:, None]
    return new_max, running_sum * rescale + part_sum * weight, accumulator


@triton.jit(do_not_specialize_on_alignment=["seq_lens_ptr"])
def join_kernel(
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    seq_lens_ptr,
    prefix_lens_ptr,
    output_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Join the results of all splits. There is one program for each query head.

    An empty split has the maximum -inf and thus the weight 0. With MIN_TILES the splits are those
    of decode_kernel, and a sequence with a single split has its output already. prefix_lens_ptr is
    None without cascade attention.
    """
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    if MIN_TILES > 0:
        length = tl.load(seq_lens_ptr + row // NUM_HEADS)
        if prefix_lens_ptr is not None:
            length -= tl.load(prefix_lens_ptr + row // NUM_HEADS)
        _, _, splits = _split_context(length, TILE_KEYS, NUM_SPLITS, MIN_TILES, WINDOW)
    else:
        splits = NUM_SPLITS
    if splits == 1:
        return
    split_offsets = tl.arange(0, SPLITS_PADDED)
    dim_offsets = tl.arange(0, HEAD_DIM_PADDED)
    split_max = tl.load(
        partial_max_ptr + row * NUM_SPLITS + split_offsets,
        mask=split_offsets < splits,
        other=-float("inf"),
    )
    weight = tl.exp2(split_max - tl.max(split_max, 0))
    running_sum = tl.sum(
        weight
        * tl.load(
            partial_sum_ptr + row * NUM_SPLITS + split_offsets,
            mask=split_offsets < splits,
            other=0.0,
        ),
        0,
    )
    partial_mask = (split_offsets[:, None] < splits) & (dim_offsets[None, :] < HEAD_DIM)
    split_accumulator = tl.load(
        partial_ptr + (row * NUM_SPLITS + split_offsets)[:, None] * HEAD_DIM + dim_offsets[None, :],
        mask=partial_mask,
        other=0.0,
    )
    tl.store(
        output_ptr + row * HEAD_DIM + dim_offsets,
        tl.sum(split_accumulator * weight[:, None], 0) / running_sum,
        mask=dim_offsets < HEAD_DIM,
    )


@triton.jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def prefix_kernel(
    query_ptr,
    kv_ptr,
    scales_ptr,
    block_table_ptr,
    table_rows_ptr,
    order_ptr,
    prefix_lens_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    softmax_scale,
    num_sequences,
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
    NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):
    """Compute attention of one token of each of several sequences to the prefix that they share.

    There is one program for each tile of sequences, key head and split of the prefix. Sequences of
    a tile that do not share its prefix are rows of zeros, and have no result.
    """
    start_next()
    wait_for_inputs()
    SEQUENCES: tl.constexpr = TILE_ROWS // GROUP_PADDED
    first = tl.program_id(0) * SEQUENCES
    head = tl.program_id(1)
    split = tl.program_id(2)
    leader = shared_prefixes.leader_of(order_ptr, first, num_sequences, SEQUENCES)
    prefix_length = tl.load(prefix_lens_ptr + leader)
    _, num_tiles, splits = _split_context(prefix_length, TILE_KEYS, NUM_SPLITS, PREFIX_MIN_TILES, 0)
    if split >= tl.minimum(splits, num_tiles):
        return
    keys_per_split = tl.cdiv(num_tiles, splits) * TILE_KEYS
    key_begin = split * keys_per_split
    key_end = tl.minimum(key_begin + keys_per_split, prefix_length)
    row_offsets = tl.arange(0, TILE_ROWS)
    dim_offsets = tl.arange(0, HEAD_DIM_PADDED)
    order_indices = first + row_offsets // GROUP_PADDED
    group_head = row_offsets % GROUP_PADDED
    in_range = (order_indices < num_sequences) & (group_head < GROUP_SIZE)
    sequences = tl.load(order_ptr + order_indices, mask=in_range, other=0).to(tl.int64)
    in_range = in_range & (tl.load(prefix_lens_ptr + sequences, mask=in_range, other=0) > 0)
    rows = sequences * NUM_HEADS + head * GROUP_SIZE + group_head
    queries = tl.load(
        query_ptr + rows[:, None] * HEAD_DIM + dim_offsets[None, :],
        mask=in_range[:, None] & (dim_offsets[None, :] < HEAD_DIM),
        other=0.0,
    )
    row_scale = softmax_scale
    key_scale_ptr = scales_ptr
    value_scale_ptr = scales_ptr
    if LARGEST_CODE > 0:
        queries, row_scale = kv_codes.scale_queries(queries, softmax_scale)
        key_scale_ptr += head * stride_scale_head
        value_scale_ptr = key_scale_ptr + stride_scale_kind
    running_max, running_sum, accumulator = _attend(
        queries,
        kv_ptr + head * stride_head,
        kv_ptr + head * stride_head + stride_kind,
        key_scale_ptr,
        value_scale_ptr,
        block_table_ptr + tl.load(table_rows_ptr + leader).to(tl.int64) * stride_table,
        key_begin,
        key_end,
        row_offsets,  # query_positions, which are not used: every row sees all keys
        tl.full([TILE_ROWS], -float("inf"), tl.float32),
        tl.zeros([TILE_ROWS], tl.float32),
        tl.zeros([TILE_ROWS, HEAD_DIM_PADDED], tl.float32),
        row_scale,
        stride_block,
        stride_token,
        stride_scale_block,
        HEAD_DIM,
        HEAD_DIM_PADDED,
        BLOCK_SIZE,
        TILE_KEYS,
        0,
        False,
        False,
        PRECISION,
        LARGEST_CODE,
    )
    if LARGEST_CODE > 0:
        accumulator *= 1.0 / LARGEST_CODE
    _store_partial(
        partial_ptr,
        partial_max_ptr,
        partial_sum_ptr,
        rows * NUM_SPLITS + split,
        running_max,
        running_sum,
        accumulator,
        in_range,
        HEAD_DIM,
    )


@triton.jit
def _find_item(query_start_ptr, tile, num_items, BLOCK_Q: tl.constexpr):
    """Find the item that contains `tile`.

    The tiles of item i start at query_start[i] // BLOCK_Q + i.
    """
    first_item = 0
    end_item = num_items
    while first_item < end_item - 1:
        middle = (first_item + end_item) // 2
        if tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= tile:
            first_item = middle
        else:
            end_item = middle
    return first_item


@triton.jit(do_not_specialize=["num_items"], do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def prefill_kernel(
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
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    LAUNCH_EARLY: tl.constexpr,
):
    """Compute attention for tiles of query tokens.

    LAUNCH_EARLY means that the next kernel needs the same inputs and not the result of this one,
    so it may start as soon as the inputs are ready.
    """
    if LAUNCH_EARLY:
        wait_for_inputs()
        start_next()
    else:
        start_next()
        wait_for_inputs()
    MAY_SEE_NOTHING: tl.constexpr = WINDOW > 0 or NUM_SPLITS > 1
    BLOCK_Q: tl.constexpr = TILE_ROWS // GROUP_PADDED
    head = tl.program_id(1)
    # The last tiles of a sequence have the longest context, so they run first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tile += tl.load(query_start_ptr) // BLOCK_Q
    item = _find_item(query_start_ptr, tile, num_items, BLOCK_Q)
    token_begin = tl.load(query_start_ptr + item)
    token_end = tl.load(query_start_ptr + item + 1)
    first_token = (tile - token_begin // BLOCK_Q - item) * BLOCK_Q
    if first_token < token_end - token_begin:
        context_length = tl.load(seq_lens_ptr + item) - (
            token_end - token_begin
        )  # positions before this step
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
        unmasked_end = (
            (context_length + first_token + 1) // TILE_KEYS * TILE_KEYS
        )  # every row sees all keys before this
        key_end = context_length + tl.minimum(first_token + BLOCK_Q, token_end - token_begin)
        if NUM_SPLITS > 1:
            keys_per_split = (
                tl.cdiv(tl.cdiv(key_end - key_begin, TILE_KEYS), NUM_SPLITS) * TILE_KEYS
            )
            key_begin += tl.program_id(2) * keys_per_split
            key_end = tl.minimum(key_begin + keys_per_split, key_end)
        unmasked_end = tl.maximum(tl.minimum(unmasked_end, key_end), key_begin)
        block_table_ptr += tl.load(table_rows_ptr + item).to(tl.int64) * stride_table
        key_ptr = kv_ptr + head * stride_head
        value_ptr = kv_ptr + head * stride_head + stride_kind
        key_scale_ptr = scales_ptr
        value_scale_ptr = scales_ptr
        if LARGEST_CODE > 0:
            key_scale_ptr += head * stride_scale_head
            value_scale_ptr = key_scale_ptr + stride_scale_kind
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
            key_begin,
            unmasked_end,
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
            MAY_SEE_NOTHING,
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
            unmasked_end,
            key_end,
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
            MAY_SEE_NOTHING,
            PRECISION,
            LARGEST_CODE,
        )
        if LARGEST_CODE > 0:
            accumulator *= 1.0 / LARGEST_CODE
        if NUM_SPLITS == 1:
            tl.store(
                output_ptr + rows[:, None] * HEAD_DIM + dim_offsets[None, :],
                accumulator / running_sum[:, None],
                mask=query_mask,
            )
        else:
            _store_partial(
                partial_ptr,
                partial_max_ptr,
                partial_sum_ptr,
                rows * NUM_SPLITS + tl.program_id(2),
                running_max,
                running_sum,
                accumulator,
                in_range,
                HEAD_DIM,
            )


def attention(
    query: Tensor,
    kv_cache: KV,
    batch: ForwardBatch,
    scale: float,
    window: int,
    cascade: bool = False,
) -> Tensor:
    """Implement Ops.attention.

    A batch has decoding sequences with one token each first; the other items are prefill. If it has
    both, prefill starts first and decode uses the remaining resources, because prefill is bound by
    computing and decode by memory. With `cascade`, prefixes that decoding sequences share are
    computed before both.
    """
    output = torch.empty_like(query)
    num_decoding = next(
        (index for index, span in enumerate(batch.spans) if span.num != 1), len(batch.spans)
    )
    prefix_parts = WITHOUT_PREFIXES
    if cascade and not window and num_decoding >= PREFIX_SEQUENCES:
        prefix_parts = _attend_to_prefixes(query[:num_decoding], kv_cache, batch, scale)
    beside_prefill = False
    if num_decoding < len(batch.spans):
        beside_prefill = _prefill(query, kv_cache, batch, output, num_decoding, scale, window)
    if num_decoding:
        _decode(
            query,
            kv_cache,
            batch,
            output,
            num_decoding,
            scale,
            window,
            beside_prefill,
            prefix_parts,
        )
    return output


def _shape(query: Tensor, kv_cache: KV) -> dict[str, Any]:
    """Return the constants that both kernels are specialised for."""
    num_heads = query.shape[1]
    (_, _, num_kv_heads, block_size, head_dim) = kv_cache.shape
    return {
        "NUM_HEADS": num_heads,
        "GROUP_SIZE": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "LARGEST_CODE": LARGEST.get(kv_cache.dtype, 0.0),
    }


def _tile(kv_cache: KV, head_dim: int) -> dict[str, int]:
    """Return the number of keys in a tile and the number of pipeline stages.

    There are as many stages as fit into shared memory, up to four. A tile within one block has
    cheaper addresses: prefill runs a quarter faster with blocks of 64 than with blocks of 16.
    """
    tile_keys = max(16, min(64, 32768 // (head_dim * kv_cache.dtype.itemsize)))
    return {
        "TILE_KEYS": tile_keys,
        "num_stages": max(
            1, min(4, SHARED_MEMORY // (2 * tile_keys * head_dim * kv_cache.dtype.itemsize))
        ),
    }


def _can_prefetch_more(kv_cache: KV, head_dim: int, tile: dict[str, int]) -> bool:
    """Return whether six stages fit into shared memory: two prefetched tiles instead of one.

    This was measured for heads of 128 dimensions with 16 bits only.
    """
    return head_dim == 128 and kv_cache.dtype.itemsize == 2 and tile["num_stages"] == 4


def _allocate_partials(query: Tensor, num_splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the partial results of the splits: accumulators, maxima and sums."""
    partial = torch.empty(
        *query.shape[:2], num_splits, query.shape[2], dtype=torch.float32, device=query.device
    )
    partial_max, partial_sum = torch.empty(
        2, *partial.shape[:3], dtype=torch.float32, device=query.device
    ).unbind(0)
    return partial, partial_max, partial_sum


def _join(
    parts: tuple[Tensor, Tensor, Tensor],
    seq_lens: Tensor,
    prefix_lens: Tensor | None,
    output: Tensor,
    num_splits: int,
    constants: dict[str, Any],
) -> None:
    if num_splits > 1:
        join_kernel[output.shape[0] * output.shape[1],](
            *parts,
            seq_lens,
            prefix_lens,
            output,
            NUM_SPLITS=num_splits,
            SPLITS_PADDED=triton.next_power_of_2(num_splits),
            num_warps=4,
            **{name: constants[name] for name in JOIN_CONSTANTS},
            **LAUNCH,
        )


def _attend_to_prefixes(
    query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float
) -> PrefixParts:
    """Launch attention of decoding sequences to the prefixes that they share. query [S, Hq, D]"""
    shape = _shape(query, kv_cache)
    num_sequences = len(query)
    num_kv_heads = kv_cache.shape[2]
    group_padded = triton.next_power_of_2(shape["GROUP_SIZE"])
    tile_sequences = PREFIX_ROWS // group_padded
    num_tiles = triton.cdiv(num_sequences, max(1, tile_sequences))
    position_bytes = 2 * num_kv_heads * shape["HEAD_DIM"] * kv_cache.dtype.itemsize
    min_saved = int(PREFIX_BYTES / (num_tiles * position_bytes)) + 1  # positions that a tile saves
    # A graph is captured for the longest possible sequences, as in _decode.
    max_length = batch.block_table.shape[1] * shape["BLOCK_SIZE"]
    if (min(tile_sequences, num_sequences) - 1) * max_length < min_saved:
        return WITHOUT_PREFIXES  # No prefix can be long enough.
    tile = _tile(kv_cache, shape["HEAD_DIM_PADDED"])
    prefix_tiles = PrefixTiles(tile_sequences, tile["TILE_KEYS"], min_saved)
    prefixes = shared_prefixes.find(batch, num_sequences, prefix_tiles, shape["BLOCK_SIZE"])
    num_splits = max(1, min(32, PREFIX_PROGRAMS // (num_tiles * num_kv_heads)))
    num_splits = 1 << round(math.log2(num_splits))
    parts = _allocate_partials(query, num_splits)
    (tensors, strides) = kv_arguments(kv_cache)
    prefix_kernel[num_tiles, num_kv_heads, num_splits](
        query,
        *tensors,
        batch.block_table,
        batch.slots,
        *prefixes,
        *parts,
        scale * LOG2E,
        num_sequences,
        *strides,
        batch.block_table.stride(0),
        GROUP_PADDED=group_padded,
        TILE_ROWS=PREFIX_ROWS,
        NUM_SPLITS=num_splits,
        num_warps=4 if shape["HEAD_DIM_PADDED"] <= 128 else 8,  # A tile must fit the registers.
        **tile,
        **shape,
        **LAUNCH,
    )
    return PrefixParts(prefixes.lengths, *parts)


def _decode(
    query: Tensor,
    kv_cache: KV,
    batch: ForwardBatch,
    output: Tensor,
    num_sequences: int,
    scale: float,
    window: int,
    beside_prefill: bool,
    prefix_parts: PrefixParts,
) -> None:
    shape = _shape(query, kv_cache)
    num_kv_heads = kv_cache.shape[2]
    tile = _tile(kv_cache, shape["HEAD_DIM_PADDED"])
    read_words = (
        isinstance(kv_cache, QuantKV)
        and shape["HEAD_DIM_PADDED"] >= 64
        and shape["BLOCK_SIZE"] % tile["TILE_KEYS"] == 0
    )
    if read_words and isinstance(kv_cache, QuantKV):
        tensors, strides = kv_arguments(QuantKV(kv_cache.codes.view(torch.int32), kv_cache.scales))
    else:
        tensors, strides = kv_arguments(kv_cache)
    # The largest number of splits depends on the largest possible length, so that few different
    # kernels are needed.
    max_length = batch.block_table.shape[1] * shape["BLOCK_SIZE"]
    num_splits = max(
        1,
        min(
            PROGRAMS // (num_sequences * num_kv_heads),
            triton.cdiv(max_length, tile["TILE_KEYS"]),
            32,
        ),
    )
    num_splits = 1 << round(math.log2(num_splits))
    num_unsplit = num_sequences * num_kv_heads
    min_tiles = max(1, min(MIN_TILES, MIN_TILES * num_unsplit // OCCUPYING_PROGRAMS))
    # More stages let each program prefetch two tiles instead of one. Only three such programs fit a
    # multiprocessor instead of five, so this does not pay if there are slightly more than three.
    if _can_prefetch_more(kv_cache, shape["HEAD_DIM_PADDED"], tile) and not any(
        3 < num_unsplit * splits / (PROGRAMS / 8) <= 4 for splits in (1, num_splits)
    ):
        tile["num_stages"] = 6
    parts = (
        _allocate_partials(query[:num_sequences], num_splits) if num_splits > 1 else (query,) * 3
    )
    decode_kernel[num_sequences, num_kv_heads, num_splits](
        query,
        *tensors,
        batch.block_table,
        batch.slots,
        batch.seq_lens,
        output,
        *parts,
        *prefix_parts,
        scale * LOG2E,
        *strides,
        batch.block_table.stride(0),
        GROUP_PADDED=max(16, triton.next_power_of_2(shape["GROUP_SIZE"])),
        NUM_SPLITS=num_splits,
        MIN_TILES=min_tiles,
        WINDOW=window,
        READ_WORDS=read_words,
        BESIDE_PREFILL=beside_prefill,
        PREFIX_SPLITS=prefix_parts.splits,
        num_warps=1 if read_words and shape["HEAD_DIM_PADDED"] < 128 else 2,
        **tile,
        **shape,
        **LAUNCH,
    )
    constants = {**shape, **tile, "MIN_TILES": min_tiles, "WINDOW": window}
    _join(
        parts,
        batch.seq_lens,
        prefix_parts.lengths,
        output[:num_sequences],
        num_splits,
        constants,
    )


def _prefill(
    query: Tensor,
    kv_cache: KV,
    batch: ForwardBatch,
    output: Tensor,
    num_decoding: int,
    scale: float,
    window: int,
) -> bool:
    """Launch prefill, and return whether decode may run beside it."""
    shape = _shape(query, kv_cache)
    num_kv_heads = kv_cache.shape[2]
    (tensors, strides) = kv_arguments(kv_cache)
    group_padded = triton.next_power_of_2(shape["GROUP_SIZE"])
    num_items = len(batch.spans) - num_decoding
    num_tokens = query.shape[0] - num_decoding
    tile_rows = max(group_padded, 64)
    num_tiles = (
        num_tokens // (tile_rows // group_padded) + num_items + (num_decoding > 0)
    )  # an upper bound: some tiles are empty
    max_length = batch.block_table.shape[1] * shape["BLOCK_SIZE"]  # as in _decode
    num_splits = (
        PREFILL_SPLITS if num_tokens <= SPLIT_MAX_TOKENS and max_length >= SPLIT_MIN_CONTEXT else 1
    )
    parts = _allocate_partials(query, num_splits) if num_splits > 1 else (query,) * 3
    launch_early = num_decoding >= OVERLAP_MIN_SEQUENCES and num_splits == 1
    tile = _tile(kv_cache, shape["HEAD_DIM_PADDED"])
    # Two programs fit a multiprocessor either way, but six stages leave decode beside prefill no
    # shared memory. Windows, splits and smaller blocks were not measured.
    has_whole_tiles = shape["BLOCK_SIZE"] % tile["TILE_KEYS"] == 0
    is_measured = has_whole_tiles and num_splits == 1 and not window and not launch_early
    if is_measured and _can_prefetch_more(kv_cache, shape["HEAD_DIM_PADDED"], tile):
        tile["num_stages"] = 6
    prefill_kernel[num_tiles, num_kv_heads, num_splits](
        query,
        *tensors,
        batch.block_table,
        batch.slots[num_decoding:],
        batch.query_start[num_decoding:],
        batch.seq_lens[num_decoding:],
        output,
        *parts,
        scale * LOG2E,
        num_items,
        *strides,
        batch.block_table.stride(0),
        GROUP_PADDED=group_padded,
        TILE_ROWS=tile_rows,
        NUM_SPLITS=num_splits,
        WINDOW=window,
        LAUNCH_EARLY=launch_early,
        num_warps=4,
        **tile,
        **shape,
        **LAUNCH,
    )
    accumulators, maxima, sums = parts
    prefill_parts = (accumulators[num_decoding:], maxima[num_decoding:], sums[num_decoding:])
    constants = {**shape, "TILE_KEYS": 0, "MIN_TILES": 0, "WINDOW": 0}
    _join(prefill_parts, batch.seq_lens, None, output[num_decoding:], num_splits, constants)
    return launch_early
