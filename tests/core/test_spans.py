"""Spans tell what each sequence did: they follow each other, and add up to its steps and tokens."""

from __future__ import annotations

import json
from itertools import count, pairwise
from pathlib import Path

import pytest

from octavo.core import spans
from octavo.core.engine import Engine
from octavo.core.spans import SequenceSpans, TimeSpan
from octavo.core.trace import Recorder, read
from octavo.events import Event
from octavo.params import SamplingParams
from octavo.types import Request, Sequence
from tests.fake_runner import FakeDisk
from tests.workloads import make_engine

Ended = dict[str, list[TimeSpan]]


def follow(engine: Engine, *names: str) -> Ended:
    """Collect the spans of these requests, or of all, on a clock that advances by one whenever it is read."""
    ended: Ended = {}
    ticks = count(1)

    def collect(seq: Sequence, collected: list[TimeSpan], event: Event) -> None:
        ended[f"{seq.request.id}{seq.index or ''}"] = collected

    SequenceSpans(
        engine.events,
        lambda: float(next(ticks)),
        collect,
        follows=lambda request_id: not names or request_id in names,
    )
    return ended


def add(engine: Engine, name: str, first: int, length: int, max_tokens: int, n: int = 1) -> None:
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, seed=1)
    engine.add(Request(name, list(range(first, first + length)), params, arrival=0.5))


def run(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def names_of(collected: list[TimeSpan]) -> list[str]:
    return [span.name for span in collected]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_has_a_span_per_chunk_and_its_reply_one(depth: int) -> None:
    engine = make_engine(20, 4, slots=2, budget=8, depth=depth)
    ended = follow(engine)
    add(engine, "a", 1, 20, max_tokens=5)
    run(engine)
    a = ended["a"]
    assert names_of(a) == ["queued", "prefill", "prefill", "prefill", "decode"]
    assert [span.tokens for span in a] == [0, 8, 8, 4, 4], "the last chunk samples the first token"
    assert [list(span.steps) for span in a] == [[], [1], [2], [3], [4, 5, 6, 7]]
    assert all(before.end <= after.start for before, after in pairwise(a))
    assert all(list(span.landings) == sorted(span.landings) for span in a)
    assert a[-1].end == a[-1].landings[-1]


def test_a_preempted_sequence_waits_and_computes_again() -> None:
    engine = make_engine(7, 4, slots=4, budget=16, depth=1)
    ended = follow(engine)
    add(engine, "a", 1, 9, max_tokens=8)
    add(engine, "b", 20, 9, max_tokens=8)
    run(engine)
    assert names_of(ended["a"]) == ["queued", "prefill", "decode"]
    assert names_of(ended["b"]) == [
        "queued",
        "prefill",
        "prefill",
        "decode",
        "preempted",
        "prefill",
        "decode",
    ]
    assert sum(span.tokens for span in ended["b"] if span.name == "decode") == 6, (
        "the prefills sample the first token and the one after the preemption"
    )


def test_blocks_that_come_back_from_host_memory_make_it_a_swap() -> None:
    engine = make_engine(8, 4, slots=3, budget=16, depth=1, host=20, disk=FakeDisk())
    ended = follow(engine)
    add(engine, "b", 20, 12, max_tokens=12)
    add(engine, "c", 40, 9, max_tokens=12)
    run(engine)
    assert "swapped" in names_of(ended["c"]) + names_of(ended["b"])


def test_children_of_a_fork_have_spans_of_their_own() -> None:
    engine = make_engine(20, 4, slots=4, budget=16, depth=1)
    ended = follow(engine)
    add(engine, "a", 1, 10, max_tokens=3, n=2)
    run(engine)
    assert sorted(ended) == ["a", "a1"]
    assert names_of(ended["a1"])[-1] == "decode" and ended["a1"][0].name == "queued"


def test_a_long_decode_is_cut_where_a_span_would_lose_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spans, "MAX_STEPS", 8)
    engine = make_engine(60, 4, slots=2, budget=16, depth=1)
    ended = follow(engine)
    add(engine, "a", 1, 4, max_tokens=19)
    run(engine)
    assert names_of(ended["a"]) == ["queued", "prefill", "decode", "decode", "decode"]
    assert [len(span.steps) for span in ended["a"][2:]] == [8, 8, 2]


def test_only_what_is_followed_costs_anything() -> None:
    engine = make_engine(20, 4, slots=4, budget=16, depth=1)
    ended = follow(engine, "b")
    add(engine, "a", 1, 10, max_tokens=3)
    add(engine, "b", 20, 10, max_tokens=2)
    add(engine, "c", 40, 10, max_tokens=30)
    run(engine)
    assert list(ended) == ["b"]


def test_an_aborted_sequence_ends_in_the_queue() -> None:
    engine = make_engine(20, 4, slots=1, budget=16, depth=1)
    ended = follow(engine)
    add(engine, "a", 1, 10, max_tokens=9)
    add(engine, "b", 20, 10, max_tokens=9)
    engine.step()
    engine.abort("b")
    run(engine)
    assert names_of(ended["b"]) == ["queued"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recording_has_the_steps_and_is_still_a_trace(tmp_path: Path, depth: int) -> None:
    engine = make_engine(20, 4, slots=2, budget=8, depth=depth)
    file = tmp_path / "trace.jsonl"
    Recorder(file).listen_to(engine.events, engine.scheduler.clock, engine.host_time)
    add(engine, "a", 1, 10, max_tokens=3)
    add(engine, "b", 30, 6, max_tokens=4)
    run(engine)
    assert sorted((entry.id, entry.prompt, entry.output) for entry in read(str(file))) == [
        ("a", 10, 3),
        ("b", 6, 4),
    ]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step["prefill"] for step in steps) == 16
    assert sum(step["decode"] for step in steps) == (3 - 1) + (4 - 1)
    for before, step in pairwise(steps):
        assert step["commit"] is not None and step["commit"][0] == before["device"][1]
        assert before["device"][1] <= step["device"][0] <= step["device"][1]
    for step in steps:
        assert step["plan"][1] == step["launch"][0] <= step["wait"][1] == step["device"][1]
