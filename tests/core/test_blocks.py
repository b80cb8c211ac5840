"""The block pool alone."""

from __future__ import annotations

import random
from array import array

import pytest

from octavo.core import blocks
from octavo.core.blocks import BlockPool, FullBlock, chain_hash, root_hash

A, B = array("i", [1, 2]), array("i", [3, 4])


def publish_chain(pool: BlockPool, *contents: array) -> list[int]:
    """Publish blocks with these contents, each the continuation of the one before, and release
    them: they are cached, and no sequence holds them."""
    allocated, parent = [], b""
    for tokens in contents:
        parent = chain_hash(parent, tokens)
        allocated.append(block := pool.allocate())
        pool.publish(FullBlock(block, parent, tokens, b""))
    for block in reversed(allocated):
        pool.release(block)
    return allocated


def test_a_prefix_is_found_block_by_block() -> None:
    pool = BlockPool(4, 2)
    a, b = publish_chain(pool, A, B)
    hashes = [chain_hash(b"", A), chain_hash(chain_hash(b"", A), B)]
    assert pool.match(hashes, A + B) == [a, b]
    assert pool.match(hashes[:1], A) == [a]
    assert pool.match([hashes[1]], B) == [b], "a hash covers all tokens before its block"
    pool.check([])


def test_a_colliding_hash_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "chain_hash", lambda parent, tokens: b"the same for all")
    pool = BlockPool(4, 2)
    block = pool.allocate()
    pool.publish(FullBlock(block, blocks.chain_hash(b"", A), A, b""))
    assert pool.match([blocks.chain_hash(b"", A)], A) == [block]
    assert pool.match([blocks.chain_hash(b"", B)], B) == []
    other = pool.allocate()
    pool.publish(FullBlock(other, blocks.chain_hash(b"", B), B, b""))
    assert pool.match([blocks.chain_hash(b"", A)], A) == [block], "the first content stays"


def test_other_salts_have_other_hashes() -> None:
    assert len({chain_hash(root_hash(salt), A) for salt in ("", "a", "b")}) == 3


def test_blocks_without_content_go_first_then_the_oldest_suffix() -> None:
    pool = BlockPool(4, 2)
    a, b = publish_chain(pool, A, B)
    blank = {pool.allocate(), pool.allocate()}
    assert not blank & {a, b} and pool.evictions == 0
    assert pool.allocate() == b, "the end of a sequence is evicted before its beginning"
    assert pool.match([chain_hash(b"", A), chain_hash(chain_hash(b"", A), B)], A + B) == [a]
    assert pool.evictions == 1


def test_a_hit_is_no_longer_free() -> None:
    pool = BlockPool(2, 2)
    (a,) = publish_chain(pool, A)
    pool.acquire(a)
    assert pool.allocate() != a and not pool.available_blocks
    pool.release(a)
    assert list(pool.available_blocks) == [a] and pool.num_cached == 1


# ---- tenants -------------------------------------------------------------------------------------


def fill(pool: BlockPool, tenant: str, *tokens: int) -> list[int]:
    """Publish a block of a tenant for each token, and release it: the blocks are cached."""
    allocated = []
    for token in tokens:
        content = array("i", [token, token])
        allocated.append(block := pool.allocate())
        pool.publish(FullBlock(block, chain_hash(root_hash(tenant), content), content, b""), tenant)
        pool.release(block)
    return allocated


def has(pool: BlockPool, tenant: str, token: int) -> bool:
    content = array("i", [token, token])
    return bool(pool.find(chain_hash(root_hash(tenant), content), content))


def test_a_flood_takes_no_blocks_from_tenants_within_their_share() -> None:
    pool = BlockPool(10, 2)
    fill(pool, "small", *range(4))
    fill(pool, "flood", *range(100, 200))
    assert all(has(pool, "small", t) for t in range(4))
    assert all(has(pool, "flood", t) for t in range(194, 200)) and not has(pool, "flood", 193), (
        "the oldest blocks of the flood itself are evicted"
    )
    pool.check([])


def test_a_tenant_above_its_share_loses_blocks_to_others() -> None:
    pool = BlockPool(10, 2)
    fill(pool, "first", *range(10))
    fill(pool, "second", *range(100, 105))
    assert [has(pool, "first", t) for t in range(10)] == [False] * 5 + [True] * 5
    fill(pool, "third", *range(200, 203))
    assert {
        tenant: len(blocks_of) for tenant, blocks_of in pool.quota.blocks_by_tenant.items()
    } == {
        "first": 3,
        "second": 4,
        "third": 3,
    }
    pool.check([])


def test_with_one_tenant_or_none_the_least_recently_used_block_is_evicted() -> None:
    orders = []
    for tenant in ("", "alone"):
        pool = BlockPool(6, 2)
        first = fill(pool, tenant, *range(6))
        pool.acquire(first[0])
        pool.release(first[0])
        orders.append([first.index(pool.allocate()) for _ in range(6)])
    assert orders == [[1, 2, 3, 4, 5, 0]] * 2


def test_blocks_of_a_cleared_cache_have_no_tenant() -> None:
    pool = BlockPool(4, 2)
    fill(pool, "a", 1, 2)
    pool.clear()
    pool.check([])
    fill(pool, "b", 1, 2, 3, 4)
    assert set(pool.quota.blocks_by_tenant) == {"b"}
    pool.check([])


@pytest.mark.parametrize("seed", range(20))
def test_a_tenant_within_its_share_never_loses_a_block_to_another(seed: int) -> None:
    g = random.Random(seed)
    pool, tenants, held = (
        BlockPool(g.randrange(4, 40), 2),
        ["a", "b", "c", "d"][: g.randrange(2, 5)],
        list[int](),
    )
    for step in range(600):
        tenant = g.choices(tenants, range(1, len(tenants) + 1))[0]
        if held and (g.random() < 0.3 or len(held) == pool.num_blocks):
            pool.release(held.pop(g.randrange(len(held))))
        elif pool.hash_index and g.random() < 0.3:
            held.append(pool.acquire(g.choice(list(pool.hash_index.values()))))
        elif pool.available_blocks:
            before = {o: len(blocks_of) for o, blocks_of in pool.quota.blocks_by_tenant.items()}
            blank = any(pool.hashes[b] is None for b in pool.available_blocks)
            held.append(block := pool.allocate())
            lost = [o for o, n in before.items() if len(pool.quota.blocks_by_tenant.get(o, ())) < n]
            assert not (blank and lost) and all(
                before[o] * len(before) >= sum(before.values()) for o in lost
            )
            content = array("i", [step, step])
            pool.publish(FullBlock(block, chain_hash(b"", content), content, b""), tenant)
        pool.check([held])
