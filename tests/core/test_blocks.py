"""The block pool alone."""

from __future__ import annotations

from array import array

import pytest

from octavo.core import blocks
from octavo.core.blocks import BlockPool, chain, root

A, B = array("i", [1, 2]), array("i", [3, 4])


def published(pool: BlockPool, *contents: array) -> list[int]:
    """Blocks with these contents, one after the other in a sequence, in the cache and held by nobody."""
    taken, parent = [], b""
    for tokens in contents:
        parent = chain(parent, tokens)
        taken.append(block := pool.take())
        pool.publish(block, parent, tokens)
    for block in reversed(taken):
        pool.drop(block)
    return taken


def test_a_prefix_is_found_block_by_block() -> None:
    pool = BlockPool(4, 2)
    a, b = published(pool, A, B)
    hashes = [chain(b"", A), chain(chain(b"", A), B)]
    assert pool.match(hashes, A + B) == [a, b]
    assert pool.match(hashes[:1], A) == [a]
    assert pool.match([hashes[1]], B) == [b], "a hash says all that came before it"
    pool.check([])


def test_a_colliding_hash_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "chain", lambda parent, tokens: b"the same for all")
    pool = BlockPool(4, 2)
    block = pool.take()
    pool.publish(block, blocks.chain(b"", A), A)
    assert pool.match([blocks.chain(b"", A)], A) == [block]
    assert pool.match([blocks.chain(b"", B)], B) == []
    other = pool.take()
    pool.publish(other, blocks.chain(b"", B), B)
    assert pool.match([blocks.chain(b"", A)], A) == [block], "the first content stays"


def test_other_salts_have_other_hashes() -> None:
    assert len({chain(root(salt), A) for salt in ("", "a", "b")}) == 3


def test_blocks_without_content_go_first_then_the_oldest_suffix() -> None:
    pool = BlockPool(4, 2)
    a, b = published(pool, A, B)
    rest = {pool.take(), pool.take()}
    assert not rest & {a, b} and pool.evictions == 0
    assert pool.take() == b, "the end of a sequence is forgotten before its beginning"
    assert pool.match([chain(b"", A), chain(chain(b"", A), B)], A + B) == [a]
    assert pool.evictions == 1


def test_a_hit_is_no_longer_free() -> None:
    pool = BlockPool(2, 2)
    (a,) = published(pool, A)
    pool.share(a)
    assert pool.take() != a and not pool.free
    pool.drop(a)
    assert list(pool.free) == [a] and pool.num_cached == 1
