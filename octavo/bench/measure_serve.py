"""Measures a server under load over HTTP, and the same engine in-process with the same concurrency.

The client is strict and runs in a separate process (http_load.py). The cases are:

    same      the given number of requests, all with one prompt
    long      ten times as many requests
    distinct  ten times as many requests, whose prompts differ from the first token on
    stream    ten times as many requests, streamed
    one       streams one after another
    streams   about 32 streams at any time, which start at random times
    burst     32 streams that start at once, repeatedly

In the last three cases the engine records when it received a request and when it had the first
token (octavo/core/trace.py). The remaining time of the client's TTFT is the latency that the server
adds. The server is started as a program; nothing of it is imported here.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.http_load import Load
from octavo.bench.openai_endpoint import OpenAIEndpoint
from octavo.bench.picture import Axis, Panel, Series, bars, points
from octavo.bench.views import Result, ResultTable, ResultView
from octavo.core.trace import STEP_LINE
from octavo.engine_options import EngineOptions
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.llm import LLM

START_TIMEOUT = 600.0  # seconds for a server to become ready
STREAM_COUNT = 32  # concurrent streams
CASES: dict[str, Callable[[Load], Load]] = {
    "same": lambda load: load,
    "long": lambda load: replace(load, requests=10 * load.requests),
    "distinct": lambda load: replace(load, requests=10 * load.requests, distinct=True),
    "stream": lambda load: replace(load, requests=10 * load.requests, stream=True),
    "one": lambda load: replace(
        load, requests=max(load.requests // 10, 1), clients=1, stream=True, distinct=True
    ),
    "streams": lambda load: replace(
        load,
        requests=10 * STREAM_COUNT,
        clients=STREAM_COUNT + 4,
        stream=True,
        distinct=True,
        pause=0.2,
    ),
    "burst": lambda load: replace(
        load,
        requests=10 * STREAM_COUNT,
        clients=STREAM_COUNT,
        stream=True,
        distinct=True,
        burst=True,
    ),
}
# The engine records its times in these cases only, because recording takes time too.
TRACED_CASES = ("one", "streams", "burst")

SERVER_PROGRAM = """
import sys
import msgspec
from octavo.errors import OctavoError
from octavo.serve.serve_config import ServeConfig
from octavo.serve.server import run
try:
    run(msgspec.json.decode(sys.argv[1], type=ServeConfig))
except OctavoError as error:
    sys.exit(str(error))
"""


@dataclass
class RunningServer:
    endpoint: OpenAIEndpoint
    pid: int | None = None  # front process; None if the server was started elsewhere
    trace_file: Path | None = None

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time of front and engine so far, or zeros if it is unknown."""
        if self.pid is None:
            return 0.0, 0.0
        with suppress(OSError, IndexError, ValueError):
            engine_pid = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0]
            return _cpu_seconds(self.pid), _cpu_seconds(int(engine_pid))
        return 0.0, 0.0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _is_ready(running: RunningServer) -> bool:
    connection = http.client.HTTPConnection(running.endpoint.host, running.endpoint.port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def server(
    model: str | None,
    engine_options: EngineOptions,
    trace_file: Path | None = None,
    **server_fields: Any,
) -> Iterator[RunningServer]:
    """Start a server of this model and wait until it is ready.

    The engine records its times in `trace_file`. `more` are further fields of the server's config.
    """
    if trace_file is not None:
        engine_options = replace(engine_options, record_trace=str(trace_file))
    endpoint = OpenAIEndpoint("127.0.0.1", free_port(), model="bench")
    running = RunningServer(endpoint, trace_file=trace_file)
    config = {
        "model": model,
        "engine": asdict(engine_options),
        "served_model_name": ["bench"],
        "port": endpoint.port,
        **server_fields,
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER_PROGRAM, json.dumps(config)],
            stdout=log,
            stderr=log,
            text=True,
        )
        running.pid = process.pid
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while not _is_ready(running):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise OctavoError(f"the server did not start: {log.read().strip()[-800:]}")
                time.sleep(0.05)
            yield running
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# ---- one case ------------------------------------------------------------------------------------


