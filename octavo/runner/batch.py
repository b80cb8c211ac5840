"""From a plan's items to a ForwardBatch: what the host knows is laid out in one array, the rest is gathered on the device.

The host knows how many tokens each item has. Where they stand only the device knows: `computed` of the item's row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import ForwardBatch, Span, Watched
from octavo.runner.batch_slots import Rows
from octavo.types import Item


def lay_out(items: list[Item]) -> NDArray[np.int32]:
    """rows [S] | tokens of each [S] | first token of each and the end [S + 1] | each token's item [T] | its offset there [T]"""
    # there may be none
    pairs = np.array([(item.slot, item.num_tokens) for item in items], dtype=np.int64).reshape(
        -1, 2
    )
    return _joined(pairs[:, 0], pairs[:, 1])


def lay_out_padded(
    items: list[Item], padding: int, num_items: int, num_tokens: int, decoding: int
) -> NDArray[np.int32]:
    """The same for a fixed size: items of no tokens follow, and one last item takes the tokens that are left over. The first
    `decoding` have one token each, in any case."""
    rows = np.full(num_items, padding)
    nums = np.zeros(num_items, dtype=np.int64)
    nums[:decoding] = 1
    rows[: len(items)] = [item.slot for item in items]
    nums[: len(items)] = [item.num_tokens for item in items]
    nums[-1] = num_tokens - nums.sum()
    return _joined(rows, nums)


def _joined(rows: NDArray[np.int64], nums: NDArray[np.int64]) -> NDArray[np.int32]:
    starts = np.concatenate([[0], np.cumsum(nums)])
    which = np.repeat(np.arange(len(rows)), nums)
    return np.concatenate(
        [rows, nums, starts, which, np.arange(len(which)) - starts[which]]
    ).astype(np.int32)


def gather(
    laid_out: Tensor, num_items: int, state: Rows, block_size: int, spans: list[Span]
) -> ForwardBatch:
    """The batch, from the array above on the device. Logits are wanted of each item's last token."""
    tokens = (len(laid_out) - 3 * num_items - 1) // 2
    rows, nums, starts, which, offset = laid_out.split(
        [num_items, num_items, num_items + 1, tokens, tokens]
    )
    item_rows = rows.long()
    which = which.long()
    start = state.computed[item_rows]
    token_rows = item_rows[which]
    positions = (start[which] + offset).long()
    blocks = state.table[token_rows, positions // block_size].long()
    return ForwardBatch(
        # a row that nothing could be chosen for ends soon
        ids=state.tokens[token_rows, positions].long().clamp_(min=0),
        positions=positions,
        kv_slots=blocks * block_size + positions % block_size,
        query_start=starts,
        seq_lens=start + nums,
        block_table=state.table,
        rows=rows,
        logit_rows=(starts[1:] - 1).long(),
        spans=spans,
    )


def only_last(batch: ForwardBatch, items: Tensor, spans: list[Span]) -> ForwardBatch:
    """The last token of each of these items, as if they were decoding: what a step's last layer needs beyond K and V."""
    at = batch.logit_rows
    return ForwardBatch(
        ids=batch.ids[at],
        positions=batch.positions[at],
        kv_slots=batch.kv_slots[at],
        query_start=torch.arange(len(spans) + 1, dtype=torch.int32, device=at.device),
        seq_lens=batch.seq_lens[items],
        block_table=batch.block_table,
        rows=batch.rows[items],
        logit_rows=at,
        spans=[Span(k, 1, span.end) for k, span in enumerate(spans)],
    )


def watch(batch: ForwardBatch, items: Tensor, state: Rows, width: int) -> Watched:
    """These items' attention, over the first `width` blocks of each."""
    mass = torch.zeros(len(items), width, device=items.device)
    blocks = state.table[batch.rows[items].long(), :width].long()
    return Watched((batch.query_start[items + 1] - 1).long(), batch.seq_lens[items], blocks, mass)
