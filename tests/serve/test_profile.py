"""`octavo profile` sees all processes of a server, and names what limits it."""

from __future__ import annotations

import csv
import io
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from octavo.bench.bottleneck import ServerActivity, find_bound, find_starvation
from octavo.bench.flame_graph import flame_svg, hottest_functions, read_stacks
from octavo.bench.perf_counters import PerfCounters, describe_error
from octavo.bench.server_profile import (
    ProfileSession,
    activity_of,
    find_processes,
    listening_ports,
    parse_metrics,
)
from octavo.cli import app
from octavo.errors import OctavoError
from tests.serve.running import Running, server

DECODING = ServerActivity(
    seconds=10.0,
    device="cpu",
    front_cpu_seconds=1.0,
    worker_cpu_seconds=0.0,
    engine_cpu_seconds=15.0,
    plan_seconds=0.2,
    launch_seconds=9.0,
    wait_seconds=0.2,
    commit_seconds=0.2,
    steps=1000,
    prefill_steps=20,
    full_steps=0,
    prefill_seconds=1.0,
    decode_seconds=8.4,
    prefill_tokens=500,
    decode_tokens=8000,
    preemptions=0,
    waiting=0.0,
    kv_usage=0.2,
    loop_lag_seconds=0.0,
)
IDLE = dict(plan_seconds=0.0, launch_seconds=0.2, wait_seconds=0.0, commit_seconds=0.0)
PREFILLING = dict(prefill_steps=900, prefill_seconds=8.0, decode_seconds=1.0)


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (dict(), "decode", "Decode steps took 89% of the time of steps, with 8.0 sequences"),
        (dict(**IDLE), "idle", "in a step for 2% of the time"),
        (dict(**IDLE, front_cpu_seconds=9.0), "host", "The API server used 90% of a core"),
        (dict(**IDLE, worker_cpu_seconds=9.0), "host", "worker processes of the API server"),
        (dict(**IDLE, loop_lag_seconds=1.5), "host", "was blocked for 1.5 s at a time"),
        (dict(preemptions=7), "memory", "7 sequences were preempted"),
        (dict(kv_usage=0.99, waiting=3.0), "memory", "99% full, 3 requests waited"),
        (dict(plan_seconds=5.0, launch_seconds=4.0), "host", "The scheduler and the launch"),
        (dict(device="cuda"), "host", "took 98% of the engine's time"),
        (dict(device="cuda", launch_seconds=0.5, wait_seconds=9.0), "decode", "Decode steps took"),
        (PREFILLING, "prefill", "Prompts took 89% of the time of steps."),
        (
            dict(**PREFILLING, full_steps=880, waiting=4.0, token_budget=16),
            "prefill",
            "98% of these steps used up the token budget of 16 while requests waited. Raise "
            "--max-num-batched-tokens",
        ),
    ],
)
def test_the_bound_is_named(changes: dict[str, float], kind: str, says: str) -> None:
    bound = find_bound(replace(DECODING, **changes))  # type: ignore[arg-type]
    assert bound.kind == kind and says in bound.text()


def test_an_engine_without_cores_is_noticed() -> None:
    assert find_starvation(DECODING) is None
    starved = replace(DECODING, engine_cpu_seconds=1.5)
    assert "got 16% of a core while it was in steps" in str(find_starvation(starved))
    assert find_starvation(replace(starved, device="cuda")) is None


def test_metrics_are_read_by_name_and_by_label() -> None:
    text = (
        "# HELP x y\n"
        'octavo:process_memory_bytes{model_name="m",process="front"} 100.0\n'
        'octavo:process_memory_bytes{model_name="m",process="engine"} 200.0\n'
        'vllm:engine_steps_total{model_name="m"} 1e3\n'
        "inference_requests_total 5.0\n"
    )
    found = parse_metrics(text)
    assert found["process_memory_bytes"] == 300 and found["process_memory_bytes:engine"] == 200
    assert found["engine_steps_total"] == 1000 and "inference_requests_total" not in found


# ---- stacks and counters -----------------------------------------------------------------------

STACKS = "main (a/server.py:3);step (core/engine.py:80);plan (core/scheduler.py:9) 30\n"
STACKS += "main (a/server.py:3);step (core/engine.py:81) 10\nnot a line\n"


