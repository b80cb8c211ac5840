"""A view agrees with the engine, and stays small."""

from __future__ import annotations

import time
from typing import Any

import pytest

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler
from octavo.params import SamplingParams
from octavo.serve.channel.messages import Abort, Stop, View, ViewRequest, decode_to_front, encode
from octavo.serve.engine import live_view as module
from octavo.serve.engine.engine_process import EngineLoop
from octavo.serve.engine.live_view import KINDS, Viewer, pool_cells
from octavo.types import Request
from tests.fake_runner import FakeRunner
from tests.serve.test_engine_loop import FakeGuides, FakeLink, add, guided, run


def sent_views(sent: list[Any]) -> list[View]:
    return [message for message in sent if isinstance(message, View)]


def engine(num_blocks: int = 50, max_num_seqs: int = 4, depth: int = 1, tokens: int = 16) -> Engine:
    schedule = ScheduleConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens, max_model_len=400, depth=depth
    )
    scheduler = Scheduler(
        CacheConfig(block_size=4, num_blocks=num_blocks), schedule, vocab_size=1000
    )
    return Engine(scheduler, FakeRunner(num_blocks, 4))


def request(id: str, length: int = 5, first: int = 1, **params: Any) -> Request:
    return Request(
        id, list(range(first, first + length)), SamplingParams(ignore_eos=True, **params)
    )


def has_viewer(loop: EngineLoop) -> bool:
    """Return whether anything in the engine process listens on behalf of a live page."""
    listeners = loop.engine.events.listeners
    return loop.viewer is not None or any(
        isinstance(getattr(listener, "__self__", None), Viewer)
        for kind in KINDS
        for listener in listeners.get(kind, ())
    )


# ---- the loop ------------------------------------------------------------------------------------


def test_a_look_is_answered_at_once_and_makes_no_step() -> None:
    loop, sent = run([ViewRequest(), ViewRequest()])
    assert len(sent_views(sent)) == 2 and loop.engine.scheduler.counters.plans == 0


def test_nothing_is_kept_or_sent_before_somebody_looks() -> None:
    loop, sent = run([add("a", max_tokens=5), *[None] * 8])
    assert not sent_views(sent) and not has_viewer(loop)


def test_who_has_not_looked_for_a_while_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", -1.0)
    loop, sent = run([add("a", max_tokens=9), None, ViewRequest(), *[None] * 12])
    assert len(sent_views(sent)) == 1
    assert not has_viewer(loop), "the engine is as it was before"


def test_who_comes_later_is_told_nothing_of_what_the_last_one_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "IDLE_SECONDS", -1.0)
    _, sent = run([ViewRequest(), add("a", max_tokens=3), *[None] * 5, ViewRequest()])
    assert [(view.steps, view.ended, view.events) for view in sent_views(sent)] == [
        ([], [], [])
    ] * 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_step_is_told_once_with_its_time(depth: int) -> None:
    _, sent = run(
        [
            ViewRequest(),
            add("a", 20, max_tokens=6),
            None,
            None,
            ViewRequest(),
            *[None] * 4,
            ViewRequest(),
            *[None] * 12,
            ViewRequest(),
        ],
        depth,
    )
    steps = [step for view in sent_views(sent) for step in view.steps]
    numbers = [step.step for step in steps]
    assert numbers == sorted(set(numbers))
    assert sum(step.prefill for step in steps) == 20 and [s.chunks for s in steps[:2]] == [
        [(1, 0, 16)],
        [(1, 16, 4)],
    ]
    assert sum(step.decode for step in steps) >= 5
    (end,) = [end for view in sent_views(sent) for end in view.ended]
    assert end == ("a", 0, "length")
    assert all(step.seconds > 0 for step in sent_views(sent)[-1].steps)


def test_those_who_are_given_up_or_stopped_are_said_to_have_ended() -> None:
    _, sent = run(
        [
            ViewRequest(),
            add("a", max_tokens=50),
            add("b", max_tokens=50),
            None,
            None,
            Abort(["a"]),
            Stop("b", 0),
            ViewRequest(),
        ]
    )
    assert [view.ended for view in sent_views(sent)] == [[], [("a", 0, "abort"), ("b", 0, "stop")]]


