"""Prepares the inputs of a decode step on the device. The host need not know the tokens."""

from __future__ import annotations

from collections import deque

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def advance_kernel(
    rows_ptr,
    fresh_blocks_ptr,
    tokens_ptr,
    block_table_ptr,
    computed_ptr,
    input_ids_ptr,
    positions_ptr,
    kv_indices_ptr,
    seq_lens_ptr,
    padding_row,
    stride_tokens,
    stride_table,
    stride_computed,
    BLOCK_SIZE: tl.constexpr,
):
    """Advance the row of one item by one position, in each program.

    The padding row stays at position 0 of block 0.
    """
    item = tl.program_id(0)
    row = tl.load(rows_ptr + item).to(tl.int64)
    position = tl.load(computed_ptr + row * stride_computed)
    block = tl.load(fresh_blocks_ptr + item)
    entry_ptr = block_table_ptr + row * stride_table + position // BLOCK_SIZE
    if block > 0:
        tl.store(entry_ptr, block)
    else:
        block = tl.load(entry_ptr)
    token = tl.load(tokens_ptr + row * stride_tokens + position)
    # The token -1 means that no token could be sampled. The row will be finished soon.
    tl.store(input_ids_ptr + item, tl.maximum(token, 0).to(tl.int64))
    tl.store(positions_ptr + item, position.to(tl.int64))
    tl.store(kv_indices_ptr + item, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(seq_lens_ptr + item, position + 1)
    if row != padding_row:
        tl.store(computed_ptr + row * stride_computed, position + 1)


def advance(
    rows: Tensor,
    fresh_blocks: Tensor,
    tokens: Tensor,
    block_table: Tensor,
    computed: Tensor,
    padding_row: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Advance rows [S] (int32) by one token each.

    Returns input_ids, positions, kv_indices [S] (int64) and seq_lens [S] (int32). fresh_blocks [S]
    holds the new block of a row whose position begins a block, else 0; it is written to
    block_table [rows, W]. computed [rows] is incremented.
    """
    input_ids, positions, kv_indices = torch.empty(
        3, len(rows), dtype=torch.int64, device=rows.device
    ).unbind(0)
    seq_lens = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    advance_kernel[len(rows),](
        rows,
        fresh_blocks,
        tokens,
        block_table,
        computed,
        input_ids,
        positions,
        kv_indices,
        seq_lens,
        padding_row,
        tokens.stride(0),
        block_table.stride(0),
        computed.stride(0),
        block_size,
        num_warps=1,
    )
    return input_ids, positions, kv_indices, seq_lens


@triton.jit(do_not_specialize=["num_values"])
def copy_kernel(source_ptr, target_ptr, num_values, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        target_ptr + offsets,
        tl.load(source_ptr + offsets, mask=offsets < num_values),
        mask=offsets < num_values,
    )


# Torch reuses pinned memory when its tensor is dropped, even if a kernel has yet to write to it. So
# tensors are kept for more steps than can be in flight.
_targets_in_flight: deque[Tensor] = deque(maxlen=32)


def copy_to_host(target: Tensor, source: Tensor) -> None:
    """Copy a few numbers to target, which is pinned host memory.

    A kernel does this because the kernels of the next step would wait for a copy engine.
    """
    _targets_in_flight.append(target)
    copy_kernel[triton.cdiv(source.numel(), 1024),](
        source, target, source.numel(), 1024, num_warps=4
    )
