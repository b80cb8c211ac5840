"""Bounded KV: which block leaves a sequence's full cache, and what that changes of what the host knows. No tensors, no pool.

    sinks    the first blocks stay, and the latest: the oldest behind the sinks leaves
    heavy    likewise, but of those between the sinks and the latest half the one leaves that was attended to least

A token's position is its place in the cache: what stands behind a block that leaves moves up by a block.

    text     a b c d | e f g h | i j k l | m        limit 20, dropped 0
    cache    a b c d | i j k l | m                  limit 16, dropped 4
"""

from __future__ import annotations

import sys
from itertools import zip_longest

from octavo.config import CacheConfig
from octavo.errors import InvalidRequest
from octavo.types import Sequence

POLICIES = ("none", "sinks", "heavy")
# how often attention is looked at in a block's time: a look may cost a pass over the keys in
# float32
LOOKS = 4
DECAY = 0.9  # what a look counts for at the next one


def most_positions(cache: CacheConfig) -> int:
    """Positions that one sequence keeps; where nothing leaves, more than there will ever be."""
    return sys.maxsize if cache.kv_eviction == "none" else cache.kv_budget


def check_eviction(cache: CacheConfig, max_model_len: int) -> None:
    """Raise InvalidRequest unless the budget is of use."""
    size, sinks = cache.block_size, cache.kv_sinks
    if cache.kv_eviction not in POLICIES:
        raise InvalidRequest(
            f"kv_eviction is {', '.join(POLICIES)}, not {cache.kv_eviction!r}", "kv_eviction"
        )
    if cache.kv_eviction == "none":
        return
    least = (sinks + 2) * size
    if not least <= cache.kv_budget <= max_model_len or cache.kv_budget % size:
        raise InvalidRequest(
            f"kv_budget {cache.kv_budget} cannot be kept: use a multiple of the block size {size}, from {least} ({sinks} blocks of "
            f"sinks and two more) to max_model_len ({max_model_len})",
            "kv_budget",
        )


def pick(seq: Sequence, cache: CacheConfig) -> int:
    """The logical block that leaves. Called when the cache is full: `budget` positions."""
    blocks, sinks = cache.kv_budget // cache.block_size, cache.kv_sinks
    if cache.kv_eviction == "sinks" or not seq.attention_mass:
        return sinks
    middle = range(sinks, max(sinks + 1, blocks - max(blocks // 2, 1)))
    # the oldest of equals
    return min(middle, key=lambda j: seq.attention_mass[j] if j < len(seq.attention_mass) else 1.0)


def looks(seq: Sequence, at: int, cache: CacheConfig) -> bool:
    """Whether position `at` of a sequence is one whose attention counts: for those who will outgrow their budget."""
    return (
        at + seq.dropped_tokens >= seq.prompt_len
        and seq.position_limit > cache.kv_budget
        and (at + 1) % max(cache.block_size // LOOKS, 1) == 0
    )


def weigh(seq: Sequence, found: list[float]) -> None:
    """A look at how attention is spread."""
    seq.attention_mass = [
        DECAY * before + now
        for before, now in zip_longest(seq.attention_mass, found, fillvalue=0.0)
    ]


def drop(seq: Sequence, j: int, size: int) -> None:
    """Logical block j leaves the tokens. Limit and prompt_len move with the positions; the content chain was another text's."""
    first = j * size
    seq.dropped_prompt_tokens += min(max(seq.kept_prompt_tokens - first, 0), size)
    seq.dropped_tokens += size
    del seq.tokens[first : first + size]
    del seq.attention_mass[j : j + 1]
    seq.position_limit -= size
    seq.block_hashes = []