def test_a_request_that_waits_for_its_guide_says_so() -> None:
    _, sent = run([guided("g"), ViewRequest(), *[None] * 9], guides=FakeGuides(4))
    (view,) = sent_views(sent)
    assert [(s.request, s.state) for s in view.sequences] == [
        ("g", "waiting")
    ] and "compiled" in view.sequences[0].reason
    assert view.waiting == 1


def test_a_view_survives_the_link() -> None:
    _, sent = run([add("a", max_tokens=9), ViewRequest(), None, None, ViewRequest()])
    assert all(decode_to_front(encode(view)) == view for view in sent_views(sent))


# ---- what is in it -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1024, 10, 7])
def test_the_picture_of_the_pool_is_the_pool(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(module, "MAX_CELLS", limit)
    one = engine()
    for i in range(5):
        one.add(request(f"r{i}", 9 + 8 * i, n=2, max_tokens=5 + i, temperature=1.0))
    shared = 0
    while not one.idle:
        one.step()
        pool = one.scheduler.pool
        per, *lists = pool_cells(pool, one.scheduler.running)
        used, both, cached, owner = lists
        assert len(used) <= limit and all(len(each) == len(used) for each in lists)
        for i in range(len(used)):
            blocks = range(1 + i * per, min(1 + (i + 1) * per, pool.num_blocks + 1))
            assert used[i] == sum(pool.ref_counts[b] > 0 for b in blocks)
            assert both[i] == sum(pool.ref_counts[b] > 1 for b in blocks)
            assert cached[i] == sum(
                pool.ref_counts[b] == 0 and pool.hashes[b] is not None for b in blocks
            )
            owners = {s.id for s in one.scheduler.running for b in s.block_table if b in blocks}
            assert owner[i] in (owners or {0})
        assert sum(used) + sum(cached) <= pool.num_blocks and sum(cached) == pool.num_cached
        shared += sum(both)
    assert shared and sum(cached), "there was something to see"


def test_states_and_lengths_are_the_schedulers() -> None:
    one = engine(max_num_seqs=2)
    viewer = Viewer(one, {})
    for name, length in (("a", 5), ("b", 30), ("c", 5)):
        one.add(request(name, length, first=100 * ord(name) % 700, max_tokens=9))
    one.step()
    found = {s.request: s for s in viewer.view().sequences}
    assert {name: s.state for name, s in found.items()} == {
        "a": "decode",
        "b": "prefill",
        "c": "waiting",
    }
    assert (found["a"].prompt, found["a"].generated, found["a"].limit, found["a"].blocks) == (
        5,
        1,
        14,
        2,
    )
    assert found["b"].computed == 11 and found["c"].reason == "every batch slot is in use"


def test_sequences_behind_the_first_waiting_one_say_so() -> None:
    one = engine(max_num_seqs=1)
    viewer = Viewer(one, {})
    for name in "abc":
        one.add(request(name, max_tokens=9))
    found = {s.request: s.reason for s in viewer.view().sequences}
    assert set(found.values()) == {"it waits for the next step"}
    one.step()
    found = {s.request: s.reason for s in viewer.view().sequences}
    assert found["a"] == "" and found["b"] == "every batch slot is in use"
    assert found["c"] == "behind others: every batch slot is in use"


def test_events_are_shown_in_the_order_in_which_they_happened() -> None:
    one = engine(num_blocks=8)
    viewer = Viewer(one, {})
    one.add(request("a", 9, max_tokens=20))
    one.add(request("b", 9, first=500, max_tokens=20))
    events = []
    while not one.idle:
        one.step()
        events += viewer.view().events
    assert [event.number for event in events] == sorted(event.number for event in events)
    assert [(event.kind, event.request) for event in events if event.kind != "waiting"] == [
        ("arrived", "a"),
        ("arrived", "b"),
        ("admitted", "a"),
        ("admitted", "b"),
        ("preempted", "b"),
        ("done", "a"),
        ("admitted", "b"),
        ("done", "b"),
    ]
    assert events[2].tokens == 9 and events[-1].reason == "length"
    reasons = [event.reason for event in events if event.kind == "waiting"]
    assert len(reasons) == len(set(reasons)), "a reason is shown when it changes, not in each step"


def test_block_moves_of_several_steps_are_one_event() -> None:
    one = engine()
    viewer = Viewer(one, {})
    one.add(request("a", 10, n=2, temperature=1.0, max_tokens=3))
    while not one.idle:
        one.step()
    view = viewer.view()
    assert [event.kind for event in view.events] == [
        "arrived",
        "admitted",
        "forked",
        "blocks",
        "done",
        "done",
    ]
    assert view.events[3].moves == {"copies": one.scheduler.counters.copies}


def test_who_gives_way_is_named_with_the_reason() -> None:
    one = engine(num_blocks=8)
    viewer = Viewer(one, {})
    one.add(request("a", 9, max_tokens=20))
    one.add(request("b", 9, first=500, max_tokens=20))
    steps, waiting = [], []
    while not one.idle:
        one.step()
        view = viewer.view()
        steps += view.steps
        waiting += [s.reason for s in view.sequences if s.preemptions and s.state == "waiting"]
    lost = [entry for step in steps for entry in step.preempted]
    assert len(lost) == one.scheduler.counters.preemptions > 0
    assert {(request, why) for _, request, why in lost} == {("b", "no block was free")}
    assert waiting and all(reason.startswith("preempted: no block was free") for reason in waiting)


def test_a_view_is_bounded_whatever_the_engine_holds() -> None:
    one = engine(num_blocks=40_000, max_num_seqs=600, tokens=4096)
    viewer = Viewer(one, {})
    for i in range(900):
        one.add(request(f"req_{i:024x}-0", 20, first=i % 900, max_tokens=300))
    for _ in range(140):
        one.step()
    view = viewer.view()
    assert view.decoding + view.prefilling + view.waiting == 900 and len(view.sequences) == 256
    assert len(view.used) <= 1024 and len(view.steps) == 128 and view.steps_missed == 12
    assert view.steps[0].chunks == [] and len(encode(view)) < 96_000
    assert len(view.events) == 256 and view.events_missed > 0
    assert viewer.view().steps == [], "what was told is not told again"


def test_a_long_list_of_chunks_is_cut_and_says_so() -> None:
    one = engine(num_blocks=400, max_num_seqs=50, tokens=512)
    viewer = Viewer(one, {})
    for i in range(30):
        one.add(request(f"r{i}", 5, first=7 * i, max_tokens=9))
    one.step()
    (step,) = viewer.view().steps
    assert len(step.chunks) == 8 and step.more == 22 and step.prefill == 150


def test_looking_at_a_large_pool_takes_little_time() -> None:
    one = engine(num_blocks=32_768, max_num_seqs=256, tokens=8192)
    for i in range(256):
        one.add(request(f"r{i}", 300, first=i, max_tokens=50))
    while one.scheduler.prefilling or one.scheduler.waiting:
        one.step()
    viewer, begun = Viewer(one, {}), time.perf_counter()
    for _ in range(5):
        viewer.view()
    assert (time.perf_counter() - begun) / 5 < 0.05  # 4 ms alone on a core


def test_the_loop_goes_on_as_if_nobody_looked() -> None:
    def said(script: list[Any]) -> list[Any]:
        link = FakeLink(script)
        loop = EngineLoop(engine(depth=2), link)  # type: ignore[arg-type]
        loop.run()
        return [
            (out.request_id, out.tokens, out.finish_reason)
            for m in link.sent
            if hasattr(m, "outputs")
            for out in m.outputs
        ]

    quiet = [add("a", 30, max_tokens=9, seed=1), add("b", 6, max_tokens=12, seed=2), *[None] * 30]
    looked = [
        ViewRequest() if message is None and i % 2 else message for i, message in enumerate(quiet)
    ]
    assert sorted(map(str, said(quiet))) == sorted(map(str, said([*looked, *[None] * 30])))
