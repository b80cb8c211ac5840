"""Who comes first: orders of the queue, and who gives way when rows or blocks run out. Knows sequences, no blocks, no time.

A policy is a rank: a number of seconds for each sequence, the lowest comes first. The scheduler does the rest:

    waiting, prefilling and decoding are kept in the order of ranks, and plans are filled from the front
    whoever needs room takes it from somebody of a higher rank who is not in the plan yet, or gives way itself

So whoever ranks first of all gets on in every step, or in every other, whatever the policy: no livelock, because the rank of what
has begun is not changed (but once: under a policy of changing ranks, whoever had to give way comes first from then on).
Ranks start from the time of arrival and add a bounded number of seconds: what comes much later comes after. No starvation.

A policy of your own is a subclass with a `rank`, given by name: --policy package.module:Class.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

from octavo.errors import InvalidRequest
from octavo.types import Sequence


class Policy:
    """First come, first served, and the base of all others."""

    # ranks never change. Otherwise they are asked for anew as long as a sequence waits to begin
    fixed = True
    pausing = False  # `pauses` may say yes

    def rank(self, seq: Sequence) -> float:
        """Lower is sooner; equal ranks go by arrival."""
        return 0.0

    def pauses(self, seq: Sequence, other: Sequence) -> bool:
        """May `seq` take the place of `other`, which runs and ranks after it, rather than wait for it to end?"""
        return False

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        """Does `other`, which ranks after it, stand aside in steps that compute `seq`'s prompt? Its row and blocks stay. This
        should tell few classes of requests apart: prompts of different ones are not computed in one step. Equals that decode
        sit out every other of these steps."""
        return False

    def victim(self, weaker: list[Sequence]) -> Sequence:
        """Who of these gives way. All rank after the one that needs room; any choice is safe."""
        return max(weaker, key=lambda s: s.rank)

    def look(
        self, running: list[Sequence], waiting: list[Sequence], cached: Callable[[Sequence], int]
    ) -> None:
        """Before ranks that are not fixed are asked for. `cached`: how much of a prompt the cache has, or is about to have."""

    def arrived(self, seq: Sequence) -> None: ...

    def ended(self, seq: Sequence) -> None: ...


class Priority(Policy):
    """Lower `Request.priority` first, as in vLLM, pausing what runs where there is no room. One level is worth `ageing` seconds:
    a request that has waited for so long is not overtaken any more by later ones of the level before its own."""

    pausing = True
    ageing = 10.0

    def rank(self, seq: Sequence) -> float:
        return seq.request.arrival + self.ageing * seq.request.priority

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        return seq.request.priority < other.request.priority

    pauses = outranks

    def victim(self, weaker: list[Sequence]) -> Sequence:
        """Of the lowest priority, the cheapest to bring back."""
        return max(weaker, key=lambda s: (s.request.priority, -s.planned, s.rank))


class Shortest(Policy):
    """Short prompts first: a prompt lets those pass that come up to `ageing` seconds for each of its tokens later."""

    ageing = 0.01

    def rank(self, seq: Sequence) -> float:
        return seq.request.arrival + self.ageing * seq.prompt_len


class Deadline(Policy):
    """The earliest deadline first, pausing what has more time. Without one, `patience` seconds from arrival."""

    pausing = True
    patience = 60.0

    def rank(self, seq: Sequence) -> float:
        request = seq.request
        if request.deadline is None:
            return request.arrival + self.patience
        # what is past when it comes does not overtake for ever
        return max(request.deadline, request.arrival)

    def pauses(self, seq: Sequence, other: Sequence) -> bool:
        return seq.request.deadline is not None

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        return seq.request.deadline is not None and other.request.deadline is None


class Fair(Policy):
    """As many tokens for each tenant that waits. A tenant's counter is what it was given so far; the lowest comes next. A tenant that had
    nothing waiting starts where one that always had would stand (`even`): what it left to others earns nothing, and whoever
    waits is not overtaken by ever new tenants."""

    fixed = False

    def __init__(self) -> None:
        # tenant -> tokens of what has ended, and what it did not ask for
        self.served: dict[str, int] = {}
        self.live: dict[str, int] = {}  # tenant -> sequences that have not
        self.even = 0.0  # the counter of a tenant that always has something waiting
        # tokens of all that has ended; and what was given up to the last look
        self._ended, self._given_before = 0, 0
        self._turn: dict[int, int] = {}  # Sequence.id -> its tenant's counter when its turn comes

    def arrived(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        self.served.setdefault(tenant, 0)
        self.live[tenant] = self.live.get(tenant, 0) + 1

    def ended(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        if seq.num_generated > 0:  # who never got to speak is charged nothing
            given = self._given(seq, len(seq.tokens))
            self.served[tenant] += given
            self._ended += given
        self.live[tenant] -= 1
        if not self.live[tenant]:
            del self.live[tenant]

    def _given(self, seq: Sequence, upto: int) -> int:
        # a request's completions share its prompt, its beams more
        return max(upto + seq.dropped_tokens - seq.inherited_tokens, 0)

    def look(
        self, running: list[Sequence], waiting: list[Sequence], cached: Callable[[Sequence], int]
    ) -> None:
        counter, given = {tenant: self.served[tenant] for tenant in self.live}, self._ended
        for seq in [*running, *(seq for seq in waiting if seq.preemptions)]:
            counter[seq.request.tenant] += (
                some := self._given(seq, max(seq.planned, seq.preempted_positions))
            )
            given += some
        waited = {seq.request.tenant for seq in waiting if seq.id in self._turn}
        new = {seq.request.tenant for seq in waiting} - waited
        self._move_on(counter, waited, given - self._given_before)
        for tenant in new:
            lift = max(math.ceil(self.even) - counter[tenant], 0)
            self.served[tenant] += lift
            counter[tenant] += lift
        self.served = {
            tenant: n for tenant, n in self.served.items() if tenant in self.live or n > self.even
        }
        self._given_before = given
        self._turn.clear()
        # by arrival: each adds to its tenant's counter
        for seq in sorted(waiting, key=lambda s: s.rank[1:]):
            self._turn[seq.id] = counter[seq.request.tenant]
            counter[seq.request.tenant] += len(seq.tokens)

    def _move_on(self, counter: dict[str, int], waited: set[str], given: int) -> None:
        """`even`, by an equal part of what was given since the last look, for each tenant that waited for it; at most to where the
        last of them stands. Where none waited, to the most that anybody has had: nobody is owed anything."""
        if waited:
            most = max(counter[tenant] for tenant in waited)
            self.even = max(self.even, min(self.even + max(given, 0) / len(waited), most))
        else:
            self.even = max(self.even, *counter.values(), *self.served.values())

    def rank(self, seq: Sequence) -> float:
        return self._turn[seq.id]


class Prefix(Policy):
    """Those first whose prompt begins with what the cache has or is about to have, so that it is used before it is forgotten.
    A token found there is worth `ageing` seconds."""

    fixed = False
    ageing = 0.01

    def look(
        self, running: list[Sequence], waiting: list[Sequence], cached: Callable[[Sequence], int]
    ) -> None:
        self._cached = cached

    def rank(self, seq: Sequence) -> float:
        return seq.request.arrival - self.ageing * self._cached(seq)


POLICIES: dict[str, type[Policy]] = {
    "fcfs": Policy, "priority": Priority, "shortest": Shortest, "deadline": Deadline, "fair": Fair, "prefix": Prefix,
}  # fmt: skip


def find_policy(name: str) -> Policy:
    """By its name, or somebody's own as package.module:Class."""
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    allowed = f"use {', '.join(POLICIES)}, or package.module:Class for one of your own"
    if not attribute:
        raise InvalidRequest(f"unknown scheduling policy {name!r}: {allowed}", "scheduling_policy")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"cannot load the scheduling policy {name!r} ({error}): {allowed}", "scheduling_policy"
        ) from None
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise InvalidRequest(
            f"{name} is not a subclass of octavo.core.policy.Policy", "scheduling_policy"
        )
    return found()