def run_client(running: RunningServer, load: Load) -> dict[str, Any]:
    """Run http_load in a separate process, and add the CPU seconds of the server to its result."""
    load = running.endpoint.applied_to(load)
    cpu_before = running.cpu_seconds()
    client_command = [sys.executable, "-m", "octavo.bench.http_load"]
    finished = subprocess.run(
        client_command, input=json.dumps(asdict(load)), capture_output=True, text=True
    )
    if finished.returncode:
        raise OctavoError(
            f"the client ended with {finished.returncode}: {finished.stderr.strip()[-500:]}"
        )
    result: dict[str, Any] = json.loads(finished.stdout)
    cpu_used = [
        later - earlier for earlier, later in zip(cpu_before, running.cpu_seconds(), strict=True)
    ]
    return result | {"front_cpu_seconds": cpu_used[0], "engine_cpu_seconds": cpu_used[1]}


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    milliseconds = {}
    for quantile in (50, 95, 99):
        index = min(len(ordered) * quantile // 100, len(ordered) - 1)
        milliseconds[f"p{quantile}"] = 1e3 * ordered[index]
    return milliseconds


def report(case: str, result: dict[str, Any], trace_file: Path | None) -> dict[str, Any]:
    """Return the figures of one run. Only good replies count."""
    good_replies = result["good"]
    load = result["load"]
    seconds = max(result["seconds"], 1e-9)
    good_count = max(len(good_replies), 1)
    summary = {
        "case": case,
        "clients": load["clients"],
        "requests": load["requests"],
        "good": len(good_replies),
        "wrong": result["wrong"],
        "statuses": result["statuses"],
        "seconds": seconds,
        "requests_s": len(good_replies) / seconds,
        "tok_s": result["tokens"] / seconds,
        "latency_ms": percentiles([end - sent for _, sent, _, end in good_replies]),
        "ttft_ms": {},
        "cpu_us_a_request": {
            "front": 1e6 * result["front_cpu_seconds"] / good_count,
            "engine": 1e6 * result["engine_cpu_seconds"] / good_count,
            "client": 1e6 * result["cpu_seconds"] / good_count,
        },
    }
    if load["stream"]:
        summary["ttft_ms"] = percentiles([first - sent for _, sent, first, _ in good_replies])
    if trace_file is not None:
        summary |= added_latency(good_replies, trace_file)
    return summary


def added_latency(
    good_replies: list[tuple[str, float, float, float]], trace_file: Path
) -> dict[str, Any]:
    """Return the parts of the time to the first byte of each request.

    The parts are the way in, the engine and the way out. The time of the engine includes the wait
    for the step in flight, which is also a part of its own. The server adds the way in and the way
    out.
    """
    lines = trace_file.read_text().splitlines()
    trace_lines = [json.loads(line) for line in lines if not line.startswith(STEP_LINE)]
    entries = {entry["id"].rpartition("-")[0]: entry for entry in trace_lines}
    parts_by_name: dict[str, list[float]] = {
        "in": [],
        "engine": [],
        "picked_up": [],
        "out": [],
        "added": [],
    }
    for request_id, sent_at, first_byte, _ in good_replies:
        if (entry := entries.get(request_id)) is None:
            raise OctavoError(f"the trace of the engine has no entry for request {request_id}")
        inbound = entry["submitted"] - sent_at
        outbound = first_byte - entry["first_token"]
        durations = (
            inbound,
            entry["first_token"] - entry["submitted"],
            entry["queued"] - entry["submitted"],
            outbound,
            inbound + outbound,
        )
        for part, duration in zip(parts_by_name, durations, strict=True):
            parts_by_name[part].append(duration)
    return {f"{part}_ms": percentiles(durations) for part, durations in parts_by_name.items()}


def measure(
    running: RunningServer,
    load: Load,
    case_names: list[str],
    repeat: int = 3,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Yield the run with the median requests per second of each case.

    The row includes the problems of all runs of the case.
    """
    run_client(running, replace(load, requests=2 * load.clients, stream=True))  # warm-up
    for case_name in case_names:
        runs = []
        for _ in range(repeat):
            case = CASES[case_name](load)
            # Prompts with new numbers are not in the prefix cache.
            load = replace(load, first_number=load.first_number + case.requests)
            runs.append(report(case_name, run_client(running, case), running.trace_file))
            advance()
        median_run = sorted(runs, key=lambda run: run["requests_s"])[len(runs) // 2]
        problems: dict[str, int] = {}
        for run in runs:
            for problem, count in run["wrong"].items():
                problems[problem] = problems.get(problem, 0) + count
        yield {**median_run, "wrong": problems, "runs": [run["requests_s"] for run in runs]}


def in_process(llm: LLM, load: Load, repeat: int = 3) -> float:
    """Return the tokens per second of the same requests given directly to the engine as ids."""
    from octavo.params import SamplingParams
    from octavo.types import Request

    assert llm.tokenizer is not None
    params = SamplingParams(max_tokens=load.tokens, ignore_eos=True, detokenize=False)
    engine = llm.engine
    tokens_per_second = []
    for _ in range(repeat):
        prompts = [
            llm.tokenizer.encode(json.loads(load.body(index))["prompt"])
            for index in range(load.requests)
        ]
        load = replace(load, first_number=load.first_number + load.requests)
        tokens = 0
        sent = 0
        start = time.perf_counter()
        while sent < min(load.clients, load.requests):
            engine.add(Request(str(sent), prompts[sent], params))
            sent += 1
        while not engine.idle:
            for output in engine.step():
                tokens += len(output.tokens)
                if output.finish_reason is not None and sent < load.requests:
                    engine.add(Request(str(sent), prompts[sent], params))
                    sent += 1
        tokens_per_second.append(tokens / (time.perf_counter() - start))
        if tokens != load.requests * load.tokens:
            raise OctavoError(
                f"{tokens} of {load.requests * load.tokens} tokens arrived in-process, so the run "
                "does not count"
            )
    return statistics.median(tokens_per_second)


# ---- view ----------------------------------------------------------------------------------------

TIME_PARTS = {
    "in": "way in",
    "engine": "engine",
    "picked_up": "queue in the engine",
    "out": "way out",
    "added": "added by the server",
}


def tables(result: Result) -> list[ResultTable]:
    columns = (
        *("case", "requests", "requests/s", "tok/s", "in-process", "% of in-process"),
        *("p50", "p95", "p99 ms", "TTFT p50", "p99 ms", "front CPU, us", "engine CPU, us"),
    )
    rows = []
    for row in result["rows"]:
        engine_cells = ["", ""]
        if "in_process_tok_s" in row:
            engine_cells = [f"{row['in_process_tok_s']:,.0f}", f"{row['of_in_process']:.0%}"]
        latency = [f"{row['latency_ms'].get(q, 0):,.1f}" for q in ("p50", "p95", "p99")]
        first_token = [
            f"{row['ttft_ms'][quantile]:,.1f}" if row["ttft_ms"] else ""
            for quantile in ("p50", "p99")
        ]
        cpu = [f"{row['cpu_us_a_request'][process]:,.0f}" for process in ("front", "engine")]
        speed = (f"{row['good']:,}", f"{row['requests_s']:,.1f}", f"{row['tok_s']:,.0f}")
        rows.append((row["case"], *speed, *engine_cells, *latency, *first_token, *cpu))
    result_tables = [ResultTable(columns, rows)]
    traced = [row for row in result["rows"] if "added_ms" in row]
    if traced:
        result_tables.append(
            ResultTable(
                ("ms to the first byte, p50 (p99)", *TIME_PARTS.values()),
                [
                    (
                        row["case"],
                        *(
                            f"{row[f'{part}_ms']['p50']:.2f} ({row[f'{part}_ms']['p99']:.2f})"
                            for part in TIME_PARTS
                        ),
                    )
                    for row in traced
                ],
            )
        )
    return result_tables


def notes(result: Result) -> list[str]:
    return [
        f"{row['case']}: {count} replies are wrong and do not count: {problem}"
        for row in result["rows"]
        for problem, count in row["wrong"].items()
    ]


def panels(result: Result) -> list[Panel]:
    rows = [row for row in result["rows"] if row["latency_ms"]]
    if not rows:
        return []
    quantiles = ("p50", "p95", "p99")
    return [
        points(
            "Latency of replies",
            [
                Series(
                    row["case"],
                    [(int(q.removeprefix("p")), row["latency_ms"][q]) for q in quantiles],
                )
                for row in rows
            ],
            Axis("percentile"),
            Axis("ms", starts_at_zero=True),
            connected=True,
        ),
        bars(
            "Replies per second",
            [row["case"] for row in rows],
            {"requests/s": [row["requests_s"] for row in rows]},
            "requests/s",
            width=420,
        ),
    ]


VIEW = ResultView(tables, panels, notes)
