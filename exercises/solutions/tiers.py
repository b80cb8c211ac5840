"""A solution of exercises/tiers.py."""

from __future__ import annotations


class EvictionOrder:
    def __init__(self) -> None:
        self.blocks: dict[int, None] = {}  # a dict keeps the order of insertion

    def release(self, block: int) -> None:
        self.blocks[block] = None

    def reuse(self, block: int) -> None:
        del self.blocks[block]

    def evict(self) -> int:
        block = next(iter(self.blocks))
        del self.blocks[block]
        return block
