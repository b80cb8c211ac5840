"""A solution of exercises/swap.py."""

from __future__ import annotations


def loading_is_faster(
    block_size: int, load_seconds: float, prefill_tokens: float, prefill_seconds: float
) -> bool:
    if not prefill_tokens:
        return True
    return load_seconds < block_size * prefill_seconds / prefill_tokens
