"""Preparing a decode step on the device: what each row computes next, and where, without the host knowing either."""

from __future__ import annotations

from collections import deque

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def advance_kernel(
    rows,
    fresh,
    tokens,
    table,
    computed,
    ids,
    positions,
    slots,
    seq_lens,
    padding,
    s_tokens,
    s_table,
    s_computed,
    B: tl.constexpr,
):
    """One program an item: take its row one position on. The padding row stays at position 0 of block 0."""
    item = tl.program_id(0)
    row = tl.load(rows + item).to(tl.int64)
    at = tl.load(computed + row * s_computed)
    block = tl.load(fresh + item)
    entry = table + row * s_table + at // B
    if block > 0:
        tl.store(entry, block)
    else:
        block = tl.load(entry)
    token = tl.load(tokens + row * s_tokens + at)
    # -1: none could be chosen, and the row ends soon
    tl.store(ids + item, tl.maximum(token, 0).to(tl.int64))
    tl.store(positions + item, at.to(tl.int64))
    tl.store(slots + item, block.to(tl.int64) * B + at % B)
    tl.store(seq_lens + item, at + 1)
    if row != padding:
        tl.store(computed + row * s_computed, at + 1)


def advance(
    rows: Tensor,
    fresh: Tensor,
    tokens: Tensor,
    table: Tensor,
    computed: Tensor,
    padding: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For items of rows [S] (int32), one token each: (ids, positions, kv_indices [S] int64, seq_lens [S] int32).

    fresh [S]: the block that the position goes to where it is the row's new one, else 0; it is entered in table [rows, W].
    computed [rows] is moved on."""
    ids, positions, slots = torch.empty(3, len(rows), dtype=torch.int64, device=rows.device).unbind(
        0
    )
    seq_lens = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
    advance_kernel[len(rows),](
        rows, fresh, tokens, table, computed, ids, positions, slots, seq_lens, padding,
        tokens.stride(0), table.stride(0), computed.stride(0), block_size, num_warps=1,
    )  # fmt: skip
    return ids, positions, slots, seq_lens


@triton.jit(do_not_specialize=["count"])
def tell_kernel(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


# Torch gives pinned memory away again when nobody holds it, and knows of no kernel that has yet to write there: it is held until
# so many more steps were launched, which is more than are ever on their way.
_told: deque[Tensor] = deque(maxlen=32)


def tell(target: Tensor, source: Tensor) -> None:
    """Copy a few numbers to target, pinned memory of the host. A copy engine would do it too, and the next step's kernels would
    wait until it has been told to and has told that it is done."""
    _told.append(target)
    tell_kernel[triton.cdiv(source.numel(), 1024),](
        source, target, source.numel(), 1024, num_warps=4
    )
