"""Detects that a text ends with the same pattern of tokens several times in a row."""

from __future__ import annotations

from array import array

from octavo.params import RepetitionDetectionParams
from octavo.types import Sequence

REPETITION_DETECTED = "repetition_detected"  # vLLM's stop_reason


def is_repeating(seq: Sequence) -> bool:
    """Return whether a sequence repeats itself, by the rule of its request
    (repetition_detection)."""
    if seq.repetition is None or seq.num_generated < seq.params.min_tokens:
        return False
    # Bounded KV drops tokens from the middle: the last ones are still contiguous.
    num_generated = len(seq.tokens) - seq.kept_prompt_tokens
    return repeats(seq.tokens, num_generated, seq.repetition)


def repeats(tokens: array[int], num_generated: int, params: RepetitionDetectionParams) -> bool:
    """Return whether the last tokens repeat, considering the last `num_generated` of them.

    A text of period p has the same token p places before its last one. Only these places are
    examined, and most texts have few of them. The search runs over the bytes of the array, which is
    ten times as fast as comparing Python integers."""
    longest = min(params.max_pattern_size, num_generated // params.min_count)
    shortest = max(params.min_pattern_size, 1)
    if longest < shortest:
        return False
    token_bytes = tokens.itemsize
    recent = tokens[-1 - longest :].tobytes()
    last_token = recent[-token_bytes:]
    search_end = (longest + 1 - shortest) * token_bytes
    start = recent.find(last_token, 0, search_end)
    while start >= 0:
        period = longest - start // token_bytes
        if start % token_bytes == 0 and _is_periodic(tokens, period, params.min_count):
            return True
        start = recent.find(last_token, start + 1, search_end)
    return False


def _is_periodic(tokens: array[int], period: int, count: int) -> bool:
    """Return whether the last tokens are `count` times the same `period` tokens."""
    if tokens[-1 - period * (count - 1)] != tokens[-1]:
        return False
    tail = tokens[-period * count :]
    return tail[period:] == tail[:-period]
