"""A runner without tensors. Its 'attention' reads every earlier position through the block table,
as a real one would, so any mistake in blocks, copies, rows or order changes the tokens. Its results
are computed at launch and read later.

Host slots hold nothing from the launch of a store until its step is waited for. The disk takes as
many steps as its dice say, and may fail, lose a record, spoil it or never answer: then the fetch is
reported late. A step may fail before it does anything, or after all of it; one that is too large
for the memory does nothing."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import DeviceOutOfMemory
from octavo.message_encoding import decode, encode
from octavo.types import DiskEvent, Fetch, Plan, Save, SlotFill, StepResult, TokenLogprobs
from tests import oracle

Entries = list[tuple[int, int] | None]
PATIENCE = 12  # steps


class Planted(Exception):
    """A step fails because the test wants it to."""


@dataclass
class Handle:
    result: StepResult
    finish: Callable[[StepResult], None]

    def wait(self) -> StepResult:
        self.finish(self.result)
        return self.result


@dataclass
class FakeDisk:
    """Outlives the runner. Faults are parts of what is asked."""

    records: dict[bytes, tuple[list[int], Entries]] = field(default_factory=dict)
    slowest: int = 6  # steps
    missing: float = 0.0
    never: float = 0.0
    unwritable: float = 0.0
    spoilt: float = 0.0  # of what comes
    lists: float = 0.1  # part of the steps after which it tells what it has


@dataclass
class Row:
    tokens: list[int]
    computed: int
    table: list[int]
    seed: int
    logprobs: int | None
    offset: int


class FakeRunner:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        disk: FakeDisk | None = None,
        seed: int = 0,
    ):
        self.kv: list[Entries] = [[None] * block_size for _ in range(num_blocks + 1)]
        self.size = block_size
        self.rows: dict[int, Row] = {}
        self.sampled: list[list[list[int]]] = []  # by step
        self.empty: Entries = [None] * block_size
        self.host: list[Entries] = [self.empty for _ in range(host_blocks)]
        self.spoilt: set[int] = set()  # slots
        # who came into the slot last: late work for others is not done
        self.owner = [0] * host_blocks
        self.disk, self.dice = disk, random.Random(seed)
        self.ticks = 0
        self.failing, self.failures = 0.0, 0  # part of the steps, but for at most this many
        self.memory = 10**9  # tokens of the largest step
        self.saves: list[tuple[int, Save, int]] = []  # due, what, owner
        # due, what, owner, whether it ever comes
        self.fetches: list[tuple[int, Fetch, int, bool]] = []

    def launch(self, plan: Plan) -> Handle:
        if plan.num_tokens > self.memory:
            raise DeviceOutOfMemory("Planted")
        rare = plan.fetches or plan.loads  # or such steps would hardly ever fail
        fails = self.failures > 0 and self.dice.random() < (4 if rare else 1) * self.failing
        self.failures -= fails
        if fails and self.dice.random() < 0.5:
            raise Planted("launch")
        stored = [(slot, self._own(slot), list(self.kv[block])) for block, slot in plan.stores]
        self._apply(plan)
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs]] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        mass: dict[int, list[float]] = {}
        pooled: dict[int, array[float]] = {}
        seen: set[int] = set()
        for i, item in enumerate(plan.items):
            assert item.slot not in seen, "a row twice in one plan"
            seen.add(item.slot)
            row = self.rows[item.slot]
            start = row.computed
            assert item.start in (None, start), f"host says {item.start}, device says {start}"
            assert start + item.num_tokens <= item.max_kv_len, "the host's bound is too low"
            drafts = list(plan.drafts.get(i) or self._guess(row, item.num_drafts))
            assert len(drafts) == item.num_drafts, "fewer drafts than the plan verifies"
            known = row.tokens + drafts
            # A real runner writes the host's drafts where the host believes the text ends.
            assert i not in plan.drafts or item.max_kv_len == len(known), "drafts elsewhere"
            for p in range(start, start + item.num_tokens):
                self.kv[row.table[p // self.size]][p % self.size] = (known[p], p)
            row.computed = start + item.num_tokens - item.num_drafts
            new, found = [], []
            if item.sample:
                assert row.computed == len(row.tokens), "sampled before the last known token"
                masks = plan.token_masks.get(i) or [None] * (item.num_drafts + 1)
                assert len(masks) == item.num_drafts + 1, "a mask for each sampled position"
                for draft, mask in zip([*drafts, None], masks, strict=True):
                    entries = [
                        self.kv[row.table[p // self.size]][p % self.size]
                        for p in range(row.computed)
                    ]
                    if row.logprobs is None:
                        new.append(
                            oracle.model(entries, row.seed, mask, row.offset + row.computed)  # type: ignore[arg-type]
                        )
                    else:
                        found.append(ranked(oracle.logprobs(entries), row.logprobs))  # type: ignore[arg-type]
                        new.append(found[-1].token)
                    if new[-1] != draft:
                        break
                    row.computed += 1
                row.tokens += new
                if item.wants_attention_mass:
                    mass[i] = oracle.attention(entries, self.size)  # type: ignore[arg-type]
            tokens.append(new)
            logprobs.append(found)
            if item.pooling is not None:
                pooled[i] = self._pool(row, start, item.pooling)
            if item.prompt_logprobs is not None:  # a number that tells the position and the token
                after = [*row.tokens[start + 1 : start + item.num_tokens + 1], -1][
                    : item.num_tokens
                ]
                prompt_logprobs[i] = [
                    TokenLogprobs(t, -float(start + k), 1, []) for k, t in enumerate(after)
                ]
        self._ask_disk(plan)
        self.sampled.append(tokens)
        result = StepResult(
            tokens,
            logprobs if any(logprobs) else None,
            prompt_logprobs,
            attention_mass=mass,
            pooled=pooled,
            corrupt_host_blocks={slot for slot, _ in plan.loads if slot in self.spoilt},
        )
        if self.host:
            result.compute_seconds, result.load_seconds = (
                self.dice.random(),
                self.dice.random() * len(plan.loads) / 4,
            )

        def finish(result: StepResult) -> None:
            if fails:
                raise Planted("wait")
            for slot, owner, entries in stored:
                if self.owner[slot] == owner:
                    self.host[slot] = entries
            result.disk_events = self._disk_news()

        return Handle(result, finish)

    def _pool(self, row: Row, start: int, pooling: str) -> array[float]:
        """The hidden states of the positions from `start` on, as the block table has them."""
        entries = [self.kv[row.table[p // self.size]][p % self.size] for p in range(row.computed)]
        states = [oracle.state(entries[: p + 1]) for p in range(start, row.computed)]  # type: ignore[arg-type]
        if pooling == "mean":
            states = [sum(states)]
        return array("f", states if pooling != "last" else states[-1:])

    def _guess(self, row: Row, count: int) -> list[int]:
        """The tokens that will be sampled, some of them wrong."""
        text = list(row.tokens)
        for _ in range(count):
            entries = [(token, p) for p, token in enumerate(text)]
            right = oracle.model(entries, row.seed, None, row.offset + len(text))
            dice = random.Random(f"{row.seed} {len(text)}")  # every rank drafts the same
            text.append(right if dice.random() < 0.7 else dice.randrange(oracle.VOCAB))
        return text[len(row.tokens) :]

    # ---- tiers -----------------------------------------------------------------------------------

    def _own(self, slot: int) -> int:
        self.host[slot] = self.empty
        self.spoilt.discard(slot)
        self.owner[slot] += 1
        return self.owner[slot]

    def _ask_disk(self, plan: Plan) -> None:
        assert self.disk is not None or not (plan.saves or plan.fetches), "there is no disk"
        for fetch in plan.fetches:
            owner = self._own(fetch.host_block)
            comes = self.dice.random() >= self.disk.never  # type: ignore[union-attr]
            self.fetches.append(
                (self._due() if comes else self.ticks + PATIENCE, fetch, owner, comes)
            )
        self.saves += [(self._due(), save, self.owner[save.host_block]) for save in plan.saves]

    def _due(self) -> int:
        return self.ticks + self.dice.randrange(1, 1 + self.disk.slowest)  # type: ignore[union-attr]

    def _disk_news(self) -> list[DiskEvent]:
        self.ticks += 1
        news = []
        if self.disk is not None and self.dice.random() < self.disk.lists:
            news.append(DiskEvent("listed", listed_hashes=frozenset(self.disk.records)))
        for job in [s for s in self.saves if s[0] <= self.ticks]:
            _, save, owner = job
            if self.owner[save.host_block] == owner and self.host[save.host_block] is self.empty:
                continue  # its store is still in flight
            self.saves.remove(job)
            if self.owner[save.host_block] != owner or self.dice.random() < self.disk.unwritable:  # type: ignore[union-attr]
                news.append(DiskEvent("unsaved", save.hash, reason="fault"))
            else:
                self.disk.records[save.hash] = list(save.tokens), list(self.host[save.host_block])  # type: ignore[union-attr]
                news.append(DiskEvent("saved", save.hash))
        for job in [f for f in self.fetches if f[0] <= self.ticks]:
            self.fetches.remove(job)
            _, fetch, owner, comes = job
            tokens, entries = self.disk.records.get(fetch.hash, ([], []))  # type: ignore[union-attr]
            if not comes or tokens != list(fetch.tokens) or self.dice.random() < self.disk.missing:  # type: ignore[union-attr]
                why = "late" if not comes else "fault"
                news.append(
                    DiskEvent("missed", fetch.hash, fetch.fetch_id, why, 3.0 if not comes else 0.0)
                )
            else:
                if (
                    self.owner[fetch.host_block] == owner
                ):  # not so if the step that asked for it failed
                    self.host[fetch.host_block] = list(entries)
                    if self.dice.random() < self.disk.spoilt:  # type: ignore[union-attr]
                        self.host[fetch.host_block] = [(7, 7)] * self.size
                        self.spoilt.add(fetch.host_block)
                news.append(
                    DiskEvent("fetched", fetch.hash, fetch.fetch_id, seconds=self.dice.random() / 4)
                )
        return news

    # ---- the device ------------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> None:
        sources = [list(self.kv[a]) for a, _ in plan.copies]  # all are read before any is written
        assert len({b for _, b in plan.copies}) == len(plan.copies), "two copies to one block"
        for (_, b), entries in zip(plan.copies, sources, strict=True):
            self.kv[b] = entries
        assert len({b for _, b in plan.loads}) == len(plan.loads), "two loads to one block"
        for slot, b in plan.loads:
            self.kv[b] = list(self.host[slot])
        assert len({b for b, _ in plan.shifts}) == len(plan.shifts), "a block moves twice"
        for b, by in plan.shifts:
            self.kv[b] = [None if e is None else (e[0], e[1] - by) for e in self.kv[b]]
        assert len({r.slot for r in plan.slot_fills}) == len(plan.slot_fills), (
            "a row given out twice"
        )
        for r in plan.slot_fills:
            self.rows[r.slot] = self._row(r)
        for row, j, block in plan.table_updates:
            table = self.rows[row].table
            assert j <= len(table), "a hole in a table"
            table[j : j + 1] = [block]

    def _row(self, r: SlotFill) -> Row:
        return Row(
            list(r.tokens),
            r.computed,
            list(r.block_table),
            r.seed,
            r.num_logprobs,
            r.dropped_tokens,
        )


class FakeRanks:
    """The other ranks of tensor parallelism, in place of octavo.runner.ranks.Ranks. A rank is a
    runner that gets a copy of each plan and nothing else."""

    def __init__(self, runners: list[FakeRunner], depth: int):
        self.runners, self.depth = runners, depth
        self.size = 1 + len(runners)
        self.has_disk = any(runner.disk is not None for runner in runners)
        self.in_flight: deque[list[Handle]] = deque()

    def send(self, plan: Plan) -> None:
        data = encode(plan)
        # A load waits for all stores before it, also if rank 0 has waited for them long ago.
        in_flight = 1 if plan.loads else self.depth
        while not self.has_disk and len(self.in_flight) >= in_flight:
            self._wait()
        copies = [decode(data, Plan) for _ in self.runners]
        assert all(copy == plan for copy in copies)
        self.in_flight.append(
            [runner.launch(copy) for runner, copy in zip(self.runners, copies, strict=True)]
        )

    def receive(self, message_class: type) -> list[Any]:
        reports = [
            message_class(result.disk_events, result.corrupt_host_blocks) for result in self._wait()
        ]
        return [decode(encode(report), message_class) for report in reports]

    def _wait(self) -> list[StepResult]:
        return [handle.wait() for handle in self.in_flight.popleft()]

    def wait_for_loss(self) -> None:
        raise AssertionError("no rank is lost")

    def lose(self, reason: str) -> None:
        raise AssertionError(reason)


def ranked(logprobs: list[float], count: int) -> TokenLogprobs:
    """The likeliest token, which a greedy row takes, and so many of the likeliest."""
    top = sorted(enumerate(logprobs), key=lambda at: -at[1])
    return TokenLogprobs(top[0][0], top[0][1], 1, top[:count])
