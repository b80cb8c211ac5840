"""Verifies drafts: each draft is a row of a decode batch.

A sequence with k drafts has 1 + k rows, which are the same batch slot at consecutive positions. The
rows are computed and sampled as if they were k + 1 sequences that decode. In each layer their KV is
written before their attention reads it, so a row sees the rows before it.

    row        slot  offset   reads      samples    the draft behind it
    0          3     0        brown      fox        fox         accepted
    1          3     1        fox        jumps      jumps       accepted
    2          3     2        jumps      onto       over        rejected
    3          3     3        over       a                      dropped, because row 2 differs
    4          5     0        hello      world                  a sequence without drafts

A row is kept if all rows before it in its sequence sampled their drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch
from octavo.runner.batch import ForwardResult, one_token_each
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.kvstore import KVStore
from octavo.types import Item, Plan


class DraftRows(NamedTuple):
    """The forward pass over the rows of a step, before a token is sampled."""

    batch: ForwardBatch
    hidden: Tensor  # [R, hidden]
    forward: ForwardResult
    offsets: Tensor  # [R] The offsets of lay_out_rows().
    # [R] The draft behind each row. The value behind the last row of an item is undefined.
    drafts: Tensor


def lay_out_rows(items: list[Item]) -> NDArray[np.int32]:
    """Return the layout of R rows: slot of each row [R] | offset of each row in its item [R]."""
    counts = np.array([item.num_tokens for item in items], dtype=np.int64)
    slots = np.repeat(np.array([item.slot for item in items], dtype=np.int64), counts)
    first_rows = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.arange(len(slots)) - first_rows
    return np.concatenate([slots, offsets]).astype(np.int32)


def lay_out_drafts(
    items: list[Item], num_passes: int, num_drafting: int, num_rows: int, padding_slot: int
) -> NDArray[np.int32]:
    """Return the slots of each pass of the drafter [passes, sequences], then lay_out_rows().

    Both are padded with the padding slot.
    """
    drafting = np.full((num_passes, num_drafting), padding_slot, dtype=np.int32)
    if num_passes:
        for index, item in enumerate(items):
            drafting[: item.num_drafts, index] = item.slot
    slots, offsets = lay_out_rows(items).reshape(2, -1)
    num_padding = num_rows - len(slots)
    padded_slots = np.pad(slots, (0, num_padding), constant_values=padding_slot)
    return np.concatenate([drafting.ravel(), padded_slots, np.pad(offsets, (0, num_padding))])


def changes_slots(plan: Plan) -> bool:
    """Return whether a plan changes more than the block tables before its items run.

    Stores do not count. A plan without items counts as a change.
    """
    return bool(not plan.items or plan.slot_fills or plan.copies or plan.loads or plan.shifts)


def slots_to_draft(plan: Plan) -> list[list[int]]:
    """Return the slots that need one more draft, for each pass of the drafter on the device."""
    drafting = [
        item
        for index, item in enumerate(plan.items)
        if item.num_drafts and index not in plan.drafts
    ]
    num_passes = max((item.num_drafts for item in drafting), default=0)
    return [
        [item.slot for item in drafting if item.num_drafts > index] for index in range(num_passes)
    ]


def compute_rows(
    model: CausalLM, kv: KVStore, batch_slots: BatchSlots, layout: Tensor, max_len: int
) -> DraftRows:
    """Run the forward pass over rows.

    `layout` comes from lay_out_rows(). The positions of all rows are less than `max_len`.
    """
    slots, offsets = layout.view(2, -1)
    lengths = batch_slots.computed[slots.long()] + 1 + offsets
    ids = batch_slots.tokens[slots.long(), lengths.long() - 1]
    # The token behind the known tokens of a slot is the draft, until a token is sampled there.
    drafts = batch_slots.tokens[slots.long(), lengths.long()]
    batch = one_token_each(slots, lengths, ids, batch_slots, kv.block_size, max_len)
    hidden, logits = model.forward_with_logits(batch, kv.view)
    return DraftRows(batch, hidden, ForwardResult(slots, logits, lengths), offsets, drafts)


def keep_rows(rows: DraftRows, batch_slots: BatchSlots) -> Tensor:
    """Advance each slot over the rows that are kept, after a token was sampled behind every row.

    Returns whether each row is kept [R] (bool).
    """
    slots = rows.forward.slots.long()
    lengths = rows.forward.lengths
    kept_rows = is_kept(batch_slots.tokens[slots, lengths.long()] != rows.drafts, rows.offsets)
    reached = torch.where(kept_rows, lengths, 0)
    batch_slots.computed.scatter_reduce_(0, slots, reached, "amax")
    batch_slots.computed[batch_slots.padding_slot :].zero_()
    return kept_rows


def is_kept(differs: Tensor, offsets: Tensor) -> Tensor:
    """Return for each row whether no row of its item before it differs [R] (bool).

    differs [R] is true for a row if the token sampled after it is not its draft.
    """
    counts = differs.int()
    num_before = counts.cumsum(0) - counts
    first_rows = torch.arange(len(offsets), device=offsets.device) - offsets
    return num_before == num_before[first_rows]
