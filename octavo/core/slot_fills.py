"""Builds a SlotFill: the description of one sequence that is written to its batch slot.

The scheduler and forks.py decide when a slot is filled, and octavo/runner/batch_slots.py writes it.
"""

from __future__ import annotations

from octavo.core.beam_search import num_candidates
from octavo.types import Sequence, SlotFill


def build_slot_fill(seq: Sequence) -> SlotFill:
    """Return everything that the device must know about a running sequence."""
    params = seq.params
    num_logprobs = params.logprobs
    if params.ranked:
        num_needed = num_candidates(seq) if params.use_beam_search else 0
        num_logprobs = max(num_logprobs or 0, num_needed)
    return SlotFill(
        seq_id=seq.id,
        epoch=seq.epoch,
        slot=seq.slot,
        tokens=seq.tokens[:],
        computed=seq.computed,
        block_table=list(seq.block_table),
        prompt_len=seq.kept_prompt_tokens,
        seed=seq.seed,
        stop_ids=seq.stop_ids,
        params=params,
        num_logprobs=num_logprobs,
        dropped_tokens=seq.dropped_tokens,
        dropped_output_tokens=seq.dropped_tokens - seq.dropped_prompt_tokens,
    )
