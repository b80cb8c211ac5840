"""A runner without tensors. Its attention reads every earlier position through the block table, as
a real one would, so any mistake in blocks, copies, slots or order changes the tokens. Its results
are computed at launch and read later.

A host block is empty from the launch of a store until the step of the store is waited for. A
transfer of the disk takes a random number of steps, and may fail, lose its record or corrupt it. A
fetch that is never answered is reported as late. A step may fail before it does anything or after
everything. A step that is too large for the memory does nothing."""

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
FETCH_DEADLINE = 12  # steps


class Planted(Exception):
    """A failure that the test has planted."""


@dataclass
class Handle:
    result: StepResult
    finish: Callable[[StepResult], None]

    def wait(self) -> StepResult:
        self.finish(self.result)
        return self.result


@dataclass
class FakeDisk:
    """The records outlive the runner. Each kind of fault is a share of the transfers."""

    records: dict[bytes, tuple[list[int], Entries]] = field(default_factory=dict)
    slowest: int = 6  # steps
    missing: float = 0.0
    never: float = 0.0
    unwritable: float = 0.0
    corrupt: float = 0.0  # share of the fetched blocks
    lists: float = 0.1  # share of the steps after which it lists its records


@dataclass
class Slot:
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
        self.slots: dict[int, Slot] = {}
        self.sampled: list[list[list[int]]] = []  # by step
        self.empty: Entries = [None] * block_size
        self.host: list[Entries] = [self.empty for _ in range(host_blocks)]
        self.corrupt: set[int] = set()  # host blocks
        # how often each host block got a new content: transfers for older contents do nothing
        self.generations = [0] * host_blocks
        self.disk, self.dice = disk, random.Random(seed)
        self.ticks = 0
        self.failing, self.failures = 0.0, 0  # share of steps that fail, and at most how many
        self.memory = 10**9  # tokens of the largest step
        self.saves: list[tuple[int, Save, int]] = []  # due, save, generation
        # due, fetch, generation, whether it is ever answered
        self.fetches: list[tuple[int, Fetch, int, bool]] = []

    def launch(self, plan: Plan) -> Handle:
        if plan.num_tokens > self.memory:
            raise DeviceOutOfMemory("Planted")
        rare = plan.fetches or plan.loads  # or such steps would hardly ever fail
        fails = self.failures > 0 and self.dice.random() < (4 if rare else 1) * self.failing
        self.failures -= fails
        if fails and self.dice.random() < 0.5:
            raise Planted("launch")
        stored = [
            (host_block, self._reuse(host_block), list(self.kv[block]))
            for block, host_block in plan.stores
        ]
        self._apply(plan)
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs]] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        mass: dict[int, list[float]] = {}
        pooled: dict[int, array[float]] = {}
        seen: set[int] = set()
        for i, item in enumerate(plan.items):
            assert item.slot not in seen, "a slot twice in one plan"
            seen.add(item.slot)
            slot = self.slots[item.slot]
            start = slot.computed
            assert item.start in (None, start), f"host says {item.start}, device says {start}"
            assert start + item.num_tokens <= item.max_kv_len, "the host's bound is too low"
            drafts = list(plan.drafts.get(i) or self._draft(slot, item.num_drafts))
            assert len(drafts) == item.num_drafts, "fewer drafts than the plan verifies"
            known = slot.tokens + drafts
            # A real runner writes the host's drafts where the host believes the text ends.
            assert i not in plan.drafts or item.max_kv_len == len(known), "drafts elsewhere"
            for p in range(start, start + item.num_tokens):
                self.kv[slot.table[p // self.size]][p % self.size] = (known[p], p)
            slot.computed = start + item.num_tokens - item.num_drafts
            new, new_logprobs = [], []
            if item.sample:
                assert slot.computed == len(slot.tokens), "sampled before the last known token"
                masks = plan.token_masks.get(i) or [None] * (item.num_drafts + 1)
                assert len(masks) == item.num_drafts + 1, "a mask for each sampled position"
                for draft, mask in zip([*drafts, None], masks, strict=True):
                    entries = [
                        self.kv[slot.table[p // self.size]][p % self.size]
                        for p in range(slot.computed)
                    ]
                    if slot.logprobs is None:
                        new.append(
                            oracle.model(entries, slot.seed, mask, slot.offset + slot.computed)  # type: ignore[arg-type]
                        )
                    else:
                        new_logprobs.append(ranked(oracle.logprobs(entries), slot.logprobs))  # type: ignore[arg-type]
                        new.append(new_logprobs[-1].token)
                    if new[-1] != draft:
                        break
                    slot.computed += 1
                slot.tokens += new
                if item.wants_attention_mass:
                    mass[i] = oracle.attention(entries, self.size)  # type: ignore[arg-type]
            tokens.append(new)
            logprobs.append(new_logprobs)
            if item.pooling is not None:
                pooled[i] = self._pool(slot, start, item.pooling)
            if item.prompt_logprobs is not None:  # a number made of the position and the token
                after = [*slot.tokens[start + 1 : start + item.num_tokens + 1], -1][
                    : item.num_tokens
                ]
                prompt_logprobs[i] = [
                    TokenLogprobs(t, -float(start + k), 1, []) for k, t in enumerate(after)
                ]
        self._start_transfers(plan)
        self.sampled.append(tokens)
        result = StepResult(
            tokens,
            logprobs if any(logprobs) else None,
            prompt_logprobs,
            attention_mass=mass,
            pooled=pooled,
            corrupt_host_blocks={
                host_block for host_block, _ in plan.loads if host_block in self.corrupt
            },
        )
        if self.host:
            result.compute_seconds, result.load_seconds = (
                self.dice.random(),
                self.dice.random() * len(plan.loads) / 4,
            )

        def finish(result: StepResult) -> None:
            if fails:
                raise Planted("wait")
            for host_block, generation, entries in stored:
                if self.generations[host_block] == generation:
                    self.host[host_block] = entries
            result.disk_events = self._disk_events()

        return Handle(result, finish)

    def _pool(self, slot: Slot, start: int, pooling: str) -> array[float]:
        """Return the hidden states of the positions from `start` on, read through the block table."""
        entries = [self.kv[slot.table[p // self.size]][p % self.size] for p in range(slot.computed)]
        states = [oracle.state(entries[: p + 1]) for p in range(start, slot.computed)]  # type: ignore[arg-type]
        if pooling == "mean":
            states = [sum(states)]
        return array("f", states if pooling != "last" else states[-1:])

    def _draft(self, slot: Slot, count: int) -> list[int]:
        """Return the tokens that will be sampled, some of them wrong."""
        text = list(slot.tokens)
        for _ in range(count):
            entries = [(token, p) for p, token in enumerate(text)]
            right = oracle.model(entries, slot.seed, None, slot.offset + len(text))
            dice = random.Random(f"{slot.seed} {len(text)}")  # every rank drafts the same
            text.append(right if dice.random() < 0.7 else dice.randrange(oracle.VOCAB))
        return text[len(slot.tokens) :]

    # ---- tiers -----------------------------------------------------------------------------------

    def _reuse(self, host_block: int) -> int:
        """Empty a host block, and return the generation of its next content."""
        self.host[host_block] = self.empty
        self.corrupt.discard(host_block)
        self.generations[host_block] += 1
        return self.generations[host_block]

    def _start_transfers(self, plan: Plan) -> None:
        assert self.disk is not None or not (plan.saves or plan.fetches), "there is no disk"
        for fetch in plan.fetches:
            generation = self._reuse(fetch.host_block)
            answers = self.dice.random() >= self.disk.never  # type: ignore[union-attr]
            self.fetches.append(
                (
                    self._due() if answers else self.ticks + FETCH_DEADLINE,
                    fetch,
                    generation,
                    answers,
                )
            )
        self.saves += [
            (self._due(), save, self.generations[save.host_block]) for save in plan.saves
        ]

    def _due(self) -> int:
        return self.ticks + self.dice.randrange(1, 1 + self.disk.slowest)  # type: ignore[union-attr]

    def _disk_events(self) -> list[DiskEvent]:
        self.ticks += 1
        events = []
        if self.disk is not None and self.dice.random() < self.disk.lists:
            events.append(DiskEvent("listed", listed_hashes=frozenset(self.disk.records)))
        for job in [s for s in self.saves if s[0] <= self.ticks]:
            _, save, generation = job
            if (
                self.generations[save.host_block] == generation
                and self.host[save.host_block] is self.empty
            ):
                continue  # its store is still in flight
            self.saves.remove(job)
            if (
                self.generations[save.host_block] != generation
                or self.dice.random() < self.disk.unwritable  # type: ignore[union-attr]
            ):
                events.append(DiskEvent("unsaved", save.hash, reason="fault"))
            else:
                self.disk.records[save.hash] = list(save.tokens), list(self.host[save.host_block])  # type: ignore[union-attr]
                events.append(DiskEvent("saved", save.hash))
        for job in [f for f in self.fetches if f[0] <= self.ticks]:
            self.fetches.remove(job)
            _, fetch, generation, answers = job
            tokens, entries = self.disk.records.get(fetch.hash, ([], []))  # type: ignore[union-attr]
            if (
                not answers
                or tokens != list(fetch.tokens)
                or self.dice.random() < self.disk.missing  # type: ignore[union-attr]
            ):
                reason = "late" if not answers else "fault"
                events.append(
                    DiskEvent(
                        "missed", fetch.hash, fetch.fetch_id, reason, 3.0 if not answers else 0.0
                    )
                )
            else:
                # The generation is newer if the step of the fetch failed.
                if self.generations[fetch.host_block] == generation:
                    self.host[fetch.host_block] = list(entries)
                    if self.dice.random() < self.disk.corrupt:  # type: ignore[union-attr]
                        self.host[fetch.host_block] = [(7, 7)] * self.size
                        self.corrupt.add(fetch.host_block)
                events.append(
                    DiskEvent("fetched", fetch.hash, fetch.fetch_id, seconds=self.dice.random() / 4)
                )
        return events

    # ---- the device ------------------------------------------------------------------------------

    def _apply(self, plan: Plan) -> None:
        sources = [list(self.kv[a]) for a, _ in plan.copies]  # all are read before any is written
        assert len({b for _, b in plan.copies}) == len(plan.copies), "two copies to one block"
        for (_, b), entries in zip(plan.copies, sources, strict=True):
            self.kv[b] = entries
        assert len({b for _, b in plan.loads}) == len(plan.loads), "two loads to one block"
        for host_block, b in plan.loads:
            self.kv[b] = list(self.host[host_block])
        assert len({b for b, _ in plan.shifts}) == len(plan.shifts), "a block moves twice"
        for b, by in plan.shifts:
            self.kv[b] = [None if e is None else (e[0], e[1] - by) for e in self.kv[b]]
        assert len({r.slot for r in plan.slot_fills}) == len(plan.slot_fills), "a slot filled twice"
        for r in plan.slot_fills:
            self.slots[r.slot] = self._slot_of(r)
        for slot, index, block in plan.table_updates:
            table = self.slots[slot].table
            assert index <= len(table), "a hole in a table"
            table[index : index + 1] = [block]

    def _slot_of(self, r: SlotFill) -> Slot:
        return Slot(
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
    """Return the likeliest token, which a greedy sequence gets, and the `count` likeliest tokens."""
    top = sorted(enumerate(logprobs), key=lambda entry: -entry[1])
    return TokenLogprobs(top[0][0], top[0][1], 1, top[:count])
