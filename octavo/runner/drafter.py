"""Drafters on the device guess the next tokens of sequences, with one forward pass for each draft.

    EarlyExit    the first layers of the target, with the target's KV cache
    DraftModel   another model with the same vocabulary, with a KV cache of its own
    HeadDrafter  a trained draft head, with a KV cache of its own (head_drafter.py)

The runner calls draft() before the target's forward pass in a step that verifies drafts, and
observe() after the target's forward pass in every step. Both use the device alone, so that a CUDA
graph can contain them. The KV cache of a drafter uses the block tables of the target, so the
scheduler need not manage it. Its content may be missing or stale, such as after a load from the
host tier. Drafts are then worse, and the tokens stay the same.

Drafts are sampled with the same noise as the tokens of the target, so that both are mostly equal
where the distributions agree. Drafts are behind the known tokens of a slot until the step has
verified them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch
from octavo.runner.batch import ForwardResult, one_token_each
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.kvstore import KVStore
from octavo.runner.sampler import choose


class Observed(NamedTuple):
    """The target's forward pass of one step. The slots hold the sampled tokens already."""

    batch: ForwardBatch
    # [T, hidden] The states of all tokens if the drafter needs them, and otherwise of some tokens.
    hidden: Tensor


class Drafter(Protocol):
    @property
    def kv(self) -> KVStore | None:
        """The drafter's KV cache, or None if it has none of its own."""
        ...

    @property
    def needs_hidden(self) -> bool:
        """True if observe() needs the hidden states of all tokens."""
        ...

    def observe(self, step: Observed, batch_slots: BatchSlots) -> None:
        """Compute the drafter's own KV of the tokens of a step (draft extend)."""
        ...

    def draft(self, passes: Sequence[Tensor], max_len: int, batch_slots: BatchSlots) -> None:
        """Write drafts behind the known tokens of batch slots.

        `passes` has for each pass the slots [S] (int32) that get one more draft. Other slots may
        have no room for it. The position of a draft is at most `max_len`.
        """
        ...


class EarlyExit:
    kv = None
    needs_hidden = False

    def __init__(self, model: CausalLM, target_kv: KVStore):
        """Create the drafter. `model` has the first layers of the target.

        It writes the KV that the target writes again when it verifies the drafts.
        """
        self.model = model
        self.target_kv = target_kv

    def observe(self, step: Observed, batch_slots: BatchSlots) -> None:
        """Do nothing: the target has written the KV."""

    def draft(self, passes: Sequence[Tensor], max_len: int, batch_slots: BatchSlots) -> None:
        draft_with_model(self.model, self.target_kv, passes, max_len, batch_slots)


class DraftModel:
    needs_hidden = False

    def __init__(self, model: CausalLM, kv: KVStore):
        self.model = model
        self.kv = kv

    def observe(self, step: Observed, batch_slots: BatchSlots) -> None:
        """Compute the KV of the step's tokens, including the last draft, which no pass has read."""
        batch = step.batch
        last = None if batch.last is None else replace(batch.last, scratch={})
        own_batch = replace(batch, last=last, watched=None, aux_hidden_states=None, scratch={})
        self.model(own_batch, self.kv.view)

    def draft(self, passes: Sequence[Tensor], max_len: int, batch_slots: BatchSlots) -> None:
        draft_with_model(self.model, self.kv, passes, max_len, batch_slots)


def draft_with_model(
    model: CausalLM,
    kv: KVStore,
    passes: Sequence[Tensor],
    max_len: int,
    batch_slots: BatchSlots,
) -> None:
    """Draft with a model that has computed all tokens before the last one."""
    for index, slots in enumerate(passes):
        lengths = batch_slots.computed[slots.long()] + 1 + index
        ids = batch_slots.tokens[slots.long(), lengths.long() - 1]
        batch = one_token_each(slots, lengths, ids, batch_slots, kv.block_size, max_len)
        _, logits = model.forward_with_logits(batch, kv.view)
        choose(ForwardResult(slots, logits, lengths), batch_slots, model.ops)
