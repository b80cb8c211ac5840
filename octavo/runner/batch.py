"""Builds a ForwardBatch from a plan's items.

The host lays out slots and token counts in one array. The device gathers tokens, positions and
block tables. Positions are taken from `computed` of the item's batch slot, because the host does
not have its exact value while drafts are in flight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import ForwardBatch, Span, Watched
from octavo.runner.batch_slots import BatchSlots
from octavo.types import Item


class ForwardResult(NamedTuple):
    """The outputs of a forward pass that the sampler needs, for R rows of logits: one for each
    sampled item or, with drafts, one for each token."""

    slots: Tensor  # [R] The batch slots (int32).
    logits: Tensor  # [R, vocab]
    lengths: Tensor  # [R] The number of tokens in each slot: the position of the next token.
    tokens: Tensor | None = None  # [R] The tokens that a CUDA graph or a CPU job has sampled.
    # [R] Whether each row with drafts is kept (octavo/runner/verification.py).
    kept_rows: Tensor | None = None


def lay_out(items: list[Item]) -> NDArray[np.int32]:
    """Return the layout of S items with T tokens in one array.

    slots [S] | number of tokens [S] | index of the first token, and the end [S + 1] |
    item of each token [T] | offset of each token in its item [T]
    """
    pairs = np.array([(item.slot, item.num_tokens) for item in items], dtype=np.int64)
    pairs = pairs.reshape(-1, 2)  # This gives the shape [0, 2] if there are no items.
    return _joined(pairs[:, 0], pairs[:, 1])


def lay_out_padded(
    items: list[Item], padding_slot: int, num_items: int, num_tokens: int, num_decoding: int
) -> NDArray[np.int32]:
    """Lay out a batch of `num_items` items and `num_tokens` tokens.

    Items without tokens follow the given items, and the last item has all remaining tokens. The
    first `num_decoding` items always have one token each.
    """
    slots = np.full(num_items, padding_slot)
    counts = np.zeros(num_items, dtype=np.int64)
    counts[:num_decoding] = 1
    slots[: len(items)] = [item.slot for item in items]
    counts[: len(items)] = [item.num_tokens for item in items]
    counts[-1] = num_tokens - counts.sum()
    return _joined(slots, counts)


def _joined(slots: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    starts = np.concatenate([[0], np.cumsum(counts)])
    item_of_token = np.repeat(np.arange(len(slots)), counts)
    offsets = np.arange(len(item_of_token)) - starts[item_of_token]
    return np.concatenate([slots, counts, starts, item_of_token, offsets]).astype(np.int32)


def gather(
    layout: Tensor,
    num_items: int,
    batch_slots: BatchSlots,
    block_size: int,
    spans: list[Span],
) -> ForwardBatch:
    """Build the batch from the array of lay_out(), on the device.

    Only the last token of each item gets logits.
    """
    num_tokens = (len(layout) - 3 * num_items - 1) // 2
    slots, counts, starts, item_of_token, offsets = layout.split(
        [num_items, num_items, num_items + 1, num_tokens, num_tokens]
    )
    item_slots = slots.long()
    item_of_token = item_of_token.long()
    first_positions = batch_slots.computed[item_slots]
    token_slots = item_slots[item_of_token]
    positions = (first_positions[item_of_token] + offsets).long()
    blocks = batch_slots.block_table[token_slots, positions // block_size].long()
    return ForwardBatch(
        # A slot whose logits had no finite number has token -1. Its sequence ends soon.
        ids=batch_slots.tokens[token_slots, positions].long().clamp_(min=0),
        positions=positions,
        kv_indices=blocks * block_size + positions % block_size,
        query_start=starts,
        seq_lens=first_positions + counts,
        block_table=batch_slots.block_table,
        slots=slots,
        logit_indices=(starts[1:] - 1).long(),
        spans=spans,
    )


def one_token_each(
    slots: Tensor,
    lengths: Tensor,
    ids: Tensor,
    batch_slots: BatchSlots,
    block_size: int,
    max_len: int,
) -> ForwardBatch:
    """Return a batch with one token for each slot: `ids` [S] at the position before `lengths` [S].
    No length is larger than `max_len`."""
    positions = (lengths - 1).long()
    blocks = batch_slots.block_table[slots.long(), positions // block_size].long()
    starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
    return ForwardBatch(
        ids=ids.long().clamp_(min=0),
        positions=positions,
        kv_indices=blocks * block_size + positions % block_size,
        query_start=starts,
        seq_lens=lengths,
        block_table=batch_slots.block_table,
        slots=slots,
        logit_indices=starts[:-1].long(),
        spans=[Span(index, 1, max_len) for index in range(len(slots))],
    )


def last_tokens(batch: ForwardBatch, items: Tensor, spans: list[Span]) -> ForwardBatch:
    """Return the last token of each of these items as a batch that decodes.

    The last layer of a step computes K and V for all tokens, and the rest only for these tokens.
    """
    indices = batch.logit_indices
    return ForwardBatch(
        ids=batch.ids[indices],
        positions=batch.positions[indices],
        kv_indices=batch.kv_indices[indices],
        query_start=torch.arange(len(spans) + 1, dtype=torch.int32, device=indices.device),
        seq_lens=batch.seq_lens[items],
        block_table=batch.block_table,
        slots=batch.slots[items],
        logit_indices=indices,
        spans=[Span(index, 1, span.end) for index, span in enumerate(spans)],
    )


def watch(batch: ForwardBatch, items: Tensor, batch_slots: BatchSlots, num_blocks: int) -> Watched:
    """Prepare to measure the attention of these items over their first `num_blocks` blocks."""
    return Watched(
        tokens=(batch.query_start[items + 1] - 1).long(),
        lengths=batch.seq_lens[items],
        blocks=batch_slots.block_table[batch.slots[items].long(), :num_blocks].long(),
        mass=torch.zeros(len(items), num_blocks, device=items.device),
    )
