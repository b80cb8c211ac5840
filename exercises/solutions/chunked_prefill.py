"""A solution of exercises/chunked_prefill.py."""

from __future__ import annotations


def chunks_of(prompt: int, decoding: int, budget: int) -> list[int]:
    chunks = []
    while prompt:
        chunks.append(min(prompt, budget - decoding))
        prompt -= chunks[-1]
    return chunks
