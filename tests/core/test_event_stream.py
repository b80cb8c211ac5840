"""The event stream is in causal order, tells the engine's state after each step, and costs nothing
when nothing reads it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo.core import event_recorder, reasons
from octavo.core.decision_sources import decision_sources
from octavo.core.dummy_run import dummy_run
from octavo.core.engine import Engine
from octavo.core.event_recorder import EventRecorder, read_recording
from octavo.core.event_stream import FIELDS, EventStream, encode_lines
from octavo.errors import InvalidRequest
from octavo.events import RequestRefused
from octavo.params import SamplingParams
from octavo.types import Request
from tests.core.stream_mirror import StreamMirror, fields_of
from tests.fake_runner import FakeRunner
from tests.web.streams import stream_of_trial
from tests.workloads import make_engine

ROOT = Path(__file__).parents[2]


def add(engine: Engine, name: str, length: int = 10, first: int = 1, **params: Any) -> None:
    settings = {"max_tokens": 6, "ignore_eos": True, **params}
    prompt = list(range(first, first + length))
    engine.add(Request(name, prompt, SamplingParams(**settings)))


def run(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def opened(engine: Engine, **options: Any) -> tuple[EventStream, list[Any]]:
    """Return a stream of an engine, and the list of lines that it fills."""
    lines: list[Any] = []
    stream = EventStream(engine, **options)
    stream.open(lambda data, is_start: lines.extend(map(json.loads, data.splitlines())))
    return stream, lines


# ---- order and completeness ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"beams": True}, {"evict": True}, {"drafts": True}], ids=str
)
def test_every_event_is_possible_in_its_state_and_leads_to_the_state_of_the_engine(
    options: dict[str, bool],
) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(300, 306):
        states: dict[int, tuple[Any, ...]] = {}

        def note(stream: EventStream, engine: Engine, states: Any = states) -> None:
            scheduler = engine.scheduler
            if engine.events.step == 1:
                states.clear()  # Another engine filled the disk before.
            tables = {seq.id: list(seq.block_table) for seq in scheduler.running}
            waiting = {seq.id for seq in scheduler.waiting}
            states[stream.number] = tables, waiting, set(scheduler.pool.hash_index.values())

        lines = [json.loads(line) for line in stream_of_trial(seed, note, **options)]
        mirror = StreamMirror(lines[0])
        for line in lines[1:]:
            if line[0] != "snapshot":
                mirror.apply(line)
            if mirror.number in states:
                tables, waiting, cached = states.pop(mirror.number)
                mirrored = {seq for seq, state in mirror.states.items() if state == "waiting"}
                running = {seq: mirror.tables[seq] for seq in mirror.states.keys() - mirrored}
                where = f"seed {seed}, event {mirror.number}"
                assert (mirrored, running, set(mirror.contents)) == (waiting, tables, cached), where
        kinds += mirror.kinds
    assert {"admitted", "finished", "allocated", "released", "published", "evicted"} <= set(kinds)


def test_with_one_slot_each_admission_follows_the_end_before_it() -> None:
    engine = make_engine(30, 4, slots=1, budget=8, depth=1)
    _, lines = opened(engine)
    for index in range(10):
        add(engine, f"r{index}", first=1 + 3 * index)
    run(engine)
    order = [line[0] for line in lines if line[0] in ("admitted", "finished")]
    assert order == ["admitted", "finished"] * 10


def test_every_kind_is_described_and_every_event_has_one() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    for kind in FIELDS:
        assert f"| `{kind}` |" in page, f"docs/events.md does not describe the line {kind}"
    stream = EventStream(make_engine(8, 4, slots=2, budget=8, depth=1))
    from tests.core.test_events import KINDS

    assert set(stream.handlers) == set(KINDS)


# ---- what lines say ------------------------------------------------------------------------------


def test_a_preemption_says_for_whom_and_an_admission_what_it_cost() -> None:
    engine = make_engine(6, 4, slots=3, budget=16, depth=1)
    _, lines = opened(engine)
    add(engine, "a", 5, first=1, max_tokens=12)
    add(engine, "b", 10, first=30, max_tokens=12)
    run(engine)
    events = [fields_of(line) for line in lines]
    (preempted,) = [event for event in events if event["kind"] == "preempted"]
    names = {event["seq"]: event["request"] for event in events if event["kind"] == "arrived"}
    assert names[preempted["seq"]] == "b" and names[preempted["beneficiary"]] == "a"
    waits = [event for event in events if event["kind"] == "waiting"]
    lacks_blocks = [event for event in waits if event["needed"]]
    assert lacks_blocks and len(waits) < engine.scheduler.counters.plans / 2, "no repetitions"
    again = [event for event in events if event["kind"] == "admitted"][-1]
    cost = preempted["positions"] - again["cached"]
    assert again["recomputed"] == cost == engine.scheduler.counters.recomputed_tokens > 0


def test_a_reason_holds_until_a_plan_does_not_come_to_the_request() -> None:
    engine = make_engine(30, 4, slots=1, budget=8, depth=1, policy="priority")
    stream, lines = opened(engine)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine.add(Request("runs", list(range(1, 11)), params, priority=-1))
    add(engine, "waits", first=20)
    for _ in range(4):
        engine.step()
    engine.add(Request("goes first", list(range(40, 50)), params, priority=-1))
    for _ in range(4):
        engine.step()
    stream.flush()
    events = [fields_of(line) for line in lines]
    names = {event["seq"]: event["request"] for event in events if event["kind"] == "arrived"}
    announced = []
    for event in events:
        if event["kind"] == "waiting":
            announced.append((names[event["seq"]], event["ahead"], "waits"))
        elif event["kind"] == "planned" and event["untried"]:
            announced += [(names[seq], None, "untried") for seq in event["untried"]]
    assert announced == [
        ("waits", 0, "waits"),
        ("goes first", 0, "waits"),
        ("waits", None, "untried"),
    ]


def test_an_admission_says_why_no_more_was_cached() -> None:
    engine = make_engine(8, 4, slots=2, budget=16, depth=1)
    _, lines = opened(engine)
    add(engine, "a", 13, first=1, max_tokens=2)
    run(engine)
    add(engine, "b", 13, first=1, max_tokens=2)
    run(engine)
    for name in ("c", "d"):  # They evict what a and b had.
        add(engine, name, 20, first=20 + 10 * (name == "d"), max_tokens=2)
        run(engine)
    add(engine, "e", 13, first=1, max_tokens=2)
    run(engine)
    admitted = {
        name: event
        for name, event in zip(
            "abcde", (fields_of(x) for x in lines if x[0] == "admitted"), strict=True
        )
    }
    assert admitted["a"]["cached"] == 0 and admitted["a"]["match_end"] == reasons.NOT_CACHED
    assert admitted["b"]["cached"] == 12 and admitted["b"]["match_end"].startswith(
        "every full block"
    )
    evicted = {fields_of(line)["content"] for line in lines if line[0] == "evicted"}
    assert admitted["e"]["missing"] in evicted, "the page can say when it was evicted"


def test_a_refusal_is_in_the_stream() -> None:
    engine = make_engine(8, 4, slots=2, budget=16, depth=1)
    stream, lines = opened(engine)
    with pytest.raises(InvalidRequest):
        add(engine, "huge", 5000)
    engine.events.emit(RequestRefused("other", "429 queue_full"))
    stream.flush()
    assert [line[4] for line in lines if line[0] == "refused"] == ["huge", "other"]


class Letters:
    """Shows token 1 as a, 2 as b and so on."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(96 + token) for token in token_ids)

    def pieces(self) -> Any:
        return self

    def push(self, token_ids: list[int]) -> str:
        return self.decode(token_ids)


