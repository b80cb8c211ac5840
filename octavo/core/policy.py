"""Scheduling policies: the order of the queue, and which sequence is preempted when batch slots or
blocks run out. Policies use sequences, but no blocks and no clock.

A policy gives each sequence a policy rank: a number, lowest first. The unit is seconds, except for
`fair`, where it is tokens. The scheduler uses the rank as follows:

    waiting, prefilling and decoding are kept in rank order, and plans are filled from the front
    a decoding sequence that needs a block takes it from a sequence with a later rank that is not in
    the plan yet, or is preempted itself
    a prefilling sequence takes blocks only from prefilling ones with a later rank, or waits

There is no livelock under any policy: among running sequences, the sequence with the lowest rank
never loses its blocks to another running one, because the rank of a sequence that has started does
not change. It may wait for blocks while others decode, but these end or are preempted, so it
advances in the end. There are three exceptions. A beam that has reported makes room for its
siblings, whatever its rank. Under a policy with changing ranks, a rank changes once more: a
preempted sequence comes first from then on. Another policy, chosen while the engine runs, ranks all
sequences again (live_settings.py).

There is no starvation if a rank is the time of arrival plus a bounded number of seconds: a request
that arrives much later comes after. `Fair` achieves the same with its counters of tokens.

To write your own policy, subclass Policy with a `rank` and name it: --policy package.module:Class.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from octavo import extensions
from octavo.errors import InvalidRequest
from octavo.extensions import extension_names, find_extension, is_path
from octavo.types import Sequence


class Policy:
    """First come, first served. Base class of all policies."""

    # True: a rank never changes. False: ranks are computed again until the sequence starts.
    fixed_ranks = True
    preempts_for_waiting = False  # True: a waiting request may preempt running ones.

    def rank(self, seq: Sequence) -> float:
        """Return the policy rank. Lower ones come first; equal ones go by arrival."""
        return 0.0

    def preempts(self, seq: Sequence, other: Sequence) -> bool:
        """Return whether `seq` may preempt `other`, which runs and has a later rank."""
        return False

    def pauses(self, seq: Sequence, other: Sequence) -> bool:
        """Return whether `other`, which has a later rank, pauses in steps that compute `seq`'s
        prompt.

        A paused sequence keeps its batch slot and blocks until blocks run out. This function should
        define few classes of requests: prompts of different classes are not computed in one step,
        and decoding sequences of `seq`'s class skip every other of these steps."""
        return False

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Choose the sequence to preempt. All candidates rank after the one that needs room, so any
        choice is safe."""
        return max(candidates, key=lambda seq: seq.rank)

    def before_ranking(
        self,
        running: list[Sequence],
        waiting: list[Sequence],
        count_cached_tokens: Callable[[Sequence], int],
    ) -> None:
        """Prepare for calls of `rank`, if ranks are not fixed. `count_cached_tokens` returns how
        many tokens of a prompt the prefix cache has or is about to have."""

    def arrived(self, seq: Sequence) -> None: ...

    def finished(self, seq: Sequence) -> None: ...


class Priority(Policy):
    """Serves lower numbers of `Request.priority` first, as vLLM does, and preempts less important
    requests if there is no room.

    One level is worth `ageing` seconds: a request that has waited that long is no longer overtaken
    by later requests one level above its own."""

    preempts_for_waiting = True
    ageing = 10.0

    def rank(self, seq: Sequence) -> float:
        return seq.request.arrival + self.ageing * seq.request.priority

    def pauses(self, seq: Sequence, other: Sequence) -> bool:
        return seq.request.priority < other.request.priority

    preempts = pauses

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Choose the lowest priority and, within it, the sequence that is cheapest to resume."""
        return max(candidates, key=lambda seq: (seq.request.priority, -seq.planned, seq.rank))


class Shortest(Policy):
    """Serves short prompts first. Adds `ageing` seconds to the arrival time per prompt token, so a
    long prompt is overtaken for a bounded time only."""

    ageing = 0.01

    def rank(self, seq: Sequence) -> float:
        return seq.request.arrival + self.ageing * seq.prompt_len


class Deadline(Policy):
    """Serves the earliest deadline first, and preempts requests with later deadlines. A request
    without a deadline gets one, `default_seconds` after its arrival."""

    preempts_for_waiting = True
    default_seconds = 60.0

    def rank(self, seq: Sequence) -> float:
        request = seq.request
        if request.deadline is None:
            return request.arrival + self.default_seconds
        # A deadline in the past counts as now, so that it cannot overtake for ever.
        return max(request.deadline, request.arrival)

    def preempts(self, seq: Sequence, other: Sequence) -> bool:
        return seq.request.deadline is not None

    def pauses(self, seq: Sequence, other: Sequence) -> bool:
        return seq.request.deadline is not None and other.request.deadline is None


