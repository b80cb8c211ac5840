"""Finds decoding rows whose block tables begin with the same blocks, for cascade attention.

Blocks of the prefix cache are shared by number. Two rows with the same blocks at the beginning of
their block tables therefore have the same keys and values there, whatever the cause: a prefix hit,
a fork, or drafts of one sequence. A prefix ends before the block that holds a row's last position.
A row thus sees all positions of its prefix, and at least one position follows the prefix.

    order_kernel     orders the rows by their first block, so that rows that may share a prefix are
                     neighbours. Rows without a full block, such as padding, come last
    measure_kernel   finds the prefix of each tile of neighbours. A program of prefix_kernel
                     (attention_kernels.py) computes such a tile

Both run on the device, once in a step. A CUDA graph therefore needs no further inputs, and the host
keeps no record of what is shared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import ForwardBatch

# These arguments begin at any offset: see attention_kernels.py.
UNALIGNED_ARGUMENTS = ["table_rows_ptr", "seq_lens_ptr"]
# The first block of rows without a full block, so that they come last. No block has this number.
NO_BLOCK = tl.constexpr(2**31 - 1)


class SharedPrefixes(NamedTuple):
    """The prefixes that decoding rows share. Both tensors are int32."""

    order: Tensor  # [S] the rows, ordered by their first blocks
    lengths: Tensor  # [S] the positions of the prefix that a row shares with its tile, or 0


class PrefixTiles(NamedTuple):
    """How prefix_kernel computes prefixes."""

    rows: int  # rows of a tile
    keys: int  # The length of a prefix is a multiple of this number of positions.
    min_saved: int  # A tile has a prefix if its rows together need not read this many positions.


def find(batch: ForwardBatch, num_rows: int, tiles: PrefixTiles, block_size: int) -> SharedPrefixes:
    """Find the prefixes of the first `num_rows` items, which have one token each.

    All layers of a step use the same result.
    """
    key = ("shared prefixes", num_rows, tiles)
    if key not in batch.scratch:
        # Each is a tensor of its own, so that the alignment of its address is always the same.
        prefixes = SharedPrefixes(
            *(batch.seq_lens.new_empty(num_rows, dtype=torch.int32) for _ in range(2))
        )
        num_programs = triton.cdiv(num_rows, tiles.rows)
        order_kernel[num_programs,](
            batch.block_table,
            batch.slots,
            batch.seq_lens,
            prefixes.order,
            num_rows,
            batch.block_table.stride(0),
            BLOCK_SIZE=block_size,
            TILE_ROWS=tiles.rows,
            num_warps=4,
        )
        measure_kernel[num_programs,](
            batch.block_table,
            batch.slots,
            batch.seq_lens,
            *prefixes,
            num_rows,
            tiles.min_saved,
            batch.block_table.stride(0),
            BLOCK_SIZE=block_size,
            TILE_ROWS=tiles.rows,
            TILE_KEYS=tiles.keys,
            COLUMNS=64,
            num_warps=4,
        )
        batch.scratch[key] = prefixes
    return batch.scratch[key]


@triton.jit
def _first_blocks(
    block_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    rows,
    num_rows,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the first block of each row, or NO_BLOCK for a row that has no full block."""
    in_range = rows < num_rows
    table_rows = tl.load(table_rows_ptr + rows, mask=in_range, other=0).to(tl.int64)
    has_block = tl.load(seq_lens_ptr + rows, mask=in_range, other=0) > BLOCK_SIZE
    return tl.load(block_table_ptr + table_rows * stride_table, mask=has_block, other=NO_BLOCK)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS)
