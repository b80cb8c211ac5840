"""The tier index, and the loads, stores and fetches that the scheduler plans with it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from itertools import count

import pytest

from octavo.core import reasons
from octavo.core.blocks import BlockPool, FullBlock, chain_hash
from octavo.core.engine import Engine
from octavo.core.offload_costs import PROBE_INTERVAL, OffloadCosts
from octavo.core.scheduler import Scheduler
from octavo.core.tier_index import TierIndex
from octavo.events import Admitted, Event
from octavo.params import SamplingParams
from octavo.types import DiskEvent, DiskWait, Item, Plan, Request, Sequence, StepResult
from tests import oracle
from tests.fake_runner import FakeDisk, FakeRunner
from tests.workloads import make_engine, run_dry

SIZE = 4


def request(name: str, length: int = 17, max_tokens: int = 2, **more: str) -> Request:
    g = random.Random(name)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return Request(name, [g.randrange(1, oracle.VOCAB) for _ in range(length)], params, **more)


def small(host: int, disk: FakeDisk | None = None, blocks: int = 6, depth: int = 1) -> Engine:
    """Return an engine whose pool holds one request of 17 tokens and little more."""
    return make_engine(blocks, SIZE, slots=2, budget=64, depth=depth, host=host, disk=disk)


names = count()


def complete(engine: Engine, request: Request) -> tuple[list[int], int]:
    """Run a copy of the request. Return its tokens, and how many tokens of its prompt were cached."""
    engine.add(
        Request(
            f"{request.id} {next(names)}",
            request.prompt,
            request.params,
            cache_salt=request.cache_salt,
        )
    )
    tokens, cached = [], 0
    for _ in range(500):
        for out in engine.step():
            tokens += out.tokens
            cached = max(cached, out.cached_tokens)
        engine.scheduler.check()
        if engine.idle:
            assert tokens == oracle.generate(request.prompt, request.params, 1)
            return tokens, cached
    raise AssertionError("no progress")


# ---- host memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_evicted_prompt_is_loaded_instead_of_computed(depth: int) -> None:
    engine = small(host=20, depth=depth)
    a, b = request("a"), request("b")
    assert complete(engine, a)[1] == 0
    complete(engine, b)
    before = engine.scheduler.counters.computed_tokens
    assert complete(engine, a)[1] == 16, (
        "all of the prompt's full blocks: some from the device, the rest from host memory"
    )
    assert engine.scheduler.counters.computed_tokens - before == 1 + 1, (
        "the prompt's last token, and the first generated one"
    )
    tiers = engine.scheduler.counters.tiers
    assert tiers.loads > 0 and tiers.host_tokens == tiers.loads * SIZE


def test_without_a_tier_it_is_computed_again() -> None:
    engine = small(host=0)
    a, b = request("a"), request("b")
    complete(engine, a)
    complete(engine, b)
    assert complete(engine, a)[1] < 16


def test_a_block_in_host_memory_is_not_stored_again() -> None:
    engine = small(host=20)
    a, b = request("a"), request("b")
    for each in (a, b, a, b, a, b):
        complete(engine, each)
    assert engine.scheduler.counters.tiers.stores <= 2 * 4, "each full block once"


def test_a_full_tier_evicts_the_least_recently_used_block() -> None:
    engine = small(host=4)
    for name in "abcdef":
        complete(engine, request(name))
    tiers = engine.scheduler.tiers
    assert tiers is not None and tiers.counters.evictions > 0
    assert complete(engine, request("e"))[1] > 0 and complete(engine, request("a"))[1] == 0


def test_a_resumed_sequence_loads_its_blocks() -> None:
    def recomputed(host: int) -> int:
        engine = make_engine(8, SIZE, slots=4, budget=64, depth=1, host=host)
        requests = [request(f"r{i}", 9, max_tokens=16) for i in range(4)]
        got: dict[str, list[int]] = {r.id: [] for r in requests}
        for r in requests:
            engine.add(r)
        while not engine.idle:
            for out in engine.step():
                got[out.request_id] += out.tokens
            engine.scheduler.check()
        assert all(got[r.id] == oracle.generate(r.prompt, r.params, 1) for r in requests)
        assert engine.scheduler.counters.preemptions > 0
        return engine.scheduler.counters.recomputed_tokens

    assert recomputed(host=50) < recomputed(host=0) / 2


def test_salts_share_nothing_in_any_tier() -> None:
    disk = FakeDisk(slowest=1)
    engine = small(host=20, disk=disk)
    mine, other = request("a", cache_salt="mine"), request("b")
    complete(engine, mine)
    complete(engine, other)
    run_dry(engine)
    for salt in ("", "theirs"):
        assert complete(engine, Request("a", mine.prompt, mine.params, cache_salt=salt))[1] == 0
    again = small(host=20, disk=disk)
    assert complete(again, Request("a", mine.prompt, mine.params, cache_salt="theirs"))[1] == 0
    assert complete(again, mine)[1] > 0


def test_the_cache_can_be_emptied_while_steps_are_in_flight() -> None:
    engine = small(host=20, depth=3)
    for name in "ab":
        complete(engine, request(name))
    engine.add(request("a"))
    engine.step()
    engine.scheduler.clear_cache()
    run_dry(engine)
    tiers = engine.scheduler.tiers
    assert tiers is not None
    assert engine.scheduler.pool.num_cached <= 4 and not tiers.filling
    engine.scheduler.check()


@pytest.mark.parametrize("when", ["launch", "wait"])
def test_blocks_loaded_by_a_failed_step_are_not_reused(when: str) -> None:
    """The loads of a failed step may not have happened: later requests must not read its blocks."""
    engine = small(host=20)
    a, b = request("a"), request("b")
    complete(engine, a)
    complete(engine, b)
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    engine.add(Request("failing", a.prompt, a.params))
    runner.failing, runner.failures, runner.dice = (
        1.0,
        1,
        random.Random(10 if when == "launch" else 1),
    )
    (out,) = engine.step()
    assert out.finish_reason == "error" and out.error == f"Planted: {when}"
    engine.scheduler.check()
    complete(engine, a)


# ---- disk ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_new_engine_finds_what_an_earlier_one_left_on_disk(depth: int) -> None:
    disk = FakeDisk(slowest=3)
    engine = small(host=20, disk=disk, depth=depth)
    for name in "abc":
        complete(engine, request(name))
    for _ in range(10):
        complete(engine, request("short", 3))  # time for the disk
    again = small(host=20, disk=disk, depth=depth)
    assert complete(again, request("a"))[1] == 16
    assert again.scheduler.counters.tiers.disk_tokens == 16


def test_a_block_goes_to_disk_with_all_that_come_before_it() -> None:
    """The first block of a common prefix never leaves the device, and on disk the blocks behind it
    would be useless without it."""
    disk = FakeDisk(slowest=1)
    engine = small(host=20, disk=disk, blocks=8)
    shared = request("a", 33).prompt[:8]
    for i in range(6):
        prompt = shared + request(f"tail {i}", 12).prompt
        complete(engine, Request("x", prompt, request("x").params))
    run_dry(engine)
    complete(engine, request("short", 3))
    tiers = engine.scheduler.tiers
    assert tiers is not None
    first = chain_hash(b"", array("i", shared[:4]))
    assert first in engine.scheduler.pool.hash_index and first in disk.records


def test_a_flush_saves_the_remaining_blocks_of_the_device() -> None:
    disk = FakeDisk(slowest=1)
    engine = small(host=20, disk=disk, blocks=50)
    complete(engine, request("a"))
    plan = engine.scheduler.flush()
    assert len(plan.stores) == len(plan.saves) == 4
    engine.scheduler.commit(plan, engine.runner.launch(plan).wait())
    engine.scheduler.commit(empty := Plan(99), engine.runner.launch(empty).wait())
    assert len(disk.records) == 4


def test_others_go_on_while_one_waits_for_the_disk() -> None:
    disk = FakeDisk(slowest=1)
    engine = small(host=20, disk=disk)
    for name in "abc":
        complete(engine, request(name))
    disk.never = 1.0
    again = make_engine(30, SIZE, slots=4, budget=64, depth=1, host=20, disk=disk)
    again.add(request("a"))
    again.add(
        Request(
            "like a",
            [*request("a").prompt[:8], 1, 2, 3, 4, 5, 6],
            request("a").params,
            cache_salt="x",
        )
    )
    again.add(request("other"))
    order = [out.request_id for _ in range(60) for out in again.step() if out.finish_reason]
    assert order == ["like a", "other", "a"], "the disk never answers: computed in the end"
    assert again.scheduler.counters.tiers.misses == {"late": 4}
    run_dry(again)


def test_a_sequence_fetches_from_disk_only_once() -> None:
    """The disk lists blocks and never returns them: a sequence that fetched twice would wait for
    ever."""
    disk = FakeDisk(slowest=1, lists=1.0)
    engine = small(host=20, disk=disk)
    for name in "abc":
        complete(engine, request(name))
    disk.missing = 1.0
    again = small(host=20, disk=disk)
    assert complete(again, request("a"))[1] == 0
    assert again.scheduler.counters.tiers.fetches == 4
    assert again.scheduler.counters.tiers.misses == {"fault": 4}


def test_no_more_blocks_are_fetched_than_fit() -> None:
    disk = FakeDisk(slowest=1)
    engine = small(host=20, disk=disk)
    for name in "abc":
        complete(engine, request(name))
    again = small(host=2, disk=disk)
    assert complete(again, request("a"))[1] == 8, "two blocks of four"


def test_fetched_blocks_do_not_evict_ready_ones() -> None:
    disk = FakeDisk(slowest=1)
    engine = small(host=20, disk=disk)
    for name in "abc":
        complete(engine, request(name))
    again = small(host=3, disk=disk)
    a = request("a")
    start = Request("a", a.prompt[:13], a.params)
    assert complete(again, start)[1] == 12, "three blocks, through all three blocks of host memory"
    complete(again, request("d", 21, max_tokens=1))  # takes the pool
    assert complete(again, a)[1] >= 12, "there is no room for the fourth block beside them"


def restarted_with_fetches(
    disk: FakeDisk, blocks: int = 6, fetch_ids: Iterator[int] | None = None
) -> tuple[Scheduler, Sequence, list[int]]:
    """Return a restarted scheduler, a sequence whose four blocks are being fetched from disk, and
    the ids of these fetches."""
    engine = small(host=20, disk=disk)
    for name in "abc":
        complete(engine, request(name))
    scheduler = small(host=20, disk=disk, blocks=blocks).scheduler
    assert scheduler.tiers is not None
    if fetch_ids is not None:
        scheduler.tiers.attach_store(disk.records, fetch_ids)
    scheduler.add(request("a"))
    plan = scheduler.plan()
    scheduler.commit(plan, StepResult([]))
    (seq,) = scheduler.waiting
    return scheduler, seq, [fetch.fetch_id for fetch in plan.fetches]


def fetched(*fetch_ids: int) -> StepResult:
    return StepResult(
        [], disk_events=[DiskEvent("fetched", fetch_id=fetch_id) for fetch_id in fetch_ids]
    )


def test_fetched_blocks_are_promoted_while_others_are_read() -> None:
    scheduler, seq, (first, second, third, fourth) = restarted_with_fetches(FakeDisk(slowest=1))
    scheduler.commit(scheduler.plan(), fetched(first, second, fourth))
    plan = scheduler.plan()
    assert len(plan.loads) == 3 and plan.has_work and not plan.items, (
        "all that were fetched, in spite of the gap"
    )
    scheduler.check()
    ahead = scheduler.plan()
    assert not ahead.loads and ahead.awaits_disk, "each block is loaded once"
    scheduler.commit(plan, StepResult([]))
    assert scheduler.pool.num_cached == 3 and scheduler.pool.num_available == 6, (
        "cached, and held by no sequence"
    )
    scheduler.commit(ahead, fetched(third))
    plan = scheduler.plan()
    assert not plan.items and len(plan.loads) == 1, (
        "no sequence reads a block from disk before its checksum was compared"
    )
    scheduler.commit(plan, StepResult([]))
    plan = scheduler.plan()
    assert (
        [item.num_tokens for item in plan.items] == [1]
        and not plan.loads
        and seq.cached_tokens == 16
    )
    scheduler.check()


def test_corrupt_blocks_are_recomputed() -> None:
    scheduler, seq, fetch_ids = restarted_with_fetches(FakeDisk(slowest=1))
    scheduler.commit(scheduler.plan(), fetched(*fetch_ids))
    plan = scheduler.plan()
    assert len(plan.loads) == 4 and scheduler.tiers is not None
    scheduler.commit(plan, StepResult([], corrupt_host_blocks={plan.loads[2][0]}))
    assert (
        scheduler.tiers.find(seq.block_hashes[2], seq.tokens[8:12]) is None
        and seq.block_hashes[2] not in scheduler.tiers.on_disk
    )
    assert scheduler.tiers.counters.misses == {"corrupt": 1}
    plan = scheduler.plan()
    assert [item.num_tokens for item in plan.items] == [9] and seq.cached_tokens == 8, (
        "all tokens behind the corrupt block"
    )
    scheduler.check()


def test_no_more_blocks_are_fetched_than_can_be_promoted() -> None:
    scheduler, seq, _ = restarted_with_fetches(FakeDisk(slowest=1))
    assert scheduler.tiers is not None
    for reserved, num_fetches in ((6, 0), (4, 2), (0, 4)):
        scheduler.tiers.clear()
        scheduler.tiers.fetching.clear()
        plan, seq.disk_wait = Plan(9), DiskWait.NOT_STARTED
        scheduler.tiers.request_fetches(seq, [], [], plan, keep_available=reserved)
        assert len(plan.fetches) == num_fetches


def test_blocks_that_cannot_be_promoted_are_computed() -> None:
    scheduler, seq, fetch_ids = restarted_with_fetches(FakeDisk(slowest=1))
    scheduler.commit(scheduler.plan(), fetched(*fetch_ids))
    assert scheduler.tiers is not None
    match = scheduler.prefix.match(seq)
    assert len(match.host_hits) == 4
    assert not scheduler.prefix.request_disk(seq, match, Plan(9), keep_available=6)
    usable = scheduler.prefix.usable_match(match)
    assert usable.blocks == [] and usable.host_hits == [] and len(match.host_hits) == 4
    admissions: list[Event] = []
    scheduler.events.subscribe(admissions.append, Admitted)
    scheduler.reports.admitted(seq, usable)
    (admitted,) = admissions
    assert isinstance(admitted, Admitted) and admitted.match_end == reasons.NO_BLOCK_TO_LOAD


def test_a_sequence_that_need_not_wait_does_not_wait_for_room_that_is_made_for_it() -> None:
    """Otherwise an urgent prompt would wait for the disk after it has preempted others."""
    scheduler, seq, fetch_ids = restarted_with_fetches(FakeDisk(slowest=1))
    scheduler.commit(scheduler.plan(), fetched(*fetch_ids))
    assert scheduler.tiers is not None
    match = scheduler.prefix.match(seq)
    plan = Plan(9)
    assert not scheduler.prefix.request_disk(seq, match, plan, keep_available=6)
    assert not scheduler.prefix.request_disk(seq, match, plan, keep_available=0)
    assert not plan.loads
    scheduler.tiers.transfers_ended += 1
    assert scheduler.prefix.request_disk(seq, match, plan, keep_available=0)
    assert len(plan.loads) == 4


def test_a_match_changes_nothing() -> None:
    """Loading does not pay, except for a probe now and then. A lookup must not use the probe up."""
    engine = small(host=20)
    a, b = request("a"), request("b")
    for asked_for in (a, b):
        complete(engine, asked_for)
    tiers = engine.scheduler.tiers
    assert tiers is not None
    tiers.costs.prefill_tokens, tiers.costs.prefill_seconds = 1e9, 1.0
    tiers.costs.refusals = PROBE_INTERVAL - 1
    engine.add(a)
    (seq,) = engine.scheduler.waiting
    order = list(tiers.ready)
    matches = [engine.scheduler.prefix.match(seq) for _ in range(3)]
    assert matches[0] == matches[1] == matches[2]
    assert matches[0].host_hits and not matches[0].loading_pays
    assert list(tiers.ready) == order and tiers.costs.refusals == PROBE_INTERVAL - 1
    plan = engine.scheduler.plan()
    assert plan.loads and tiers.costs.refusals == PROBE_INTERVAL and not tiers.counters.refused


def test_no_block_is_promoted_into_blocks_that_others_need() -> None:
    scheduler, seq, (first, *_) = restarted_with_fetches(FakeDisk(slowest=1))
    scheduler.add(request("d", 24, max_tokens=1))  # all of the pool
    scheduler.plan()
    assert not scheduler.pool.available_blocks
    scheduler.commit(Plan(99), fetched(first))
    assert not scheduler.plan().loads and seq.disk_wait is DiskWait.WAITING
    scheduler.check()


@pytest.mark.parametrize("end", ["fail", "clear", "abort"])
def test_the_blocks_of_an_ended_promotion_are_released(end: str) -> None:
    scheduler, _, (first, *_) = restarted_with_fetches(FakeDisk(slowest=1))
    scheduler.commit(scheduler.plan(), fetched(first))
    plan = scheduler.plan()
    assert len(plan.loads) == 1 and scheduler.pool.num_available == 5
    if end == "fail":
        scheduler.fail(plan, "planted")
    else:
        scheduler.clear_cache() if end == "clear" else scheduler.abort("a")
        scheduler.check()
        scheduler.commit(plan, StepResult([]))
    assert scheduler.pool.num_cached == (end == "abort"), (
        "the blocks of an aborted request are still valid"
    )
    assert (
        scheduler.tiers is not None
        and not scheduler.tiers.promoting
        and scheduler.pool.num_available == 6
    )
    scheduler.check()


# ---- costs of transfers --------------------------------------------------------------------------


def prefill(tokens: int) -> Plan:
    return Plan(1, items=[Item(1, 0, 0, 0, tokens, True, tokens)])


def test_blocks_that_are_computed_faster_are_not_loaded() -> None:
    costs = OffloadCosts(SIZE, load_seconds=0.1, fetch_seconds=1.0)
    assert costs.loading_pays() and costs.loading_pays(disk=True), (
        "without measurements, loading is the better guess"
    )
    costs.observe_step(prefill(100), StepResult([], compute_seconds=10.0))
    assert costs.loading_pays() and not costs.loading_pays(disk=True), "0.4 s to compute a block"
    for _ in range(20):
        costs.observe_step(prefill(100), StepResult([], compute_seconds=1.0))
    assert not costs.loading_pays(), "0.04 s"
    probes = []
    for _ in range(PROBE_INTERVAL):
        probes.append(costs.probe_is_due)
        costs.count_refusal()
    assert probes.count(True) == 1, "now and then, to measure it again"
    for _ in range(30):
        costs.observe_step(Plan(1, loads=[(0, 1)] * 10), StepResult([], load_seconds=0.01))
    assert costs.loading_pays() and costs.tokens_in_load_time(10) == 1


def test_short_steps_do_not_measure_the_cost_of_a_token() -> None:
    costs = OffloadCosts(SIZE, load_seconds=0.1, fetch_seconds=1.0)
    costs.observe_step(prefill(2), StepResult([], compute_seconds=10.0))
    costs.observe_step(
        Plan(1, items=[Item(1, 0, 0, None, 1, True, 9)] * 30), StepResult([], compute_seconds=10.0)
    )
    assert not costs.prefill_tokens


def test_a_slow_disk_is_given_up_while_waiting() -> None:
    disk = FakeDisk(slowest=1)
    engine = small(host=20, disk=disk)
    for name in "abc":
        complete(engine, request(name))
    again = small(host=20, disk=disk)
    tiers = again.scheduler.tiers
    assert tiers is not None
    tiers.costs.prefill_tokens, tiers.costs.prefill_seconds = 1e6, 1.0
    tiers.costs.load_seconds = tiers.costs.fetch_seconds = 1e-9
    again.add(request("a"))
    again.scheduler.plan()
    (seq,) = again.scheduler.waiting
    assert seq.disk_wait is DiskWait.WAITING
    first = min(tiers.fetching)
    tiers.commit(
        Plan(2), StepResult([], disk_events=[DiskEvent("fetched", fetch_id=first, seconds=1.0)])
    )
    plan = again.scheduler.plan()
    assert not plan.items and len(plan.loads) == 1, "the fetched block is promoted"
    again.scheduler.commit(plan, StepResult([]))
    assert [item.num_tokens for item in again.scheduler.plan().items] == [
        13
    ] and seq.disk_wait is DiskWait.DONE, "the other blocks are computed"


# ---- the index itself ----------------------------------------------------------------------------


def test_a_colliding_hash_is_a_miss_here_too() -> None:
    pool, plan = BlockPool(1, 2), Plan(1)
    tiers = TierIndex(pool, num_host_blocks=2, block_bytes=100)
    a, b = array("i", [1, 2]), array("i", [3, 4])
    pool.publish(FullBlock(block := pool.allocate(), b"h", a, b""))
    pool.release(block)
    pool.allocate()
    tiers.demote(plan)
    assert plan.stores == [(1, 1)] and tiers.find(b"h", a) is None, (
        "not before the step is committed"
    )
    tiers.commit(plan, StepResult([]))
    assert tiers.find(b"h", a) == 1 and tiers.find(b"h", b) is None
    tiers.check()


def test_check_notices_a_lost_host_block() -> None:
    tiers = TierIndex(BlockPool(1, 2), num_host_blocks=2, block_bytes=100)
    tiers.check()
    tiers._allocate()
    with pytest.raises(AssertionError, match="lost"):
        tiers.check()


def test_an_answer_to_an_earlier_schedulers_fetch_is_ignored() -> None:
    """Schedulers that use one tier store draw fetch ids from its counter."""
    fetch_ids = count(1)
    _, _, old = restarted_with_fetches(FakeDisk(slowest=1), fetch_ids=fetch_ids)
    scheduler, _, new = restarted_with_fetches(FakeDisk(slowest=1), fetch_ids=fetch_ids)
    assert old and new and not set(old) & set(new)
    tiers = scheduler.tiers
    assert tiers is not None
    scheduler.commit(Plan(99), fetched(*old))
    assert sorted(tiers.fetching) == new, "all fetches are still awaited"


def test_an_invalidated_block_is_in_no_tier() -> None:
    """A block that is ready, was fetched from disk or is being filled: its host block is released,
    and the next content of the host block does not count as unverified."""
    tiers = TierIndex(BlockPool(1, SIZE), num_host_blocks=3, block_bytes=2**20, has_disk=True)
    tokens = array("i", [1, 2, 3, 4])
    scheduler, _, fetch_ids = restarted_with_fetches(FakeDisk(slowest=1))
    assert scheduler.tiers is not None
    scheduler.commit(Plan(99), fetched(fetch_ids[0]))
    scheduler.tiers.invalidate(list(scheduler.tiers.ready))
    scheduler.tiers.check()
    assert not scheduler.tiers.ready and not scheduler.tiers.unverified
    plan = Plan(1)
    tiers._store(FullBlock(1, b"h", tokens, b""), plan)
    tiers.invalidate([b"h"])
    tiers.commit(plan, StepResult([]))
    tiers.check()
    assert tiers.find(b"h", tokens) is None and len(tiers.free_blocks) == 3
