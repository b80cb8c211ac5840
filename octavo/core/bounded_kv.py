"""Bounded KV: chooses the block that a sequence drops when its KV has reached its budget.

It works on one sequence, without tensors and without the pool.

    sinks    the first blocks and the latest stay; the oldest block behind the sinks is dropped
             (StreamingLLM)
    heavy    of the blocks between the sinks and the latest half, the block that received the least
             attention is dropped (H2O)

A token's position is its place in the cache: tokens behind a dropped block move up by one block.

    text     a b c d | e f g h | i j k l | m        token_limit 20, dropped_tokens 0
    cache    a b c d | i j k l | m                  token_limit 16, dropped_tokens 4
"""

from __future__ import annotations

import sys
from itertools import zip_longest

from octavo.config import CacheConfig
from octavo.errors import InvalidRequest
from octavo.types import Sequence

KV_EVICTIONS = ("none", "sinks", "heavy")
# Attention samples per block. Each sample may need a pass over the keys in float32.
SAMPLES_PER_BLOCK = 4
MASS_DECAY = 0.9  # weight of the previous samples when a new one is added


def max_kv_positions(cache: CacheConfig) -> int:
    """Return how many positions one sequence may keep. Without a budget there is no bound."""
    return sys.maxsize if cache.kv_eviction == "none" else cache.kv_budget


def check_kv_eviction(cache: CacheConfig, max_model_len: int) -> None:
    """Raise InvalidRequest unless the eviction policy exists and the budget can be kept."""
    block_size = cache.block_size
    if cache.kv_eviction not in KV_EVICTIONS:
        raise InvalidRequest(
            f"kv_eviction must be one of {', '.join(KV_EVICTIONS)}, got {cache.kv_eviction!r}",
            "kv_eviction",
        )
    if cache.kv_eviction == "none":
        return
    smallest = (cache.kv_sinks + 2) * block_size
    in_range = smallest <= cache.kv_budget <= max_model_len
    if not in_range or cache.kv_budget % block_size:
        raise InvalidRequest(
            f"kv_budget is {cache.kv_budget}, but must be a multiple of the block size "
            f"{block_size}, from {smallest} ({cache.kv_sinks} blocks of sinks and two more) to "
            f"max_model_len ({max_model_len})",
            "kv_budget",
        )


def pick_block(seq: Sequence, cache: CacheConfig) -> int:
    """Return the logical block to drop. The sequence holds `kv_budget` positions."""
    num_blocks = cache.kv_budget // cache.block_size
    sinks = cache.kv_sinks
    mass = seq.attention_mass
    if cache.kv_eviction == "sinks" or not mass:
        return sinks
    candidates = range(sinks, max(sinks + 1, num_blocks - max(num_blocks // 2, 1)))
    # min() returns the oldest of several equal blocks.
    return min(candidates, key=lambda block: mass[block] if block < len(mass) else 1.0)


def samples_attention(seq: Sequence, position: int, cache: CacheConfig) -> bool:
    """Return whether the attention of a generated token is measured: SAMPLES_PER_BLOCK times per
    block, if the sequence will outgrow its budget."""
    return (
        position + seq.dropped_tokens >= seq.prompt_len
        and seq.token_limit > cache.kv_budget
        and (position + 1) % max(cache.block_size // SAMPLES_PER_BLOCK, 1) == 0
    )


def add_attention_sample(seq: Sequence, sample: list[float]) -> None:
    """Add a sample of attention per block to the sequence's running sums."""
    seq.attention_mass = [
        MASS_DECAY * previous + current
        for previous, current in zip_longest(seq.attention_mass, sample, fillvalue=0.0)
    ]


def drop_block_tokens(seq: Sequence, block: int, block_size: int) -> None:
    """Remove a logical block's tokens. The hash chain belongs to the old text and is cleared."""
    start = block * block_size
    seq.dropped_prompt_tokens += min(max(seq.kept_prompt_tokens - start, 0), block_size)
    seq.dropped_tokens += block_size
    del seq.tokens[start : start + block_size]
    del seq.attention_mass[block : block + 1]
    seq.token_limit -= block_size
    seq.block_hashes = []