class Fair(Policy):
    """Gives an equal number of tokens to each tenant that has waiting requests.

    A tenant's counter is the number of tokens it was given so far; the lowest counter comes next. A
    tenant without waiting requests starts at `fair_counter`, the counter of an imaginary tenant
    that always had waiting requests. A tenant therefore gets no credit for tokens that it left to
    others, and an endless stream of new tenants does not overtake a waiting one."""

    fixed_ranks = False

    def __init__(self) -> None:
        # tenant -> tokens of its finished sequences, plus credits that raised the counter to
        # fair_counter
        self.served: dict[str, int] = {}
        self.live: dict[str, int] = {}  # tenant -> number of live sequences
        self.fair_counter = 0.0
        self._finished_tokens = 0  # sum over all tenants
        self._given_before = 0  # tokens given to all tenants up to the last ranking
        self._turns: dict[int, int] = {}  # Sequence.id -> its tenant's counter before its turn

    def arrived(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        self.served.setdefault(tenant, 0)
        self.live[tenant] = self.live.get(tenant, 0) + 1

    def finished(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        if seq.num_generated > 0:  # a sequence without output is free
            given = self._tokens_given(seq, len(seq.tokens))
            self.served[tenant] += given
            self._finished_tokens += given
        self.live[tenant] -= 1
        if not self.live[tenant]:
            del self.live[tenant]

    def _tokens_given(self, seq: Sequence, positions: int) -> int:
        # Completions of a request share its prompt, and beams share more: shared tokens count once.
        return max(positions + seq.dropped_tokens - seq.inherited_tokens, 0)

    def before_ranking(
        self,
        running: list[Sequence],
        waiting: list[Sequence],
        count_cached_tokens: Callable[[Sequence], int],
    ) -> None:
        counters = {tenant: self.served[tenant] for tenant in self.live}
        given = self._finished_tokens
        for seq in [*running, *(seq for seq in waiting if seq.preemptions)]:
            tokens = self._tokens_given(seq, max(seq.planned, seq.preempted_positions))
            counters[seq.request.tenant] += tokens
            given += tokens
        waited = {seq.request.tenant for seq in waiting if seq.id in self._turns}
        new_tenants = {seq.request.tenant for seq in waiting} - waited
        self._advance_fair_counter(counters, waited, given - self._given_before)
        for tenant in new_tenants:
            credit = max(math.ceil(self.fair_counter) - counters[tenant], 0)
            self.served[tenant] += credit
            counters[tenant] += credit
        self.served = {
            tenant: tokens
            for tenant, tokens in self.served.items()
            if tenant in self.live or tokens > self.fair_counter
        }
        self._given_before = given
        self._turns.clear()
        # In order of arrival: each request raises its tenant's counter for the next one.
        for seq in sorted(waiting, key=lambda seq: seq.rank[1:]):
            self._turns[seq.id] = counters[seq.request.tenant]
            counters[seq.request.tenant] += len(seq.tokens)

    def _advance_fair_counter(self, counters: dict[str, int], waited: set[str], given: int) -> None:
        """Advance `fair_counter` by an equal part, for each tenant that waited, of the tokens given
        since the last ranking, but not beyond the highest counter among them. If no tenant waited,
        advance it to the highest counter of all tenants."""
        if waited:
            highest = max(counters[tenant] for tenant in waited)
            advanced = self.fair_counter + max(given, 0) / len(waited)
            self.fair_counter = max(self.fair_counter, min(advanced, highest))
        else:
            self.fair_counter = max(self.fair_counter, *counters.values(), *self.served.values())

    def rank(self, seq: Sequence) -> float:
        return self._turns[seq.id]


class Prefix(Policy):
    """Serves prompts first whose prefix is cached or being computed, so that cached blocks are used
    before they are evicted. Each cached token is worth `ageing` seconds."""

    fixed_ranks = False
    ageing = 0.01

    def before_ranking(
        self,
        running: list[Sequence],
        waiting: list[Sequence],
        count_cached_tokens: Callable[[Sequence], int],
    ) -> None:
        self._count_cached_tokens = count_cached_tokens

    def rank(self, seq: Sequence) -> float:
        return seq.request.arrival - self.ageing * self._count_cached_tokens(seq)


POLICIES: dict[str, type[Policy]] = {
    "fcfs": Policy,
    "priority": Priority,
    "shortest": Shortest,
    "deadline": Deadline,
    "fair": Fair,
    "prefix": Prefix,
}


def ignores_priority(name: str) -> bool:
    """Return whether a built-in policy does not read the priority of a request."""
    return name in POLICIES and POLICIES[name] is not Priority


def find_policy(name: str) -> Policy:
    """Return a built-in policy by its name, or a user's own as package.module:Class."""
    if name in POLICIES:
        return POLICIES[name]()
    if not is_path(name) and name not in extension_names(extensions.POLICIES):
        raise InvalidRequest(
            f"unknown scheduling policy {name!r}: use {', '.join(POLICIES)}, or "
            "package.module:Class for one of your own",
            "scheduling_policy",
        )
    policy = find_extension(extensions.POLICIES, name, "scheduling_policy")
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise InvalidRequest(
            f"{name} is not a subclass of octavo.core.policy.Policy", "scheduling_policy"
        )
    return policy()