def test_a_flame_graph_shows_functions_as_wide_as_their_time() -> None:
    stacks = read_stacks(STACKS)
    assert sum(stacks.values()) == 40
    assert hottest_functions(stacks) == [
        ("plan (core/scheduler.py)", 0.75),
        ("step (core/engine.py)", 0.25),
    ]
    picture = flame_svg("engine", stacks)
    assert "engine: 40 samples" in picture
    assert "plan (core/scheduler.py): 75.0%" in picture and 'width="899.5"' in picture
    assert flame_svg("nothing", Counter())


def test_counters_that_are_missing_say_why() -> None:
    counters = PerfCounters(os.getpid())
    assert counters.problem is not None or counters.read()["cycles"] >= 0
    counters.close()
    assert "no hardware counters: virtual machines" in describe_error(2)
    assert "perf_event_paranoid" in describe_error(13) and "run as root" in describe_error(13)
    assert PerfCounters(2**22 + 1).problem == f"process {2**22 + 1} has ended"


def test_a_process_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(OctavoError, match="/proc has no process"):
        ProfileSession(2**22 + 1, 1.0)
    result = CliRunner().invoke(app, ["profile", "--pid", str(2**22 + 1)])
    assert result.exit_code == 2 and "has no process" in result.output


def test_any_process_can_be_observed() -> None:
    found = ProfileSession(os.getpid(), 0.2, interval=0.1, with_stacks=False).run()
    assert [process.role for process in found.processes] == ["process"]
    assert len(found.samples) >= 2 and activity_of(found) is None


def test_all_processes_of_a_server_are_observed(running: Running, tmp_path: Path) -> None:
    pid = running.process.pid
    engine = running.engines()[0]
    roles = {process.pid: process.role for process in find_processes(pid)}
    assert roles[pid] == "front" and roles[engine] == "engine"
    assert find_processes(engine)[0].pid == pid
    assert running.port in listening_ports(pid)
    args = ["profile", "--pid", str(pid), "--duration", "1", "--csv"]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert {"front", "engine"} <= {row["role"] for row in rows}
    assert all(int(row["peak_rss_bytes"]) >= int(row["rss_bytes"]) > 2**20 for row in rows)
    doctor = CliRunner().invoke(app, ["doctor", "--pid", str(pid)])
    assert doctor.stdout.startswith("front") and f"\nengine  pid {engine:,}" in doctor.stdout


def test_the_memory_of_both_processes_is_a_metric(running: Running) -> None:
    found = running.metrics()
    assert found['octavo:process_memory_bytes{process="front"}'] > 2**20
    assert found['octavo:process_memory_bytes{process="engine"}'] > 2**20


# ---- planted cases -----------------------------------------------------------------------------


@contextmanager
def load(running: Running, clients: int, **fields: object) -> Iterator[None]:
    """Clients that send one completion after another."""
    ends = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=running.url, timeout=60) as client:
            while not ends.is_set():
                body = {"prompt": "hello there", "max_tokens": 4, "ignore_eos": True, **fields}
                assert client.post("/v1/completions", json=body).status_code == 200

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def bound_of(running: Running, seconds: float = 6.0) -> str:
    args = ["profile", "--pid", str(running.process.pid), "--duration", str(seconds)]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_a_slow_tokenizer_is_named(tmp_path: Path) -> None:
    with server(tmp_path, slow_tokenizer=0.05) as running, load(running, clients=8):
        shown = bound_of(running)
    # On a busy machine the process gets less than a core, and only its loop is seen to be late.
    assert re.search(r"bound: host. The (API server used|event loop of the API server)", shown), (
        shown
    )
    assert re.search(r"Most of its time: \S*slow_encode", shown), "the function is named"


@pytest.mark.slow
def test_a_tiny_token_budget_is_named(tmp_path: Path) -> None:
    engine = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "enable_prefix_caching": False}
    long_prompt = list(range(200))
    with (
        server(tmp_path, engine=engine) as running,
        load(running, clients=12, prompt=long_prompt, max_tokens=1),
    ):
        shown = " ".join(bound_of(running).split())
    assert "bound: prefill. Prompts took" in shown, shown
    assert "used up the token budget of 8 while requests waited" in shown, shown
    assert "Raise --max-num-batched-tokens" in shown
