"""Whether a text repeats itself: its last tokens are one pattern, several times in a row."""

from __future__ import annotations

from array import array

from octavo.params import RepetitionDetectionParams

STOP_REASON = "repetition_detected"  # vLLM's


def repeats(tokens: array[int], generated: int, params: RepetitionDetectionParams) -> bool:
    """Whether the last of `tokens`, of which so many were generated, repeat. Depends on the tokens alone.

    A text of period p has the same token p places before its last one. Only such places are looked at, and most texts have
    few of them. They are found in the tokens' bytes, which is ten times as fast as to compare Python's integers.
    """
    longest = min(params.max_pattern_size, generated // params.min_count)
    shortest = max(params.min_pattern_size, 1)
    if longest < shortest:
        return False
    size = tokens.itemsize
    recent = tokens[-1 - longest :].tobytes()
    last = recent[-size:]
    end = (longest + 1 - shortest) * size  # where the latest place that counts ends
    start = recent.find(last, 0, end)
    while start >= 0:
        if start % size == 0 and _is_periodic(tokens, longest - start // size, params.min_count):
            return True
        start = recent.find(last, start + 1, end)
    return False


def _is_periodic(tokens: array[int], period: int, count: int) -> bool:
    """Whether the last tokens are `count` times the same `period` tokens."""
    if tokens[-1 - period * (count - 1)] != tokens[-1]:
        return False
    tail = tokens[-period * count :]
    return tail[period:] == tail[:-period]
