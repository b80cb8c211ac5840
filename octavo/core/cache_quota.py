"""Whose the cached blocks are, so that nobody's flood empties the others' cache. Knows owners and blocks, no contents.

When a block must give way it is the oldest of all, unless its owner has no more than a fair share of what is cached: then
the oldest block of whoever has the most goes instead. So who keeps to the share loses nothing to others. Constant time:

    blocks   owner -> its cached blocks, oldest first
    having   how many -> owners that have so many; `most` is the highest, and moves by one at a time, as the counts do
"""

from __future__ import annotations

from collections import OrderedDict


class CacheQuota:
    def __init__(self) -> None:
        self.blocks: dict[str, OrderedDict[int, None]] = {}
        self.having: dict[int, dict[str, None]] = {}
        self.most = self.total = 0

    def add(self, owner: str, block: int) -> None:
        mine = self.blocks.setdefault(owner, OrderedDict())
        mine[block] = None
        self._moved(owner, len(mine) - 1, len(mine))

    def remove(self, owner: str, block: int) -> None:
        mine = self.blocks[owner]
        del mine[block]
        self._moved(owner, len(mine) + 1, len(mine))
        if not mine:
            del self.blocks[owner]

    def victim(self, owner: str, oldest: int) -> tuple[str, int]:
        """Who gives way and which block, where the oldest of all is this owner's."""
        if (
            len(self.blocks[owner]) * len(self.blocks) <= self.total
            and self.most * len(self.blocks) > self.total
        ):
            owner = next(iter(self.having[self.most]))
            oldest = next(iter(self.blocks[owner]))
        return owner, oldest

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def _moved(self, owner: str, old: int, new: int) -> None:
        self.total += new - old
        if new:
            self.having.setdefault(new, {})[owner] = None
        if old:
            del self.having[old][owner]
            if not self.having[old]:
                del self.having[old]
        if new > self.most or self.most not in self.having:
            self.most = new

    def check(self, blocks: dict[str, set[int]]) -> None:
        """Raise AssertionError unless these are the cached blocks of each owner."""
        assert {owner: set(mine) for owner, mine in self.blocks.items()} == blocks, (
            "a cached block is not its owner's"
        )
        counts = {owner: len(mine) for owner, mine in blocks.items()}
        assert {o: n for n, owners in self.having.items() for o in owners} == counts, (
            "an owner is counted wrongly"
        )
        assert self.total == sum(counts.values()) and self.most == max(
            counts.values(), default=0
        ), "the most is not the most"
