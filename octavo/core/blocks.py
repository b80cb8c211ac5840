"""The block pool: reference counts, an LRU of reusable blocks, and an index of their contents.

Knows blocks and hashes, not sequences. Every block is in exactly one state:

    used     some table holds it                    refs > 0
    cached   nobody holds it, its content is known  refs == 0, hash set      } both wait in `free`, oldest first,
    free     nobody holds it, nothing to reuse      refs == 0, no hash       } so a cached block is taken last

Block 0 belongs to nobody: padding in a batch writes there. Cached blocks may have an owner: cache_quota.py says whose goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from octavo.core.cache_quota import CacheQuota


def chain(parent: bytes, tokens: array[int]) -> bytes:
    """Hash of a full block: of its tokens and, through the parent's hash, of everything before them."""
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()


def root(salt: str) -> bytes:
    """The parent of a sequence's first block: sequences of different salts share nothing."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""


class Content(NamedTuple):
    """What is known of a block that others can find."""

    block: int
    hash: bytes
    tokens: array[int]
    parent: bytes


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.size = num_blocks, block_size
        self.refs = [0] * (num_blocks + 1)
        self.hash: list[bytes | None] = [None] * (num_blocks + 1)
        # content of hashed blocks, compared on a hit
        self.tokens: list[array[int] | None] = [None] * (num_blocks + 1)
        self.parent = [b""] * (num_blocks + 1)  # hash of the block before it
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.index: dict[bytes, int] = {}
        self.owner = [""] * (num_blocks + 1)  # who published it; "": nobody in particular
        self.shares = CacheQuota()  # of owners in particular
        self.evictions = 0
        self.evicted: list[Content] = []  # since somebody last cleared it

    @property
    def num_cached(self) -> int:
        return sum(self.refs[b] == 0 for b in self.index.values())

    def take(self) -> int:
        """A block to write to. Forgets the least recently used cached content if nothing else is left."""
        block, _ = self.free.popitem(last=False)
        if self.owner[block] and self.hash[block] is not None:
            block = self._instead_of(block)
        self.evictions += self.hash[block] is not None
        self.withdraw(block)
        self.refs[block] = 1
        return block

    def withdraw(self, block: int) -> None:
        """It is about to be overwritten: what it holds can no longer be found."""
        if (h := self.hash[block]) is not None and (content := self.content(h)):
            self.evicted.append(content)
        self.disown(block)

    def disown(self, block: int) -> None:
        """What it holds can no longer be found, and goes nowhere else."""
        if (h := self.hash[block]) is not None:
            self.hash[block] = self.tokens[block] = None
            del self.index[h]

    def _instead_of(self, oldest: int) -> int:
        """The block that gives way, which is the oldest one if its owner has more than a fair share."""
        owner, block = self.shares.victim(self.owner[oldest], oldest)
        self.shares.remove(owner, block)
        if block != oldest:
            self.free[oldest] = None
            self.free.move_to_end(oldest, last=False)
            self.free.pop(block)
        return block

    def share(self, block: int) -> int:
        if self.refs[block] == 0:
            del self.free[block]
            if self.owner[block]:
                self.shares.remove(self.owner[block], block)
        self.refs[block] += 1
        return block

    def drop(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free[block] = None
            if self.hash[block] is None:  # nothing to reuse: the next to be taken
                self.free.move_to_end(block, last=False)
            elif self.owner[block]:
                self.shares.add(self.owner[block], block)

    def publish(
        self, block: int, h: bytes, tokens: array[int], parent: bytes = b"", owner: str = ""
    ) -> None:
        """The content of a full, committed block becomes findable. Nobody writes to the block from now on."""
        if h not in self.index and self.hash[block] is None:
            self.index[h] = block
            self.hash[block], self.tokens[block], self.parent[block], self.owner[block] = (
                h,
                tokens,
                parent,
                owner,
            )

    def find(self, h: bytes, tokens: array[int]) -> int:
        """The block of this content, 0 if there is none. Tokens are compared: a colliding hash is a miss, never wrong KV."""
        block = self.index.get(h, 0)
        return block if block and self.tokens[block] == tokens else 0

    def match(self, hashes: list[bytes], tokens: array[int]) -> list[int]:
        """Blocks of the longest known prefix."""
        hit: list[int] = []
        for j, h in enumerate(hashes):
            if not (block := self.find(h, tokens[j * self.size : (j + 1) * self.size])):
                break
            hit.append(block)
        return hit

    def content(self, h: bytes) -> Content | None:
        if block := self.index.get(h, 0):
            tokens = self.tokens[block]
            assert tokens is not None
            return Content(block, h, tokens, self.parent[block])
        return None

    def forget(self) -> None:
        """Empty the cache: no content is findable any more, whoever holds a block keeps it."""
        for block in self.index.values():
            self.hash[block] = self.tokens[block] = None
        self.index.clear()
        self.shares.clear()

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless references, free list and index agree with the tables."""
        want = [0] * (self.num_blocks + 1)
        for table in tables:
            for block in table:
                want[block] += 1
        assert want == self.refs, "reference counts disagree with the tables"
        assert want[0] == 0, "the padding block is in a table"
        assert set(self.free) == {b for b in range(1, self.num_blocks + 1) if self.refs[b] == 0}, (
            "free list is wrong"
        )
        assert all(self.hash[b] == h for h, b in self.index.items()), (
            "index names a block of another content"
        )
        assert sum(h is not None for h in self.hash) == len(self.index), (
            "a hashed block is not in the index"
        )
        assert all((h is None) == (t is None) for h, t in zip(self.hash, self.tokens, strict=True))
        owned: dict[str, set[int]] = {}
        for block in self.free:
            if self.hash[block] is not None and self.owner[block]:
                owned.setdefault(self.owner[block], set()).add(block)
        self.shares.check(owned)
