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
    return sys.maxsize if cache.eviction == "none" else cache.budget


def check_eviction(cache: CacheConfig, max_model_len: int) -> None:
    """Raise InvalidRequest unless the budget is of use."""
    size, sinks = cache.block_size, cache.sinks
    if cache.eviction not in POLICIES:
        raise InvalidRequest(
            f"kv_eviction is {', '.join(POLICIES)}, not {cache.eviction!r}", "kv_eviction"
        )
    if cache.eviction == "none":
        return
    least = (sinks + 2) * size
    if not least <= cache.budget <= max_model_len or cache.budget % size:
        raise InvalidRequest(
            f"kv_budget {cache.budget} cannot be kept: use a multiple of the block size {size}, from {least} ({sinks} blocks of "
            f"sinks and two more) to max_model_len ({max_model_len})",
            "kv_budget",
        )


def pick(seq: Sequence, cache: CacheConfig) -> int:
    """The logical block that leaves. Called when the cache is full: `budget` positions."""
    blocks, sinks = cache.budget // cache.block_size, cache.sinks
    if cache.eviction == "sinks" or not seq.mass:
        return sinks
    middle = range(sinks, max(sinks + 1, blocks - max(blocks // 2, 1)))
    # the oldest of equals
    return min(middle, key=lambda j: seq.mass[j] if j < len(seq.mass) else 1.0)


def looks(seq: Sequence, at: int, cache: CacheConfig) -> bool:
    """Whether position `at` of a sequence is one whose attention counts: for those who will outgrow their budget."""
    return (
        at >= seq.prompt_len
        and seq.limit > cache.budget
        and (at + 1) % max(cache.block_size // LOOKS, 1) == 0
    )


def weigh(seq: Sequence, found: list[float]) -> None:
    """A look at how attention is spread."""
    seq.mass = [DECAY * before + now for before, now in zip_longest(seq.mass, found, fillvalue=0.0)]


def drop(seq: Sequence, j: int, size: int) -> None:
    """Logical block j leaves the tokens. Limit and prompt_len move with the positions; the content chain was another text's."""
    first = j * size
    seq.dropped_prompt += min(max(seq.prompt_kept - first, 0), size)
    seq.dropped += size
    del seq.tokens[first : first + size]
    del seq.mass[j : j + 1]
    seq.limit, seq.prompt_len = seq.limit - size, seq.prompt_len - size
    seq.hashes = []
