"""Drafts with a trained draft head (octavo/model/draft_head.py).

The head reads at position i the target's hidden state of position i and token i + 1, and predicts
token i + 2. It has one layer of KV, with the entry of position i at position i.

    observe   Computes all positions of a step with the target's hidden states. The output at the
              last position predicts the first draft, and is stored for each batch slot.
    draft     Chooses the first draft from that output. Every further draft takes one pass of the
              head, with the head's own output in place of the target's hidden state.

A pass of draft() writes KV that was computed from the head's own output. observe() of the same step
overwrites this KV up to the last position of the sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.model.draft_head import DraftHead
from octavo.ops import ForwardBatch
from octavo.runner.batch import ForwardResult, last_tokens, one_token_each
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.drafter import Observed
from octavo.runner.kvstore import KVStore
from octavo.runner.sampler import choose


class HeadDrafter:
    needs_hidden = True

    def __init__(self, head: DraftHead, kv: KVStore, max_slots: int):
        self.head = head
        self.kv = kv
        # [slots, hidden] The output of the head that predicts the next draft of each slot.
        self.outputs = torch.zeros(
            max_slots + 1, head.config.hidden_size, dtype=head.dtype, device=kv.tensor.device
        )
        # The rows of _target_logits(), which always differ in the same columns. A CUDA graph needs
        # them at a fixed address. On a CPU, the number of rows grows when more are needed.
        self._logits = self.outputs[:0]
        if kv.tensor.is_cuda:
            self._reserve_logits(max_slots + 1)

    def observe(self, step: Observed, batch_slots: BatchSlots) -> None:
        batch = step.batch
        is_decode = all(span.num == 1 for span in batch.spans)
        if self.head.fused is not None and is_decode and self.head.fc is None:
            self.head.fused.extend(
                hidden=step.hidden,
                batch=batch,
                memory=batch_slots.memory,
                outputs=self.outputs,
                kv_cache=self.kv.view[:, 0],
            )
            return
        hidden = step.hidden if batch.aux_hidden_states is None else batch.aux_hidden_states
        output = self.head.compute(
            self._following_tokens(batch, batch_slots),
            self.kv.view[:, 0],
            self.head.combine(hidden),
        )
        # A sequence with drafts has several rows. Its last kept row ends where the slot ends.
        is_last = batch.seq_lens == batch_slots.computed[batch.slots.long()]
        targets = torch.where(is_last, batch.slots, batch_slots.padding_slot)
        self.outputs[targets.long()] = output

    def draft(self, passes: Sequence[Tensor], max_len: int, batch_slots: BatchSlots) -> None:
        if self.head.fused is not None:
            counts = Counter(slot for slots in passes for slot in slots.tolist())
            slots = torch.tensor(list(counts), dtype=torch.int32)
            self.head.fused.draft(
                slots=slots,
                counts=list(counts.values()),
                memory=batch_slots.memory,
                outputs=self.outputs,
                kv_cache=self.kv.view[:, 0],
                max_len=max_len,
            )
            return
        for index, slots in enumerate(passes):
            rows = slots.long()
            # The number of positions that the head has computed.
            lengths = batch_slots.computed[rows] + index
            output = self.outputs[rows]
            if index > 0:
                # The ids are the drafts of the previous pass.
                ids = batch_slots.tokens[rows, lengths.long()]
                batch = one_token_each(
                    slots, lengths, ids, batch_slots, self.kv.block_size, max_len
                )
                output = self.head.compute(batch, self.kv.view[:, 0], output)
                self.outputs[rows] = output
            logits = self._target_logits(output)
            choose(ForwardResult(slots, logits, lengths + 1), batch_slots, self.head.ops)

    def _following_tokens(self, batch: ForwardBatch, batch_slots: BatchSlots) -> ForwardBatch:
        """Return the target's batch with the token after each position."""
        slots = batch.slots.long()
        token_slots = slots
        has_one_token_each = all(span.num == 1 for span in batch.spans)
        if not has_one_token_each:
            counts = batch.query_start.diff().long()
            token_slots = slots.repeat_interleave(counts, output_size=len(batch.positions))
        following = replace(
            batch,
            ids=batch_slots.tokens[token_slots, batch.positions + 1].long().clamp_(min=0),
            last=None,
            watched=None,
            aux_hidden_states=None,
            scratch={},
        )
        if not has_one_token_each:
            following.logit_indices = batch.query_start[1:].long() - 1
            items = torch.arange(len(slots), device=slots.device)
            following.last = last_tokens(following, items, batch.spans)
        return following

    def _target_logits(self, output: Tensor) -> Tensor:
        """Return the head's logits over the vocabulary of the target.

        They are -inf for tokens that the head cannot draft. The choice needs ids of the target's
        vocabulary, because its noise depends on them.
        """
        logits = self.head.logits(output)
        num_rows = len(logits)
        if num_rows > len(self._logits):
            self._reserve_logits(num_rows)
        # On a CPU, scatter_ is several times faster than an assignment to indices.
        token_ids = self.head.token_ids.expand(num_rows, -1)
        return self._logits[:num_rows].scatter_(1, token_ids, logits)

    def _reserve_logits(self, num_rows: int) -> None:
        vocab_size = self.head.config.target_vocab_size
        self._logits = self.outputs.new_full((num_rows, vocab_size), -torch.inf)
