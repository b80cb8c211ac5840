"""The block pool: reference counts, an LRU of reusable blocks and an index of block contents.

It works on blocks and hashes, not on sequences. Every block is in exactly one state:

    used     it has references                      ref_counts > 0
    cached   it has none, and its content is known  ref_counts == 0, hash set   } available
    free     it has none, and nothing to reuse      ref_counts == 0, no hash    }

A block table holds one reference to each of its blocks. A promotion from disk holds one until its
step has ended, and a withheld block has one (live_settings.py).

allocate() takes blocks from the front of available_blocks: first the free blocks, starting with the
one that was released last, then the cached blocks, starting with the least recently used one. No
sequence uses block 0: padding in a batch writes to it. Cached blocks may belong to a tenant
(cache_quota.py).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from octavo.core.cache_quota import CacheQuota
from octavo.events import BlockEvicted, BlockPublished, CacheCleared, EventBus


def chain_hash(parent: bytes, tokens: array[int]) -> bytes:
    """Hash a full block: its tokens and, through the parent's hash, everything before them."""
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()


def root_hash(salt: str) -> bytes:
    """Return the parent of a sequence's first block. Different salts never share blocks."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""


class FullBlock(NamedTuple):
    """A full device block and its content."""

    block: int
    hash: bytes  # hash of the tokens and of all tokens before them
    tokens: array[int]
    parent: bytes  # hash of the previous block; b"" for the first block


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, events: EventBus | None = None):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.events = events or EventBus()
        # The lists below are indexed by block.
        self.ref_counts = [0] * (num_blocks + 1)
        self.hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self.block_tokens: list[array[int] | None] = [None] * (num_blocks + 1)  # compared on a hit
        self.parent_hashes = [b""] * (num_blocks + 1)
        self.tenants = [""] * (num_blocks + 1)  # the publisher's tenant; "": no tenant
        self.available_blocks = OrderedDict[int, None].fromkeys(range(1, num_blocks + 1))
        self.hash_index: dict[bytes, int] = {}
        self.quota = CacheQuota()
        self.evictions = 0  # by allocate(); other contents leave the index by invalidate()
        # Contents removed by unpublish() in the current plan. PrefixCache.demote() stores them and
        # clears the list.
        self.unpublished_blocks: list[FullBlock] = []
        self.withheld: list[int] = []  # blocks out of use, because live_settings.py set a limit

    @property
    def num_available(self) -> int:
        return len(self.available_blocks)

    @property
    def num_cached(self) -> int:
        return sum(self.ref_counts[block] == 0 for block in self.hash_index.values())

    def allocate(self) -> int:
        """Return a block to write to. If no block is free, a cached block loses its content."""
        block, _ = self.available_blocks.popitem(last=False)
        if self.tenants[block] and self.hashes[block] is not None:
            block = self._apply_quota(block)
        if self.hashes[block] is not None:
            self.evictions += 1
        self.unpublish(block)
        self.ref_counts[block] = 1
        return block

    def unpublish(self, block: int) -> None:
        """Remove from the index a block that is about to be overwritten. Its content is valid, so
        PrefixCache.demote() may keep it in a lower tier."""
        content_hash = self.hashes[block]
        if content_hash is not None and (full_block := self.full_block(content_hash)):
            self.unpublished_blocks.append(full_block)
        self.invalidate(block)

    def invalidate(self, block: int) -> None:
        """Remove a block from the index without offering its content to a lower tier."""
        content_hash = self.hashes[block]
        if content_hash is not None:
            self.hashes[block] = None
            self.block_tokens[block] = None
            del self.hash_index[content_hash]
            if BlockEvicted in self.events.listeners:
                self.events.emit(BlockEvicted(block, content_hash))

    def _apply_quota(self, oldest: int) -> int:
        """Return the cached block to evict: the oldest, unless its tenant is within its quota."""
        tenant, evicted = self.quota.pick_evicted(self.tenants[oldest], oldest)
        self.quota.remove(tenant, evicted)
        if evicted != oldest:
            self.available_blocks[oldest] = None
            self.available_blocks.move_to_end(oldest, last=False)
            self.available_blocks.pop(evicted)
        return evicted

    def acquire(self, block: int) -> int:
        """Add a reference to a block that is used or cached."""
        if self.ref_counts[block] == 0:
            del self.available_blocks[block]
            if self.tenants[block]:
                self.quota.remove(self.tenants[block], block)
        self.ref_counts[block] += 1
        return block

    def release(self, block: int) -> None:
        """Remove a reference. A block without content is the next to be reused."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.available_blocks[block] = None
            if self.hashes[block] is None:
                self.available_blocks.move_to_end(block, last=False)
            elif self.tenants[block]:
                self.quota.add(self.tenants[block], block)

    def publish(self, full_block: FullBlock, tenant: str = "") -> None:
        """Enter a full, committed block into the index. If another block already has this content,
        the block is not indexed and will be empty after its release."""
        block = full_block.block
        if full_block.hash not in self.hash_index and self.hashes[block] is None:
            self.hash_index[full_block.hash] = block
            self.hashes[block] = full_block.hash
            self.block_tokens[block] = full_block.tokens
            self.parent_hashes[block] = full_block.parent
            self.tenants[block] = tenant
            if BlockPublished in self.events.listeners:
                self.events.emit(
                    BlockPublished(block, full_block.hash, full_block.parent, full_block.tokens)
                )

    def find(self, content_hash: bytes, tokens: array[int]) -> int | None:
        """Return the block with this content. A hash collision is a miss, because the tokens are
        compared."""
        block = self.hash_index.get(content_hash)
        if block is None or self.block_tokens[block] != tokens:
            return None
        return block

    def match(self, hashes: list[bytes], tokens: array[int]) -> list[int]:
        """Return the blocks of the longest prefix of `tokens` that is in the index. `hashes` is the
        hash chain of `tokens`."""
        blocks: list[int] = []
        for index, content_hash in enumerate(hashes):
            start = index * self.block_size
            block = self.find(content_hash, tokens[start : start + self.block_size])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def full_block(self, content_hash: bytes) -> FullBlock | None:
        """Return the published block with this hash."""
        block = self.hash_index.get(content_hash)
        if block is None:
            return None
        tokens = self.block_tokens[block]
        assert tokens is not None
        return FullBlock(block, content_hash, tokens, self.parent_hashes[block])

    def clear(self) -> None:
        """Remove all contents from the index. Sequences keep the blocks that they hold."""
        for block in self.hash_index.values():
            self.hashes[block] = None
            self.block_tokens[block] = None
        self.hash_index.clear()
        self.quota.clear()
        if CacheCleared in self.events.listeners:
            self.events.emit(CacheCleared())

    def check(self, block_tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless references and index agree with the tables."""
        expected = [0] * (self.num_blocks + 1)
        for block_table in [self.withheld, *block_tables]:
            for block in block_table:
                expected[block] += 1
        assert expected == self.ref_counts, "reference counts disagree with the block tables"
        assert expected[0] == 0, "the padding block is in a block table"
        unused = {block for block in range(1, self.num_blocks + 1) if not self.ref_counts[block]}
        assert set(self.available_blocks) == unused, "available_blocks is wrong"
        assert all(
            self.hashes[block] == content_hash for content_hash, block in self.hash_index.items()
        ), "the index names a block with another content"
        num_hashed = sum(content_hash is not None for content_hash in self.hashes)
        assert num_hashed == len(self.hash_index), "a hashed block is not in the index"
        assert all(
            (content_hash is None) == (tokens is None)
            for content_hash, tokens in zip(self.hashes, self.block_tokens, strict=True)
        )
        cached: dict[str, set[int]] = {}
        for block in self.available_blocks:
            if self.hashes[block] is not None and self.tenants[block]:
                cached.setdefault(self.tenants[block], set()).add(block)
        self.quota.check(cached)
