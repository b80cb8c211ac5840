"""Per-tenant quota of cached blocks, so that one tenant cannot empty the cache of the others.

It works on tenants and blocks, not on contents. The pool evicts the oldest cached block of all,
unless its tenant holds no more than an equal share of the cached blocks. In that case the oldest
block of the tenant with the most cached blocks is evicted. A tenant within its share therefore
loses nothing to others. Every operation takes constant time:

    blocks_by_tenant    tenant -> its cached blocks, oldest first
    tenants_by_count    number of blocks -> tenants that have that many; max_count is the highest
                        key and moves by one at a time, as the counts do
"""

from __future__ import annotations

from collections import OrderedDict


class CacheQuota:
    def __init__(self) -> None:
        self.blocks_by_tenant: dict[str, OrderedDict[int, None]] = {}
        self.tenants_by_count: dict[int, dict[str, None]] = {}
        self.max_count = 0
        self.total = 0

    def add(self, tenant: str, block: int) -> None:
        blocks = self.blocks_by_tenant.setdefault(tenant, OrderedDict())
        blocks[block] = None
        self._count_changed(tenant, len(blocks) - 1, len(blocks))

    def remove(self, tenant: str, block: int) -> None:
        blocks = self.blocks_by_tenant[tenant]
        del blocks[block]
        self._count_changed(tenant, len(blocks) + 1, len(blocks))
        if not blocks:
            del self.blocks_by_tenant[tenant]

    def pick_evicted(self, tenant: str, oldest: int) -> tuple[str, int]:
        """Return (tenant, block) to evict, where `oldest` is the oldest block and `tenant`'s."""
        num_tenants = len(self.blocks_by_tenant)
        within_share = len(self.blocks_by_tenant[tenant]) * num_tenants <= self.total
        if within_share and self.max_count * num_tenants > self.total:
            tenant = next(iter(self.tenants_by_count[self.max_count]))
            oldest = next(iter(self.blocks_by_tenant[tenant]))
        return tenant, oldest

    def clear(self) -> None:
        self.blocks_by_tenant.clear()
        self.tenants_by_count.clear()
        self.max_count = 0
        self.total = 0

    def _count_changed(self, tenant: str, old_count: int, new_count: int) -> None:
        self.total += new_count - old_count
        if new_count:
            self.tenants_by_count.setdefault(new_count, {})[tenant] = None
        if old_count:
            del self.tenants_by_count[old_count][tenant]
            if not self.tenants_by_count[old_count]:
                del self.tenants_by_count[old_count]
        if new_count > self.max_count or self.max_count not in self.tenants_by_count:
            self.max_count = new_count

    def check(self, expected: dict[str, set[int]]) -> None:
        """Raise AssertionError unless these are the cached blocks of each tenant."""
        blocks = {tenant: set(blocks) for tenant, blocks in self.blocks_by_tenant.items()}
        assert blocks == expected, "a cached block is not counted for its tenant"
        counts = {tenant: len(blocks) for tenant, blocks in expected.items()}
        counted = {
            tenant: count for count, tenants in self.tenants_by_count.items() for tenant in tenants
        }
        assert counted == counts, "a tenant's count is wrong"
        assert self.total == sum(counts.values()), "the total is wrong"
        assert self.max_count == max(counts.values(), default=0), "max_count is not the highest"
