"""A solution of exercises/speculation.py."""

from __future__ import annotations


def draft(tokens: list[int], length: int, count: int) -> list[int]:
    last = tokens[-length:]
    for start in range(len(tokens) - length - 1, -1, -1):
        end = start + length
        if tokens[start:end] == last:
            return tokens[end : end + count]
    return []


def kept(drafts: list[int], sampled: list[int]) -> list[int]:
    for place, token in enumerate(drafts):
        if token != sampled[place]:
            return sampled[: place + 1]
    return sampled
