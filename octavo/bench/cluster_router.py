"""The routing policies of a simulated cluster.

round_robin      the replicas in turn
least_loaded     the replica with the fewest unfinished requests
power_of_two     the less loaded of two replicas drawn at random
prefix_affinity  the least loaded replica that had the longest known prefix of the prompt,
                 unless its load is far above the average: then power of two
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from octavo.bench.cluster_replica import ClusterRequest

REMEMBERED_PREFIXES = 1_000_000
MAX_REPLICAS_PER_PREFIX = 8
# A replica is overloaded if its load is above SLACK plus FACTOR times the average.
OVERLOAD_FACTOR = 1.25
OVERLOAD_SLACK = 4.0


class Router:
    """Tracks the loads of the replicas. A subclass chooses the replica for each request."""

    def __init__(self, members: Iterable[int], generator: random.Random):
        self.random = generator
        self.members = set(members)
        self.alive = sorted(self.members)
        self.loads = np.full(max(self.members) + 1, np.inf)
        self.loads[self.alive] = 0.0
        self.total_load = 0

    def add_load(self, index: int, change: int) -> None:
        self.loads[index] += change
        self.total_load += change

    def remove(self, index: int) -> None:
        """Remove a replica that has crashed."""
        if index in self.members and index in self.alive:
            self.alive.remove(index)
            self.total_load -= int(self.loads[index])
            self.loads[index] = np.inf

    def restore(self, index: int) -> None:
        if index in self.members:
            self.alive.append(index)
            self.loads[index] = 0.0

    def choose(self, request: ClusterRequest) -> int | None:
        """Return the replica for a request, or None if no replica is alive."""
        return self.pick(request) if self.alive else None

    def pick(self, request: ClusterRequest) -> int:
        raise NotImplementedError

    def less_loaded_of_two(self) -> int:
        first = self.random.choice(self.alive)
        second = self.random.choice(self.alive)
        return first if self.loads[first] <= self.loads[second] else second


class RoundRobin(Router):
    turn = 0

    def pick(self, request: ClusterRequest) -> int:
        self.turn += 1
        return self.alive[self.turn % len(self.alive)]


class LeastLoaded(Router):
    def pick(self, request: ClusterRequest) -> int:
        # The search begins at a random replica, so that equal loads are spread.
        start = self.random.randrange(len(self.loads))
        loads_from_start = self.loads[start:]
        loads_before_start = self.loads[:start]
        best = start + int(loads_from_start.argmin())
        if start and loads_before_start.min() < self.loads[best]:
            best = int(loads_before_start.argmin())
        return best


class PowerOfTwo(Router):
    def pick(self, request: ClusterRequest) -> int:
        return self.less_loaded_of_two()


class PrefixAffinity(Router):
    def __init__(self, members: Iterable[int], generator: random.Random):
        super().__init__(members, generator)
        # The key of a segment -> the replicas that cached it, the latest one last. Each replica has
        # the number of its crashes at that time: a later crash has emptied its cache.
        self.homes: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()
        self.crashes = [0] * len(self.loads)

    def remove(self, index: int) -> None:
        super().remove(index)
        if index in self.members:
            self.crashes[index] += 1

    def pick(self, request: ClusterRequest) -> int:
        limit = OVERLOAD_SLACK + OVERLOAD_FACTOR * self.total_load / len(self.alive)
        for key, _ in reversed(request.segments):
            homes = [
                index
                for index, crashes in self.homes.get(key, ())
                if crashes == self.crashes[index]
            ]
            if homes:
                index = min(homes, key=self.loads.__getitem__)
                if self.loads[index] <= limit:
                    return self._remember(request, index)
                break
        return self._remember(request, self.less_loaded_of_two())

    def _remember(self, request: ClusterRequest, index: int) -> int:
        home = (index, self.crashes[index])
        for key, _ in request.segments:
            homes = self.homes.setdefault(key, [])
            if home not in homes:
                homes.append(home)
                del homes[:-MAX_REPLICAS_PER_PREFIX]
            self.homes.move_to_end(key)
        while len(self.homes) > REMEMBERED_PREFIXES:
            self.homes.popitem(last=False)
        return index


ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
}
