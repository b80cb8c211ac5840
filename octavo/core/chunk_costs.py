"""What the next chunk of a prompt takes from a step: tokens of its budget, and blocks of the pool.

The scheduler plans chunks by these costs. UrgentPreemption uses the same costs to decide before the
step which sequences must make room.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.blocks import BlockPool
from octavo.core.prefix import Match
from octavo.core.tables import blocks_to_grow, tokens_to_prefill
from octavo.types import Sequence


class ChunkCost(NamedTuple):
    tokens: int
    blocks: int  # that the sequence takes from the pool
    table_length: int  # blocks in its block table afterwards
    # True: the step has no room for the whole prompt, and prompts are not computed in chunks.
    lacks_tokens: bool


class ChunkCosts:
    def __init__(self, cache: CacheConfig, schedule: ScheduleConfig, pool: BlockPool):
        self.pool = pool
        self.contiguous = cache.contiguous
        self.chunked_prefill = schedule.chunked_prefill

    def of_admission(
        self, seq: Sequence, match: Match, token_budget: int, step_is_empty: bool
    ) -> ChunkCost:
        """Return the cost of the first chunk of a waiting sequence, and of loading its match."""
        num_cached = len(match.blocks) * self.pool.block_size
        num_remaining = tokens_to_prefill(seq, num_cached)
        num_tokens = self._chunk_size(num_remaining, token_budget, step_is_empty)
        # The last token of a reply is sampled but never computed, so it needs no KV.
        num_positions = seq.token_limit - 1 if self.contiguous else num_cached + num_tokens
        table_length = -(-num_positions // self.pool.block_size)
        # A matched block that is in use needs no block from the pool; a cached one does.
        num_in_use = sum(self.pool.ref_counts[block] > 0 for block in match.blocks if block)
        lacks_tokens = num_remaining > 0 and num_tokens == 0
        return ChunkCost(num_tokens, table_length - num_in_use, table_length, lacks_tokens)

    def of_next_chunk(self, seq: Sequence, token_budget: int, step_is_empty: bool) -> ChunkCost:
        """Return the cost of the next chunk of a running sequence. It has no tokens if its prompt
        is computed."""
        num_remaining = tokens_to_prefill(seq, seq.planned)
        num_tokens = self._chunk_size(num_remaining, token_budget, step_is_empty)
        num_blocks = blocks_to_grow(self.pool, seq, num_tokens)
        table_length = -(-(seq.planned + num_tokens) // self.pool.block_size)
        return ChunkCost(num_tokens, num_blocks, table_length, num_remaining > 0 and not num_tokens)

    def _chunk_size(self, num_remaining: int, token_budget: int, step_is_empty: bool) -> int:
        """Return how many of the remaining tokens of a prompt this step computes. Without chunked
        prefill, a prompt waits for a step that has room for all of it. Only a step with nothing
        else computes a part, because a longer prompt would otherwise wait for ever."""
        if num_remaining <= token_budget or self.chunked_prefill or step_is_empty:
            return max(min(num_remaining, token_budget), 0)
        return 0