def order_kernel(
    block_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    order_ptr,
    num_rows,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Order rows by their first block. Rows with the same one keep their order.

    Each program counts the rows before each of TILE_ROWS rows. There are few enough rows to compare
    all of them with all others.
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    blocks = _first_blocks(
        block_table_ptr, table_rows_ptr, seq_lens_ptr, rows, num_rows, stride_table, BLOCK_SIZE
    )
    places = tl.zeros([TILE_ROWS], tl.int32)
    for begin in range(0, num_rows, TILE_ROWS):
        others = begin + tl.arange(0, TILE_ROWS)
        other_blocks = _first_blocks(
            block_table_ptr,
            table_rows_ptr,
            seq_lens_ptr,
            others,
            num_rows,
            stride_table,
            BLOCK_SIZE,
        )
        is_before = (other_blocks[None, :] < blocks[:, None]) | (
            (other_blocks[None, :] == blocks[:, None]) & (others[None, :] < rows[:, None])
        )
        is_before = is_before & (others[None, :] < num_rows)
        places += tl.sum(is_before.to(tl.int32), 1)
    tl.store(order_ptr + places, rows, mask=rows < num_rows)


@triton.jit(
    do_not_specialize=["num_rows", "min_saved"], do_not_specialize_on_alignment=UNALIGNED_ARGUMENTS
)
def measure_kernel(
    block_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    order_ptr,
    prefix_lens_ptr,
    num_rows,
    min_saved,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the prefix of one tile of rows in each program.

    The block tables are compared with that of the leader, the row in the middle of the tile. The
    prefix is the one that saves the most reading. Rows that do not have it keep no prefix; if any
    row has a prefix, so has the leader.
    """
    first = tl.program_id(0) * TILE_ROWS
    places = first + tl.arange(0, TILE_ROWS)
    in_range = places < num_rows
    rows = tl.load(order_ptr + places, mask=in_range, other=0)
    table_rows = tl.load(table_rows_ptr + rows, mask=in_range, other=0).to(tl.int64)
    num_blocks = (tl.load(seq_lens_ptr + rows, mask=in_range, other=1) - 1) // BLOCK_SIZE
    leader = leader_of(order_ptr, first, num_rows, TILE_ROWS)
    leader_row = tl.load(table_rows_ptr + leader).to(tl.int64)
    leader_blocks = (tl.load(seq_lens_ptr + leader) - 1) // BLOCK_SIZE
    shared = tl.zeros([TILE_ROWS], tl.int32)  # the leading blocks that a row shares with the leader
    num_compared = 0
    num_equal = tl.sum(in_range.to(tl.int32), 0)
    while (num_compared < leader_blocks) & (num_equal > 1):
        columns = num_compared + tl.arange(0, COLUMNS)
        row_block_numbers = tl.load(
            block_table_ptr + table_rows[:, None] * stride_table + columns[None, :],
            mask=columns[None, :] < num_blocks[:, None],
            other=-1,
        )
        leader_block_numbers = tl.load(
            block_table_ptr + leader_row * stride_table + columns,
            mask=columns < leader_blocks,
            other=-2,
        )
        first_different = tl.min(
            tl.where(
                row_block_numbers == leader_block_numbers[None, :],
                num_compared + COLUMNS,
                columns[None, :],
            ),
            1,
        )
        shared = tl.where(shared == num_compared, first_different, shared)
        num_compared += COLUMNS
        num_equal = tl.sum((shared == num_compared).to(tl.int32), 0)
    lengths = shared * BLOCK_SIZE // TILE_KEYS * TILE_KEYS
    # One row of those that share a prefix would have to read it anyway.
    num_sharing = tl.sum((lengths[None, :] >= lengths[:, None]).to(tl.int32), 1)
    saved = lengths * (num_sharing - 1)
    most_saved = tl.max(saved, 0)
    prefix_length = tl.max(tl.where(saved == most_saved, lengths, 0), 0)
    has_prefix = (lengths >= prefix_length) & (most_saved >= min_saved)
    tl.store(prefix_lens_ptr + rows, tl.where(has_prefix, prefix_length, 0), mask=in_range)


@triton.jit
def leader_of(order_ptr, first, num_rows, TILE_ROWS: tl.constexpr):
    """Return the row in the middle of the tile that begins at `first`."""
    return tl.load(order_ptr + first + tl.minimum(TILE_ROWS, num_rows - first) // 2)
