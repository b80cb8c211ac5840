"""The bytes of the tiers: slots, threads and a real directory. Late, overtaken and broken work
never reaches a slot."""

from __future__ import annotations

import logging
import os
import random
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import CacheConfig, ModelConfig
from octavo.runner import tier_store as module
from octavo.runner.disk import PAGE_BYTES, Disk, DiskMiss, Record
from octavo.runner.kvstore import KVStore
from octavo.runner.staging import StepTimer
from octavo.runner.tier_store import TierStore
from octavo.types import DiskEvent, Fetch, Plan, Save
from tests.conftest import DEVICE

pytestmark = pytest.mark.parity
MODEL = ModelConfig("x", 10, 8, 2, 2, 2, 4, 8, 64)
DTYPE = torch.bfloat16  # which numpy does not know
BLOCKS = 8


def tokens(i: int) -> array[int]:
    return array("i", range(i, i + 4))


def name(i: int) -> bytes:
    return i.to_bytes(16, "little")


@pytest.fixture
def kv() -> KVStore:
    kv = KVStore(MODEL, CacheConfig(4, BLOCKS), DTYPE, torch.device(DEVICE))
    for block in range(1, BLOCKS + 1):
        fill(kv, block, block)
    return kv


def fill(kv: KVStore, block: int, value: float) -> None:
    kv.tensor[block].fill_(value)


def value(kv: KVStore, block: int) -> float:
    """The one number that fills the block."""
    (found,) = kv.tensor[block].float().unique().tolist()
    return found


Make = Callable[..., TierStore]


@pytest.fixture
def make(kv: KVStore, tmp_path: Path) -> Iterator[Make]:
    made: list[TierStore] = []

    def build(slots: int = 4, disk: bool = True, limit: int = 2**20) -> TierStore:
        record = kv.tensor[0].nbytes
        opened = Disk(tmp_path / "kv", limit, b"f" * 16, "test", record) if disk else None
        made.append(TierStore(kv, slots, opened, staging_bytes=4 * record))
        return made[-1]

    yield build
    for tiers in made:
        tiers.close(timeout=0.2)


def until(tiers: TierStore, count: int, seconds: float = 10.0) -> list[DiskEvent]:
    """The next pieces of news."""
    found: list[DiskEvent] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += tiers.collect_events(wait=True)
        time.sleep(0.001)
    assert len(found) == count, found
    return found


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_a_block_goes_to_host_memory_and_comes_back(kv: KVStore, make: Make) -> None:
    tiers = make(disk=False)
    tiers.begin(Plan(1, stores=[(3, 0), (5, 2)]))
    fill(kv, 3, 30)  # as the step does that took the block
    fill(kv, 5, 50)
    tiers.load([(0, 5), (2, 3)])
    synchronize()
    assert (value(kv, 5), value(kv, 3)) == (3, 5)


def test_more_stores_than_the_stage_holds(kv: KVStore, make: Make) -> None:
    tiers = make(slots=BLOCKS, disk=False)
    for round in range(3):
        for block in range(1, BLOCKS + 1):
            fill(kv, block, 10 * round + block)
        tiers.begin(Plan(1, stores=[(block, block - 1) for block in range(1, BLOCKS + 1)]))
        for block in range(1, BLOCKS + 1):
            fill(kv, block, 99)
        tiers.load([(block - 1, BLOCKS + 1 - block) for block in range(1, BLOCKS + 1)])
        synchronize()
        assert [value(kv, BLOCKS + 1 - b) for b in range(1, BLOCKS + 1)] == [
            10 * round + b for b in range(1, BLOCKS + 1)
        ]


