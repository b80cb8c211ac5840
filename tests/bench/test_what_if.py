"""What if: the requests of a recording, simulated again, do what they did in the recording."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from octavo.bench.what_if import RecordedRun, what_if
from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.engine import Engine
from octavo.core.event_stream import EventStream
from octavo.core.scheduler import Scheduler
from octavo.core.simulate import EMBEDDED_CPU, CostRunner, VirtualClock, replay, requests_of
from octavo.core.trace import read
from octavo.errors import InvalidRequest
from tests.web.streams import NODE, run_node

TRACE = "poisson:rate=9,n=25,prompt=32-200,output=16-100,shared=64,groups=2,urgent=0.2,tenants=2"


def record(policy: str = "fcfs", block_size: int = 16) -> bytes:
    """Record a simulation, whose steps cost exactly what the cost model says."""
    clock = VirtualClock()
    requests, tokens = requests_of(read(TRACE), 50_000)
    scheduler = Scheduler(
        CacheConfig(block_size, 60 * 16 // block_size),
        ScheduleConfig(6, 64, 1024, policy=policy),
        50_000,
        clock=clock,
    )
    engine = Engine(scheduler, CostRunner(EMBEDDED_CPU, clock, tokens), clock.sleep)
    parts: list[bytes] = []
    stream = EventStream(engine)
    stream.open(lambda lines, is_start: parts.append(lines))
    replay(engine, requests, clock.sleep)
    stream.flush()
    return b"".join(parts)


def counts(lines: str | bytes) -> tuple[Counter[str], float]:
    parsed = [json.loads(line) for line in lines.splitlines()]
    kinds = Counter(line[0] for line in parsed)
    kept = ("planned", "preempted", "admitted", "finished", "shared")
    return Counter({kind: kinds[kind] for kind in kept}), parsed[-1][3] / 1e6


@pytest.mark.parametrize(("policy", "block_size"), [("fcfs", 16), ("priority", 32)])
def test_the_recorded_settings_give_the_recorded_run(policy: str, block_size: int) -> None:
    recording = record(policy, block_size)
    result = what_if(recording, {"policy": "shortest", "token_budget": 96})
    before, seconds = counts(recording)
    again, simulated_seconds = counts(result["recorded"])
    assert before["preempted"] > 0 and before["shared"] > 0
    assert again == before
    assert abs(simulated_seconds / seconds - 1) < 0.01 and abs(result["error"]) < 0.01
    assert counts(result["changed"])[0] != before
    first = json.loads(result["changed"].splitlines()[0])
    assert first[4]["simulated"] and first[5]["settings"]["policy"] == "shortest"


def test_what_cannot_be_simulated_is_refused() -> None:
    recording = record()
    bad: list[Any] = [{"policy": "x"}, {"seed": 1}, {"token_budget": 0}, {"num_blocks": "many"}, []]
    for changes in bad:
        with pytest.raises(InvalidRequest):
            what_if(recording, changes)
    with pytest.raises(InvalidRequest):
        what_if(recording.splitlines()[0], {"policy": "fcfs"})


def two_engines() -> tuple[bytes, bytes]:
    """Return recordings of two engine processes, with names as a server gives them."""
    return record(), record("shortest", 32)


def engine_of(recording: bytes) -> str:
    name: str = json.loads(recording.splitlines()[0])[4]["engine"]
    return name


def test_only_the_requests_of_one_engine_process_are_simulated() -> None:
    first, second = two_engines()
    both = first + second
    for recording in (first, second):
        result = what_if(both, {"engine": engine_of(recording), "token_budget": 96})
        assert result["changes"] == {"token_budget": 96}
        assert result["events"].encode().splitlines() == recording.splitlines()
        assert counts(result["recorded"])[0] == counts(recording)[0]
    assert what_if(both, {})["events"].encode().splitlines() == second.splitlines()
    with pytest.raises(InvalidRequest, match="no longer kept"):
        what_if(both, {"engine": "gone"})


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_page_compares_the_same_requests() -> None:
    first, second = two_engines()
    result = what_if(first + second, {"engine": engine_of(second), "policy": "shortest"})
    found = run_node("whatif.mjs", json.dumps(result).encode())
    names = [name for name, _ in found["rows"]]
    settings = "simulated, the same settings"
    assert names == ["recorded", settings, "simulated, policy shortest"]
    assert found["unchanged"] == ["recorded", settings], "a row is not shown twice"
    recorded, same, _ = (values for _, values in found["rows"])
    assert recorded == same, "the simulation repeats the recording, which is one itself"
    assert int(recorded[5]) == counts(second)[0]["preempted"] > 0
    assert found["names"][0][0] == 101 and len(set(map(str, found["names"]))) == 1


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_a_simulated_request_has_the_colour_of_the_recorded_one() -> None:
    result = what_if(record(), {"max_num_seqs": 1})  # One colour would be enough for these.
    recorded, *simulated = run_node("whatif.mjs", json.dumps(result).encode())["labels"]
    assert len(set(recorded.values())) > 1
    assert simulated == [recorded, recorded]


def test_requests_that_have_not_ended_take_part() -> None:
    lines = record().splitlines()
    half = RecordedRun(lines[: len(lines) // 2])
    assert len(half.trace()) >= 5 and all(entry.output > 0 for entry in half.trace())
