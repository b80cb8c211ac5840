"""What a beam search does to plans, queues and blocks. test_equivalence.py tests that it finds the
right texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core import trace
from octavo.core.engine import Engine
from octavo.core.policy import Fair
from octavo.errors import InvalidRequest
from octavo.params import SamplingParams
from octavo.types import Output, Plan, Request
from tests import oracle
from tests.fake_runner import Handle
from tests.toy_guide import ToyGuide
from tests.workloads import check_beams, make_engine


def request(name: str, width: int = 4, length: int = 8, prompt: int = 6, **options: Any) -> Request:
    fields = {"n": 2, "best_of": width, "use_beam_search": True, "max_tokens": length, **options}
    return Request(
        name, [ord(name[0]) % oracle.VOCAB + 1, *range(1, prompt)], SamplingParams(**fields)
    )


def plain(name: str, length: int = 8, **options: Any) -> Request:
    return Request(
        name, [9, 8, 7], SamplingParams(max_tokens=length, ignore_eos=True, seed=1, **options)
    )


def run(engine: Engine, *requests: Request) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for search in requests:
        engine.add(search)
    while not engine.idle:
        for out in engine.step():
            outputs.setdefault(out.request_id, []).append(out)
        engine.scheduler.check()
    engine.scheduler.pool.check([])
    return outputs


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_beam_search_is_reported_once_at_its_end(depth: int) -> None:
    searches = request("a"), request("b", width=3, ignore_eos=True)
    outputs = run(make_engine(60, 4, slots=8, budget=16, depth=depth), *searches)
    for search in searches:
        check_beams(search, outputs[search.id])


@pytest.mark.parametrize("depth", [2, 3])
def test_beams_wait_until_all_have_reported_and_other_requests_go_on(depth: int) -> None:
    engine = make_engine(60, 4, slots=8, budget=16, depth=depth)
    engine.add(plain("other", 20))
    engine.add(request("a", width=3, length=6, ignore_eos=True))
    scheduler = engine.scheduler
    first, second = scheduler.plan(), scheduler.plan()
    assert [len(p.items) for p in (first, second)] == [2, 1]
    scheduler.commit(first, engine.runner.launch(first).wait())
    third, fourth = scheduler.plan(), scheduler.plan()
    assert len(third.items) == 4 and len(third.slot_fills) >= 2, (
        "three beams, of which two were forked"
    )
    assert len(fourth.items) == 1


def test_forks_share_blocks_and_copy_the_one_they_write() -> None:
    engine = make_engine(60, 4, slots=8, budget=32, depth=1)
    engine.add(request("a", width=4, length=4, prompt=10, ignore_eos=True))
    engine.step()
    beams = engine.scheduler.decoding
    assert (
        len(beams) == 4
        and len({tuple(s.block_table) for s in beams}) == 1
        and engine.scheduler.pool.ref_counts[beams[0].block_table[0]] == 4
    )
    engine.step()
    assert engine.scheduler.counters.copies == 3, (
        "10 tokens end in the middle of the third block, and one beam keeps it"
    )
    assert len({tuple(s.block_table[:2]) for s in engine.scheduler.decoding}) == 1, (
        "full blocks stay shared"
    )


def test_a_slot_is_filled_again_only_if_the_device_sampled_another_token() -> None:
    engine = make_engine(60, 4, slots=8, budget=32, depth=1)
    engine.add(request("a", width=1, n=1, length=10, prompt=4, ignore_eos=True))
    slot_fills = []
    while engine.scheduler.live:
        plan = engine.scheduler.plan()
        slot_fills.append(len(plan.slot_fills))
        engine.scheduler.commit(plan, engine.runner.launch(plan).wait())
    assert slot_fills == [1] + [0] * 9, (
        "one beam always takes the likeliest token, which the device has sampled too"
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("blocks", "slots"), [(60, 1), (60, 2), (60, 3), (8, 8), (5, 8), (4, 8), (4, 1)]
)
@pytest.mark.parametrize("caching", [True, False])
def test_a_search_that_does_not_fit_at_once_goes_through_in_turns(
    depth: int, blocks: int, slots: int, caching: bool
) -> None:
    # 16 tokens are computed: 4 blocks, one sequence's worth
    search = request("a", width=5, length=11, ignore_eos=True)
    engine = make_engine(blocks, 4, slots=slots, budget=8, depth=depth, caching=caching)
    outputs = run(engine, search, plain("later", 10))
    check_beams(search, outputs["a"])
    assert engine.scheduler.counters.preemptions > 0


def test_with_enough_room_no_beam_is_preempted() -> None:
    engine = make_engine(100, 4, slots=16, budget=64, depth=2)
    run(engine, request("a", 5), request("b", 4), plain("c"))
    assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_search_ends_once_per_requested_beam(steps: int, depth: int) -> None:
    engine = make_engine(60, 4, slots=3, budget=16, depth=depth)
    engine.add(request("a", width=5, length=12, ignore_eos=True))
    for _ in range(steps):
        assert engine.step() == []
    assert [(out.index, out.finish_reason) for out in engine.abort("a")] == [
        (0, "abort"),
        (1, "abort"),
    ]
    while not engine.idle:
        assert engine.step() == []
    engine.scheduler.check()
    engine.scheduler.pool.check([])
    assert not engine.scheduler.groups.searches and not engine.scheduler.plan().has_work


def test_a_step_that_fails_ends_the_search_and_no_other() -> None:
    engine = make_engine(60, 4, slots=8, budget=16, depth=1)
    launch, count = engine.runner.launch, 0

    def broken(plan: Plan) -> Handle:
        nonlocal count
        count += 1
        if count == 4:
            raise RuntimeError("lost")
        return launch(plan)  # type: ignore[return-value]

    engine.runner.launch = broken  # type: ignore[method-assign]
    outputs = run(engine, request("a", ignore_eos=True))
    assert [(out.index, out.finish_reason) for out in outputs["a"]] == [(0, "error"), (1, "error")]
    later = request("b")
    check_beams(later, run(engine, later)["b"])


def test_tokens_that_beams_share_are_charged_once() -> None:
    engine = make_engine(100, 4, slots=16, budget=64, depth=1, policy="fair")
    run(engine, request("a", width=4, length=6, prompt=10, ignore_eos=True))
    assert isinstance(engine.scheduler.policy, Fair)
    (served,) = engine.scheduler.policy.served.values()
    assert 10 + 5 <= served <= 10 + 4 * 6


def test_discarded_beams_are_not_in_the_trace(tmp_path: Path) -> None:
    engine = make_engine(100, 4, slots=16, budget=64, depth=1)
    trace.Recorder(tmp_path / "trace").listen_to(
        engine.events, engine.scheduler.clock, engine.host_time
    )
    search = request("a", width=4, length=6, prompt=10, ignore_eos=True)
    search.arrival = 1.0
    run(engine, search)
    entries = trace.read(str(tmp_path / "trace"))
    assert [(e.prompt, e.output) for e in entries] == [(10, 5)] * 4


def test_the_blocks_of_a_search_are_in_the_prefix_cache() -> None:
    engine = make_engine(100, 4, slots=8, budget=64, depth=2)
    search = request("a", width=3, length=9, prompt=10, ignore_eos=True)
    first = run(engine, search)["a"]
    assert all(out.cached_tokens == 0 for out in first)
    again = Request("again", search.prompt + first[0].tokens, SamplingParams(max_tokens=1))
    (out,) = run(engine, again)["again"]
    assert out.cached_tokens == 16, "of 19 tokens"
    search.id = "b"
    assert [out.cached_tokens for out in run(engine, search)["b"]] == [8, 8]


@pytest.mark.parametrize("fields", [{"guide": ToyGuide(1)}, {"stop_token_ids": list(range(1, 47))}])
def test_a_search_with_fewer_continuations_than_beams_is_refused(fields: dict[str, Any]) -> None:
    guide = fields.pop("guide", None)
    search = request("a", **fields)
    search.guide = guide
    engine = make_engine(60, 4, slots=8, budget=16, depth=1)
    with pytest.raises(InvalidRequest, match="4 beams are not possible") as caught:
        engine.add(search)
    assert (
        caught.value.code == "unsupported_parameter"
        and engine.idle
        and not engine.scheduler.groups.searches
    )
