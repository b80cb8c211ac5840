"""Drafters on the device: they guess the next tokens of sequences, one forward pass for each draft.

    EarlyExit    the first layers of the target, with the target's KV cache
    DraftModel   another model with the same vocabulary, with a KV cache of its own
    HeadDrafter  a trained draft head, with a KV cache of its own (head_drafter.py)

The runner calls draft() before the target's forward pass in a step that verifies drafts, and
observe() after the target's forward pass in every step. A KV cache of its own has the block tables
of the target, so the scheduler does not know it. Where its content is missing or stale, as after a
load from the host tier, drafts get worse and tokens stay the same.

Drafts are drawn with the noise that the target draws with, so that both mostly draw the same token
where their distributions agree. Drafts lie behind the known tokens of a slot until the step has
verified them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch, Span
from octavo.runner.batch import (
    ForwardResult,
    gather,
    last_tokens,
    lay_out_known,
    one_token_each,
)
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.kvstore import KVStore
from octavo.runner.sampler import choose
from octavo.runner.transfer import Upload
from octavo.types import Item, Plan


class Observed(NamedTuple):
    """The target's forward pass of one step. The slots hold the sampled tokens already."""

    plan: Plan
    batch: ForwardBatch
    hidden: Tensor  # [T, hidden] if the drafter needs it, and otherwise of some tokens only


class Drafter(Protocol):
    @property
    def kv(self) -> KVStore | None:
        """The KV cache of its own, if it has one."""
        ...

    @property
    def needs_hidden(self) -> bool:
        """Whether observe() needs the hidden states of all tokens."""
        ...

    def observe(self, step: Observed, batch_slots: BatchSlots) -> None:
        """Follow a step of the target: compute the drafter's KV of the tokens that it computed."""
        ...

    def draft(self, plan: Plan, passes: list[Tensor], batch_slots: BatchSlots) -> None:
        """Write drafts behind the known tokens of batch slots. `passes` lists for each pass the
        slots [S] (int32) that get one more draft. Only their blocks have room for it."""
        ...


class EarlyExit:
    kv = None
    needs_hidden = False

    def __init__(self, model: CausalLM, target_kv: KVStore):
        """`model` has the first layers of the target. It writes the KV that the target writes again
        when it verifies the drafts."""
        self.model = model
        self.target_kv = target_kv

    def observe(self, step: Observed, batch_slots: BatchSlots) -> None:
        """There is nothing to follow: the target has written the KV."""

    def draft(self, plan: Plan, passes: list[Tensor], batch_slots: BatchSlots) -> None:
        draft_further(self.model, self.target_kv, plan, passes, batch_slots)


class DraftModel:
    """After a step that accepts all drafts, the KV of the last draft is missing: it was drafted and
    never read. So every first pass over a sequence that decodes computes two tokens."""

    needs_hidden = False

    def __init__(self, model: CausalLM, kv: KVStore):
        self.model = model
        self.kv = kv

    def observe(self, step: Observed, batch_slots: BatchSlots) -> None:
        if step.plan.num_drafts:
            return  # draft() has computed the known tokens, and the accepted drafts but the last
        items = step.plan.items
        first_positions = step.batch.positions[step.batch.query_start[:-1].long()].int()
        batch = self._known_tokens(items, range(len(items)), batch_slots, first_positions)
        self.model(batch, self.kv.view)

    def draft(self, plan: Plan, passes: list[Tensor], batch_slots: BatchSlots) -> None:
        drafting = [index for index, item in enumerate(plan.items) if item.num_drafts]
        slots = passes[0]
        batch = self._known_tokens(plan.items, drafting, batch_slots)
        _, logits = self.model.forward_with_logits(batch, self.kv.view)
        lengths = batch_slots.computed[slots.long()] + 1
        choose(ForwardResult(slots, logits, lengths), batch_slots, self.model.ops)
        draft_further(self.model, self.kv, plan, passes, batch_slots, num_done=1)

    def _known_tokens(
        self,
        items: list[Item],
        wanted: Sequence[int],
        batch_slots: BatchSlots,
        first_positions: Tensor | None = None,
    ) -> ForwardBatch:
        """Return the known tokens of a step as a batch. The model returns the hidden states of the
        `wanted` items' last tokens."""
        spans: list[Span] = []
        num_tokens = 0
        for item in items:
            count = 2 if item.start is None else item.num_tokens
            spans.append(Span(num_tokens, count, item.max_kv_len))
            num_tokens += count
        upload = Upload()
        layout = upload.ints(lay_out_known(items))
        wanted_indices = upload.ints(list(wanted))
        sent = upload.send(batch_slots.device)
        batch = gather(
            sent[layout], len(items), batch_slots, self.kv.block_size, spans, first_positions
        )
        batch.seq_lens = (batch.positions[batch.logit_indices] + 1).int()
        indices = sent[wanted_indices].long()
        batch.logit_indices = batch.logit_indices[indices]
        batch.last = last_tokens(batch, indices, [spans[index] for index in wanted])
        return batch


def draft_further(
    model: CausalLM,
    kv: KVStore,
    plan: Plan,
    passes: list[Tensor],
    batch_slots: BatchSlots,
    num_done: int = 0,
) -> None:
    """Draft with the model that has computed all tokens before the last. `num_done` drafts of each
    slot exist already."""
    max_len = max(item.max_kv_len for item in plan.items)
    for index, slots in enumerate(passes[num_done:], num_done):
        lengths = batch_slots.computed[slots.long()] + 1 + index
        ids = batch_slots.tokens[slots.long(), lengths.long() - 1]
        batch = one_token_each(slots, lengths, ids, batch_slots, kv.block_size, max_len)
        _, logits = model.forward_with_logits(batch, kv.view)
        choose(ForwardResult(slots, logits, lengths), batch_slots, model.ops)
