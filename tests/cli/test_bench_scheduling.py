"""`octavo bench batching-modes` and `octavo bench priority` run, count what arrived, and end with a
line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

from octavo import LLM
from octavo.bench import scheduling
from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.simulate import Costs, Report, simulate
from octavo.core.trace import TraceEntry
from octavo.errors import OctavoError

Octavo = Callable[..., Result]
PRIORITY_LOAD = scheduling.PriorityLoad(low=None, high=100, prompt=256, longest=1024, output=128)


def test_every_mode_runs_the_same_requests(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    args = [
        "--requests",
        6,
        "--longest",
        24,
        "--max-num-seqs",
        2,
        "--load",
        5,
        "--json",
        tmp_path / "r.json",
    ]
    result = octavo("bench", "batching-modes", tiny, *args)
    assert result.exit_code == 0, result.output
    r = json.loads(result.stdout.splitlines()[-1])
    assert r == json.loads((tmp_path / "r.json").read_text())
    assert [one["batching"] for one in r["results"]] == ["continuous", "window", "static", "none"]
    assert all(one["requests"] == 6 and one["errors"] == 0 for one in r["results"])
    assert r["batch_limit"] == 2 and r["over_static"] > 0 and "% of continuous" in result.stdout
    steps = {one["batching"]: one["steps"] for one in r["results"]}
    assert steps["none"] == r["output_tokens"] and steps["continuous"] < steps["none"]


def test_what_a_mode_is_given(octavo: Octavo, tiny: str) -> None:
    few = ["--requests", 4, "--longest", 20, "--max-num-seqs", 2]
    result = octavo("bench", "batching-modes", tiny, "--modes", "window", "--window-ms", 5, *few)
    assert result.exit_code == 0, result.output
    result = octavo(
        "bench", "batching-modes", tiny, "--modes", "window,static", "--target-ms", 5, *few
    )
    assert (
        result.exit_code == 2
        and "target_ms has no effect here: it applies to batching adaptive" in result.stderr
    )
    result = octavo("bench", "batching-modes", tiny, "--max-batch", 1, *few)
    assert result.exit_code == 2 and "max_batch has no effect here" in result.stderr
    result = octavo("bench", "batching-modes", tiny, "--batching", "static", "--max-batch", 1, *few)
    assert result.exit_code == 2 and "use --max-num-seqs" in result.stderr


def test_urgent_requests_among_others(octavo: Octavo, tiny: str) -> None:
    result = octavo("bench", "priority", tiny, "--low", 8, "--high", 3, "--tokens", 16, "--prompt", 16, "--longest", 64,
                    "--max-num-seqs", 2, "--max-model-len", 128)  # fmt: skip
    assert result.exit_code == 0, result.output
    r = json.loads(result.stdout.splitlines()[-1])
    assert r["fcfs"]["low_finished"] == r["priority"]["low_finished"] == 8
    assert (
        r["ratio_p99"] > 0 and "full load, priority" in result.stdout and "8 of 8" in result.stdout
    )


@pytest.mark.parametrize("spare", [scheduling.SPARE_WORK, 0.01])
def test_there_is_enough_other_work_for_every_urgent_request(
    spare: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine as fast as a small model's on a GPU, and if the first guess was far too low."""
    costs, cache = (
        Costs(step=1e-3, prefill=4e-6, sampled=1e-5, kv=1e-8, pairs=0.0),
        CacheConfig(16, 20_000, prefix_caching=False),
    )
    llm: Any = SimpleNamespace(schedule=ScheduleConfig(16, 2048, 2048, depth=2))
    policies = []

    def run_trace(llm: LLM, trace: list[TraceEntry], schedule: ScheduleConfig) -> Report:
        policies.append(schedule.policy)
        return simulate(trace, costs, cache, schedule)

    monkeypatch.setattr(scheduling, "run_trace", run_trace)
    monkeypatch.setattr(scheduling, "SPARE_WORK", spare)
    r = scheduling.priority(llm, PRIORITY_LOAD)
    assert r["priority"]["loaded"] >= scheduling.MIN_LOADED and r["depth"] == 1
    assert (policies.count("priority") == 3) == (spare > 1), (
        "a warm-up, a guess, and again if it was too low"
    )
    assert (
        r["priority"]["low_finished"] == r["fcfs"]["low_finished"] == r["low"]
        and r["ratio_p99"] < 2
    )
    few = scheduling.priority(llm, replace(PRIORITY_LOAD, low=4, high=10))
    assert few["low"] == 4 and few["priority"]["loaded"] < scheduling.MIN_LOADED, "as asked for"


def test_replies_are_ragged_and_arrivals_random() -> None:
    trace = scheduling.with_arrivals(scheduling.mixed_length_trace(2000), requests_per_second=10.0)
    outputs = [entry.output for entry in trace]
    assert min(outputs) == 16 and max(outputs) > 500
    assert 0.3 < sum(n < 50 for n in outputs) / 2000 < 0.36, (
        "as many below 50 as in each other third of the scale"
    )
    assert trace[-1].arrival == pytest.approx(200, rel=0.1)


def test_tokens_that_did_not_arrive_are_not_counted(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny, progress=False, max_num_seqs=2)
    monkeypatch.setattr(scheduling, "replay", lambda engine, asked: Report(tokens=1))
    with pytest.raises(OctavoError, match="1 of 16 tokens arrived"):
        scheduling.run_trace(llm, scheduling.mixed_length_trace(1, 16, 16), llm.schedule)
