"""`octavo timeline` writes files that a strict reader of Chrome's trace event format accepts.

The reader below is written from the format's document ("Trace Event Format") and knows nothing of
the writer.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from octavo.core.trace import Recorder
from octavo.params import SamplingParams
from octavo.types import Request
from tests.fake_runner import FakeDisk
from tests.workloads import make_engine

Octavo = Callable[..., Result]
Slice = tuple[int, int, str, dict[str, Any]]  # start, end, name, args
METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


class StrictReader:
    """Reads the JSON object form. It refuses unknown phases, missing fields, slices that overlap
    without nesting, tracks without names and counters that are not numbers."""

    def __init__(self, path: Path):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert set(content) <= {"traceEvents", "displayTimeUnit", "otherData", "systemTraceEvents"}
        assert content["displayTimeUnit"] in ("ms", "ns")
        self.processes: dict[int, str] = {}
        self.tracks: dict[tuple[int, int], str] = {}
        self.slices: dict[tuple[int, int], list[Slice]] = defaultdict(list)
        self.counters: dict[str, list[tuple[int, dict[str, float]]]] = defaultdict(list)
        for event in content["traceEvents"]:
            read = {"M": self._metadata, "X": self._slice, "C": self._counter}[event["ph"]]
            assert isinstance(event["name"], str) and event["name"]
            assert type(event["pid"]) is int and type(event["tid"]) is int
            read(event)
        for track, slices in self.slices.items():
            assert track in self.tracks and track[0] in self.processes
            self._check_nesting(slices)

    def _metadata(self, event: dict[str, Any]) -> None:
        field, kind = METADATA[event["name"]]
        assert set(event) == {"ph", "name", "pid", "tid", "args"}
        assert set(event["args"]) == {field} and type(event["args"][field]) is kind
        if event["name"] == "process_name":
            self.processes[event["pid"]] = event["args"]["name"]
        if event["name"] == "thread_name":
            self.tracks[event["pid"], event["tid"]] = event["args"]["name"]

    def _slice(self, event: dict[str, Any]) -> None:
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert event["ts"] >= 0 and event["dur"] >= 0
        end = event["ts"] + event["dur"]
        self.slices[event["pid"], event["tid"]].append(
            (event["ts"], end, event["name"], event["args"])
        )

    def _counter(self, event: dict[str, Any]) -> None:
        assert all(isinstance(value, int | float) for value in event["args"].values())
        self.counters[event["name"]].append((event["ts"], event["args"]))

    def _check_nesting(self, slices: list[Slice]) -> None:
        open_ends: list[int] = []
        for start, end, name, _ in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], f"{name} ends after what encloses it"
            open_ends.append(end)

    def track(self, process: str, name: str) -> list[Slice]:
        (found,) = [
            key
            for key, track in self.tracks.items()
            if track == name and self.processes[key[0]] == process
        ]
        return self.slices[found]


def record(file: Path, depth: int) -> None:
    """A preemption, blocks in host memory and on disk, a fork, and an idle time."""
    engine = make_engine(8, 4, slots=3, budget=16, depth=depth, host=20, disk=FakeDisk())
    engine.scheduler.clock = time.monotonic
    Recorder(file).listen_to(engine.events, engine.scheduler.clock, engine.host_time)

    def add(name: str, first: int, length: int, max_tokens: int, n: int = 1) -> None:
        params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, seed=1)
        arrival = engine.scheduler.clock()
        engine.add(Request(name, list(range(first, first + length)), params, arrival=arrival))
        if name != "b":
            while not engine.idle:
                engine.step()

    add("a", 1, 10, max_tokens=4, n=2)
    add("b", 20, 12, max_tokens=12)
    add("c", 40, 9, max_tokens=12)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recording_becomes_tracks_of_requests_host_and_device(
    octavo: Octavo, tmp_path: Path, depth: int
) -> None:
    source = tmp_path / "trace.jsonl"
    record(source, depth)
    target = tmp_path / "trace.json"
    result = octavo("timeline", source, target)
    assert result.exit_code == 0 and "4 requests" in result.stdout.replace("\n", " ")
    reader = StrictReader(target)
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert sorted(reader.processes.values()) == ["engine", "requests"]
    assert len(reader.track("engine", "device")) == len(steps)
    host = [name for _, _, name, _ in reader.track("engine", "host")]
    assert host.count("plan") == host.count("wait") == len(steps)
    assert host.count("commit") == len(steps) - 1
    assert reader.track("engine", "tiers")
    tokens = sum(args["tokens"] for _, args in reader.counters["prefill tokens"])
    assert tokens == sum(step["prefill"] for step in steps)
    tracks = ("a", "a[1]", "b", "c")
    names = {name for track in tracks for _, _, name, _ in reader.track("requests", track)}
    assert {"received", "queued", "prefill", "decode"} <= names
    assert names & {"swapped", "preempted"} == ({"swapped"} if depth == 1 else {"preempted"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no steps"),
        ('{"arrival": 1, "prompt": 2, "output": 3}\n', "has no steps"),
        ('{"step": }\n{"step": 2}\n', "line 1 was not written by --record-trace"),
    ],
)
def test_what_is_no_recording_is_refused_with_what_to_do(
    octavo: Octavo, tmp_path: Path, content: str, message: str
) -> None:
    source = tmp_path / "trace.jsonl"
    source.write_text(content)
    result = octavo("timeline", source, tmp_path / "t.json")
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    missing = octavo("timeline", tmp_path / "nothing.jsonl", tmp_path / "t.json")
    assert missing.exit_code == 2 and "cannot be read" in " ".join(missing.output.split())
