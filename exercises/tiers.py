"""Exercise of the lesson tiers: which block is evicted next?

A block without owners stays cached, in the order in which it was last used. Complete the class, and
compare it with the pool of the engine (octavo/core/blocks.py)."""

from __future__ import annotations

import random
from array import array

from octavo.core.blocks import BlockPool, FullBlock


class EvictionOrder:
    """The cached blocks, the next one to be evicted first."""

    def release(self, block: int) -> None:
        """The last owner of a block has released it: it is the most recently used one now."""
        raise NotImplementedError("complete this method")

    def reuse(self, block: int) -> None:
        """A sequence shares a cached block: it cannot be evicted while it has an owner."""
        raise NotImplementedError("complete this method")

    def evict(self) -> int:
        """Return the block that was used least recently, and forget it."""
        raise NotImplementedError("complete this method")


def test_the_order_is_that_of_the_pool() -> None:
    dice = random.Random(1)
    pool = BlockPool(8, block_size=1)
    order = EvictionOrder()
    blocks = [pool.allocate() for _ in range(8)]
    for block in blocks:
        pool.publish(FullBlock(block, b"%d" % block, array("i", [block]), b""))
        pool.release(block)
        order.release(block)
    for block in dice.choices(blocks, k=20):
        pool.acquire(block)
        order.reuse(block)
        pool.release(block)
        order.release(block)
    assert [order.evict() for _ in range(8)] == [pool.allocate() for _ in range(8)]