def test_what_is_saved_can_be_fetched_by_another_server(kv: KVStore, make: Make) -> None:
    tiers = make()
    tiers.begin(Plan(1, stores=[(3, 0)], saves=[Save(0, name(3), tokens(3))]))
    assert until(tiers, 1) == [DiskEvent("saved", name(3))]
    other = make()
    assert other.disk is not None and other.disk.known_hashes == {name(3)}
    other.begin(Plan(1, fetches=[Fetch(7, 2, name(3), tokens(3))]))
    (news,) = until(other, 1)
    assert (news.kind, news.fetch_id) == ("fetched", 7) and news.seconds > 0
    other.load([(2, 8)])
    synchronize()
    assert value(kv, 8) == 3


def test_records_are_verified_when_they_are_loaded(tmp_path: Path) -> None:
    kv = KVStore(MODEL, CacheConfig(128, BLOCKS), DTYPE, torch.device(DEVICE))  # two pages a block
    disk = Disk(tmp_path, 2**20, b"f" * 16, "test", kv.tensor[0].nbytes)
    for i in (3, 4, 5):
        fill(kv, i, i)
        disk.write(
            name(i), tokens(i), memoryview(kv.tensor[i].cpu().view(torch.uint8).numpy().reshape(-1))
        )
    record = disk.folder / f"{name(4).hex()}.kv"
    data = bytearray(record.read_bytes())
    data[-5000] ^= 1
    record.write_bytes(data)
    tiers = TierStore(kv, 4, disk, verify_on_load=True)
    tiers.begin(Plan(1, fetches=[Fetch(i, i - 3, name(i), tokens(i)) for i in (3, 4, 5)]))
    assert {news.kind for news in until(tiers, 3)} == {"fetched"}
    tiers.load([(0, 6), (2, 1), (1, 7)])  # two side by side, and one elsewhere
    verification = tiers.take_verification()
    assert verification is not None
    assert tiers.corrupt_blocks(verification) == {1}
    assert (value(kv, 6), value(kv, 1)) == (3, 5)
    tiers.load([(0, 6)])
    assert tiers.take_verification() is None, "once is enough"
    tiers.begin(Plan(2, stores=[(6, 2)]))
    tiers.load([(2, 8)])
    assert tiers.take_verification() is None, "a block that the device stored needs none"
    assert value(kv, 8) == 3
    deadline = time.monotonic() + 10
    while record.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not record.exists()
    tiers.close(timeout=0.2)