def test_text_is_in_the_stream_only_if_it_is_asked_for() -> None:
    for text in (None, Letters()):
        engine = make_engine(30, 4, slots=2, budget=16, depth=1)
        _, lines = opened(engine, text=text)
        add(engine, "r", 10)
        run(engine)
        shown = json.dumps([line for line in lines if line[0] != "snapshot"])
        assert ("abcdefghij" in shown) == (text is not None)
        assert "1, 2, 3, 4, 5" not in shown, "never token ids"


def test_every_reason_names_a_line_of_the_source() -> None:
    sources = decision_sources()
    assert len(sources) > 15
    for reason, places in sources.items():
        assert places, f"nothing gives the reason {reason!r}"
        for place in places:
            line = (ROOT / place.path).read_text().splitlines()[place.line - 1]
            assert line.strip() in place.code, reason


def test_lines_survive_any_name() -> None:
    hostile = ['],["a"', '\\"],["', "\n", "\u2028", '"', "]\n[", "ü🙂"]
    records = [("refused", number, 0, 0, name, name) for number, name in enumerate(hostile)]
    lines = encode_lines(records).decode().splitlines()
    assert [json.loads(line)[4] for line in lines] == hostile


# ---- snapshots, sinks and recordings -------------------------------------------------------------


def test_a_reader_may_begin_at_any_snapshot() -> None:
    engine = make_engine(12, 4, slots=3, budget=8, depth=2)
    stream, lines = opened(engine)
    late: list[Any] = []
    for index in range(6):
        add(engine, f"r{index}", 9, first=1 + 2 * index)
    for _ in range(5):
        engine.step()
    stream.open(lambda data, is_start: late.extend(map(json.loads, data.splitlines())))
    run(engine)
    assert late[0][0] == "snapshot" and late[0] in lines
    assert late == lines[lines.index(late[0]) :]
    mirror = StreamMirror(late[0])
    for line in late[1:]:
        if line[0] != "snapshot":
            mirror.apply(line)
    assert not mirror.states


