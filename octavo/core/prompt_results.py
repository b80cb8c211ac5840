"""Collects the results of the positions of a prompt, chunk by chunk: logprobs, and hidden states if
the request asks for them (Request.pooling)."""

from __future__ import annotations

import operator
from array import array

from octavo.types import Item, Output, Sequence, TokenLogprobs


def store_prompt_logprobs(seq: Sequence, item: Item, logprobs: list[TokenLogprobs]) -> None:
    """Store the logprobs of a chunk. The logprobs of a position belong to the token after it."""
    assert item.start is not None and seq.prompt_logprobs is not None
    for position, entry in enumerate(logprobs, item.start + 1):
        if position < seq.prompt_len:
            seq.prompt_logprobs[position] = entry


def add_states(seq: Sequence, item: Item, states: array[float]) -> bool:
    """Add the states of a chunk. Returns False if one of them is not a finite number.

    The states of a first chunk replace the states from before a preemption."""
    if any(value - value != 0 for value in states):
        return False
    if not item.start or item.pooling == "last":
        seq.pooled = states
    elif item.pooling == "mean":
        seq.pooled = array("f", map(operator.add, seq.pooled, states))
    else:
        seq.pooled.extend(states)
    return True


def pooled_output(seq: Sequence) -> Output:
    """Return the only output of a sequence whose prompt is computed."""
    return Output(
        request_id=seq.request.id,
        index=seq.index,
        tokens=[],
        finish_reason="stop",
        cached_tokens=seq.cached_tokens,
        pooled=seq.pooled.tobytes(),
    )