def test_a_save_of_a_slot_that_holds_something_else_by_now_is_not_done(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = make()
    gate = threading.Event()
    real = TierStore._save
    monkeypatch.setattr(TierStore, "_save", lambda *a: (gate.wait(10), real(*a))[1])
    tiers.begin(Plan(1, stores=[(3, 0)], saves=[Save(0, name(3), tokens(3))]))
    tiers.begin(Plan(2, stores=[(4, 0)], saves=[Save(0, name(4), tokens(4))]))
    gate.set()
    # On a GPU a save starts when its copy has arrived, so the events may come in either order.
    assert sorted(until(tiers, 2), key=lambda event: event.kind) == [
        DiskEvent("saved", name(4)),
        DiskEvent("unsaved", name(3), reason="overtaken"),
    ]


def test_a_queue_that_cannot_be_worked_off_is_cut(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(TierStore, "_save", lambda *a: gate.wait(10))
    tiers = make(slots=4)
    for i in range(20):
        tiers.begin(Plan(1, stores=[(1, i % 4)], saves=[Save(i % 4, name(i), tokens(i))]))
    gate.set()
    why = [news.reason for news in until(tiers, 20)]
    assert why.count("behind") >= 20 - 4 - 2


def test_a_disk_that_does_not_answer_is_given_up(
    kv: KVStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it brings after that reaches no slot: by then something else is there."""
    monkeypatch.setattr(module, "DISK_TIMEOUT", 0.05)
    tiers, gate = make(), threading.Event()
    tiers.begin(Plan(1, stores=[(3, 0)], saves=[Save(0, name(3), tokens(3))]))
    until(tiers, 1)
    real = Record.read
    monkeypatch.setattr(Record, "read", lambda *a: (gate.wait(10), real(*a))[1])
    tiers.begin(Plan(2, fetches=[Fetch(1, 1, name(3), tokens(3)), Fetch(2, 2, name(3), tokens(3))]))
    late = until(tiers, 2)
    assert [(n.kind, n.fetch_id, n.reason) for n in late] == [
        ("missed", 1, "late"),
        ("missed", 2, "late"),
    ]
    tiers.begin(Plan(3, stores=[(5, 1)]))
    gate.set()
    time.sleep(0.1)
    assert tiers.collect_events(wait=True) == [], "news comes once"
    tiers.load([(1, 8)])
    synchronize()
    assert value(kv, 8) == 5


@pytest.mark.parametrize("error", [DiskMiss("corrupt"), OSError("odd"), RuntimeError("a bug")])
def test_whatever_goes_wrong_is_a_miss(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Record, "__init__", broken)
    monkeypatch.setattr(Disk, "write", broken)
    tiers = make()
    why = error.reason if isinstance(error, DiskMiss) else "error"
    for step in range(3):
        tiers.begin(Plan(step, fetches=[Fetch(step + 1, 1, name(1), tokens(1))]))
        assert until(tiers, 1) == [DiskEvent("missed", name(1), step + 1, why)], (
            "and the threads live on"
        )
    tiers.begin(Plan(4, stores=[(1, 0)], saves=[Save(0, name(1), tokens(1))]))
    assert until(tiers, 1)[0].kind == "unsaved"


def test_a_disk_that_failed_is_left_alone_for_a_while(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(*_: Any) -> None:
        tries.append(1)
        raise DiskMiss("full")

    monkeypatch.setattr(Disk, "write", full)
    tiers = make()
    for i in range(5):
        tiers.begin(Plan(i, stores=[(1, 0)], saves=[Save(0, name(i), tokens(i))]))
        until(tiers, 1)
    assert len(tries) == 1


def test_the_same_fault_is_logged_once_in_a_while(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tiers = make()
    tiers.begin(Plan(1, stores=[(1, 0)], saves=[Save(0, name(1), tokens(1))]))
    until(tiers, 1)
    assert tiers.disk is not None
    record = tiers.disk.folder / f"{name(1).hex()}.kv"
    sound = record.read_bytes()
    with caplog.at_level(logging.WARNING):
        for i in range(10):
            record.write_bytes(sound[:-1])
            tiers.begin(Plan(2, fetches=[Fetch(i + 1, 1, name(1), tokens(1))]))
            assert until(tiers, 1)[0].reason == "corrupt"
    assert len([r for r in caplog.records if "corrupt" in r.getMessage()]) == 1


def test_a_fetch_that_was_overtaken_is_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be awaited, and what came into its slot meanwhile be given up with it."""
    monkeypatch.setattr(module, "MAX_READERS", 1)
    tiers, gate, real = make(), threading.Event(), Record.read
    tiers.begin(Plan(1, stores=[(3, 0)], saves=[Save(0, name(3), tokens(3))]))
    until(tiers, 1)
    monkeypatch.setattr(Record, "read", lambda *a: (gate.wait(10), real(*a))[1])
    tiers.begin(Plan(2, fetches=[Fetch(1, 1, name(3), tokens(3)), Fetch(2, 2, name(3), tokens(3))]))
    tiers.begin(Plan(3, stores=[(5, 2)]))  # the step that asked had failed
    gate.set()
    assert [(n.fetch_id, n.kind, n.reason) for n in until(tiers, 2)] == [
        (1, "fetched", ""),
        (2, "missed", "overtaken"),
    ]


def test_a_directory_removed_under_way_is_a_miss_and_then_used_again(
    make: Make, tmp_path: Path
) -> None:
    tiers = make()
    tiers.begin(Plan(1, stores=[(1, 0)], saves=[Save(0, name(1), tokens(1))]))
    until(tiers, 1)
    shutil.rmtree(tmp_path / "kv")
    tiers.begin(Plan(2, fetches=[Fetch(1, 1, name(1), tokens(1))]))
    assert until(tiers, 1)[0].reason == "gone"
    tiers.begin(Plan(3, stores=[(2, 0)], saves=[Save(0, name(2), tokens(2))]))
    assert until(tiers, 1)[0].kind == "saved"


def test_what_others_write_becomes_known(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP_INTERVAL", 0.0)
    one, other = make(), make()
    other.begin(Plan(1, stores=[(1, 0)], saves=[Save(0, name(1), tokens(1))]))
    until(other, 2)
    one.begin(Plan(1, stores=[(2, 0)], saves=[Save(0, name(2), tokens(2))]))
    listed = until(one, 2)[0]
    assert listed.kind == "listed" and listed.listed_hashes == {name(1)}


def test_closing_writes_what_waits_to_be_written(make: Make) -> None:
    tiers = make(slots=BLOCKS)
    tiers.begin(
        Plan(
            1,
            stores=[(b, b - 1) for b in range(1, 9)],
            saves=[Save(b - 1, name(b), tokens(b)) for b in range(1, 9)],
        )
    )
    tiers.close()
    assert tiers.disk is not None and tiers.disk.sweep() == {name(b) for b in range(1, 9)}
    tiers.close()


def test_records_are_read_in_parts_by_several_readers(
    kv: KVStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which bring what is not whole to nobody, and say so once."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(module, "PART_BYTES", 64)
    tiers = make(slots=BLOCKS)
    for block in range(1, BLOCKS + 1):
        kv.tensor[block].view(-1).copy_(torch.arange(kv.tensor[block].numel()) + block)
    want = kv.tensor.clone()
    saves = [Save(b - 1, name(b), tokens(b)) for b in range(1, BLOCKS + 1)]
    tiers.begin(Plan(1, stores=[(b, b - 1) for b in range(1, BLOCKS + 1)], saves=saves))
    until(tiers, BLOCKS)
    kv.tensor.zero_()
    assert tiers.disk is not None
    short = Path(tiers.disk.path(name(4)))
    # the second of its parts is not whole, others are not there
    short.write_bytes(short.read_bytes()[: PAGE_BYTES + 70])
    Path(tiers.disk.path(name(5))).unlink()
    # the first part is odd, and the others are not; or all of KV is, and no part
    for b, at in ((6, PAGE_BYTES - 1), (7, PAGE_BYTES + 200)):
        record = Path(tiers.disk.path(name(b)))
        data = bytearray(record.read_bytes())
        data[at] ^= 1
        record.write_bytes(data)
    real, seen = Record.read, set()

    def read(self: Record, into: memoryview, at: int = 0) -> None:
        seen.add((threading.get_ident(), at))
        time.sleep(0.001)
        real(self, into, at)

    monkeypatch.setattr(Record, "read", read)
    tiers.begin(
        Plan(2, fetches=[Fetch(b, b - 1, name(b), tokens(b)) for b in range(1, BLOCKS + 1)])
    )
    news = {n.fetch_id: (n.kind, n.reason) for n in until(tiers, BLOCKS)}
    gone = {b: ("missed", "gone" if b == 5 else "corrupt") for b in (4, 5, 6, 7)}
    assert news == {b: gone.get(b, ("fetched", "")) for b in range(1, BLOCKS + 1)}
    assert {0, 64} < {at for _, at in seen} and len({who for who, _ in seen}) > 1
    for b in set(range(1, BLOCKS + 1)) - set(gone):
        tiers.load([(b - 1, b)])
        synchronize()
        assert torch.equal(kv.tensor[b], want[b])
    assert sorted(tiers.buffer_of + tiers._spare_buffers) == list(range(len(tiers.buffers))), (
        "a buffer is lost, or used twice"
    )


@pytest.mark.parametrize("part", [64, 2**20])
def test_host_blocks_change_contents_under_load(
    part: int, kv: KVStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores, saves and fetches of few slots at once: what is fetched is what its name says, or is
    not loaded."""
    monkeypatch.setattr(module, "PART_BYTES", part)
    tiers, g = make(slots=2), random.Random(1)
    holds: dict[int, int] = {}  # slot -> content that is ready
    pending: dict[int, tuple[int, int]] = {}  # ticket -> slot, content
    loaded = 0
    for step in range(1, 1500):
        plan = Plan(step)
        slot = g.randrange(2)
        busy = {s for s, _ in pending.values()}
        if slot not in busy:
            i = g.randrange(1, 6)
            holds.pop(slot, None)
            if g.random() < 0.5:
                fill(kv, 1, i)
                plan.stores.append((1, slot))
                plan.saves.append(Save(slot, name(i), tokens(i)))
                holds[slot] = i
            else:
                plan.fetches.append(Fetch(step, slot, name(i), tokens(i)))
                pending[step] = slot, i
        tiers.begin(plan)
        fill(kv, 1, 77)
        for news in tiers.collect_events(wait=g.random() < 0.5):
            if news.fetch_id:
                at, i = pending.pop(news.fetch_id)
                if news.kind == "fetched":
                    holds[at] = i
        for at, i in holds.items():
            tiers.load([(at, 2)])
            synchronize()
            assert value(kv, 2) == i
            loaded += 1
    assert loaded > 500
    while tiers._pending:  # what is late is a miss, so this ends; news of saves comes in between
        tiers.collect_events(wait=True)
    assert sorted(tiers.buffer_of + tiers._spare_buffers) == list(range(len(tiers.buffers))), (
        "a buffer is lost, or used twice"
    )


def test_a_step_timer_separates_loads_from_the_rest() -> None:
    timer = StepTimer(torch.device(DEVICE))
    time.sleep(0.01)
    timer.mark()
    timer.mark()
    loads, rest = timer.seconds()
    assert loads >= 0 and rest >= 0 and (DEVICE == "cuda" or loads > 0.009)


@pytest.mark.gpu
def test_page_locked_memory_is_given_back(kv: KVStore, make: Make) -> None:
    for _ in range(3):
        tiers = make(disk=False)
        assert tiers.buffers.is_pinned()
        tiers.close()


def test_a_record_that_cannot_be_opened_holds_up_no_other(
    kv: KVStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)  # three readers
    monkeypatch.setattr(module, "PART_BYTES", 16)
    monkeypatch.setattr(module, "OPEN_TIMEOUT", 0.05)
    tiers = make(slots=BLOCKS)
    tiers.begin(
        Plan(
            1,
            stores=[(b, b - 1) for b in (1, 2, 3)],
            saves=[Save(b - 1, name(b), tokens(b)) for b in (1, 2, 3)],
        )
    )
    synchronize()
    until(tiers, 3)
    gate, real = threading.Event(), Record.__init__

    def opens(self: Record, disk: Disk, h: bytes, prompt: array[int]) -> None:
        if h == name(1):
            gate.wait(10)
        real(self, disk, h, prompt)

    monkeypatch.setattr(Record, "__init__", opens)
    tiers.begin(Plan(2, fetches=[Fetch(b, b + 2, name(b), tokens(b)) for b in (1, 2, 3)]))
    assert {(n.fetch_id, n.kind) for n in until(tiers, 2, seconds=1.5)} == {
        (2, "fetched"),
        (3, "fetched"),
    }
    gate.set()
    assert [(n.kind, n.reason) for n in until(tiers, 1)] == [("missed", "late")]
    assert sorted(tiers.buffer_of + tiers._spare_buffers) == list(range(len(tiers.buffers))), (
        "a buffer is lost, or used twice"
    )
