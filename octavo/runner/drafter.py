"""Drafts that the device makes: the first layers of the model guess the next tokens, one forward
pass each (early exit).

They share the KV cache of the model: what they write is what the model writes again when it
verifies the drafts. They draw with the noise that the model draws with, so that both mostly draw
the same token where their distributions agree. Drafts lie behind the known tokens of a slot until
the step has verified them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch, Span
from octavo.ops.kv import KV
from octavo.runner.batch import ForwardResult
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.sampler import choose


class EarlyExit:
    def __init__(self, model: CausalLM, kv: KV, block_size: int):
        """`model` has the first layers of the target, and `kv` is the target's."""
        self.model = model
        self.kv = kv
        self.block_size = block_size

    def draft(self, slots: list[Tensor], state: BatchSlots, max_len: int) -> None:
        """Write guesses behind the known tokens of batch slots. `slots` lists for each pass the
        slots [S] (int32) that get one more guess. `max_len` bounds the lengths afterwards."""
        for index, pass_slots in enumerate(slots):
            lengths = state.computed[pass_slots.long()] + 1 + index
            batch = self._last_tokens(pass_slots, lengths, state, max_len)
            _, logits = self.model.forward_with_logits(batch, self.kv)
            choose(ForwardResult(pass_slots, logits, lengths), state, self.model.ops)

    def _last_tokens(
        self, slots: Tensor, lengths: Tensor, state: BatchSlots, max_len: int
    ) -> ForwardBatch:
        """Return the last token of each slot as a batch that decodes."""
        positions = (lengths - 1).long()
        rows = slots.long()
        blocks = state.block_table[rows, positions // self.block_size].long()
        starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        return ForwardBatch(
            ids=state.tokens[rows, positions].long().clamp_(min=0),
            positions=positions,
            kv_indices=blocks * self.block_size + positions % self.block_size,
            query_start=starts,
            seq_lens=lengths,
            block_table=state.block_table,
            slots=slots,
            logit_indices=starts[:-1].long(),
            spans=[Span(index, 1, max_len) for index in range(len(slots))],
        )