def test_requests_before_the_stream_was_made_take_no_letters() -> None:
    engine = make_engine(12, 4, slots=3, budget=8, depth=1)
    for name in ("warm-up", "again"):
        add(engine, name)
        run(engine)
    stream, lines = opened(engine)
    add(engine, "first")
    engine.step()
    reopened: list[Any] = []
    stream.open(lambda data, is_start: reopened.extend(map(json.loads, data.splitlines())))
    add(engine, "second")
    run(engine)
    stream.flush()
    names = {
        fields_of(line)["request"]: fields_of(line)["name"]
        for line in lines
        if line[0] == "arrived"
    }
    assert names == {"first": 1, "second": 2}
    assert [seq["name"] for seq in reopened[0][5]["sequences"]] == [1]


def test_nothing_listens_before_the_first_sink_and_after_the_last() -> None:
    engine = make_engine(12, 4, slots=3, budget=8, depth=1)
    before = {kind: list(functions) for kind, functions in engine.events.listeners.items()}
    stream = EventStream(engine)
    assert engine.events.listeners == before

    def sink(data: bytes, is_start: bool) -> None: ...

    stream.open(sink)
    assert engine.events.listeners != before
    stream.close(sink)
    assert engine.events.listeners == before


def test_after_steps_to_which_nothing_listens_a_new_stream_begins() -> None:
    engine = make_engine(12, 4, slots=3, budget=8, depth=1)
    _, lines = opened(engine)
    with dummy_run(engine):
        add(engine, "warm-up")
        run(engine)
    names = [line[4]["stream"] for line in lines if line[0] == "snapshot"]
    assert len(names) == 2 and names[0] != names[1]
    add(engine, "r")
    run(engine)
    mirror = StreamMirror(lines[1])
    for line in lines[2:]:
        mirror.apply(line)


def test_a_recording_is_bounded_and_begins_with_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.core.event_stream.SNAPSHOT_BYTES", 2000)
    monkeypatch.setattr("octavo.core.event_stream.SNAPSHOT_RATIO", 0)
    file = tmp_path / "events.jsonl"
    engine = make_engine(30, 4, slots=3, budget=8, depth=1)
    EventStream(engine).open(EventRecorder(file, max_bytes=120_000))
    sizes = []
    for index in range(60):
        add(engine, f"r{index}", max_tokens=20)
        run(engine)
        sizes.append(sum(part.stat().st_size for part in tmp_path.iterdir()))
    assert len(list(tmp_path.iterdir())) == 2 and max(sizes) < 400_000
    lines = [json.loads(line) for line in read_recording(file).splitlines()]
    assert lines[0][0] == "snapshot" and lines[-1][1] == engine.events.number
    mirror = StreamMirror(lines[0])
    for line in lines[1:]:
        if line[0] != "snapshot":
            mirror.apply(line)


def test_a_recording_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    engine = make_engine(30, 4, slots=3, budget=8, depth=1)
    EventStream(engine).open(EventRecorder(file))
    add(engine, "r")
    run(engine)
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert read_recording(file) == b"".join(whole.splitlines(keepends=True)[:-1])


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}\n")
    for name in ("other", "missing"):
        with pytest.raises(InvalidRequest, match="--record-events"):
            read_recording(tmp_path / name)
    with pytest.raises(InvalidRequest, match="folder"):
        EventRecorder(tmp_path / "nowhere" / "file")


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(30, 4, slots=3, budget=8, depth=1)
    recorder = EventRecorder("/dev/full") if Path("/dev/full").exists() else None
    if recorder is None:
        pytest.skip("needs /dev/full")
    EventStream(engine).open(recorder)
    add(engine, "r")
    run(engine)
    assert recorder.failed and "recording stops" in caplog.text
    assert event_recorder.MAX_BYTES > 0 and isinstance(engine.runner, FakeRunner)
