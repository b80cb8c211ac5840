"""A server under load, over HTTP, as a strict client in a process of its own sees it (http_load.py), and beside it the same
engine in-process at the same concurrency: what the way over HTTP costs.

    same      so many requests, all with one prompt
    long      ten times as many
    distinct  ten times as many, each prompt another from its first token on
    stream    ten times as many, streamed
    one       streams one after another: what the server adds to the time to the first token
    streams   about 32 at any time, each begun some moments after another ended: the same
    burst     32 begun at once, again and again: the same, at its worst

For the last three the engine notes when it was given a request and had its first token (octavo/core/trace.py): what is left of
the client's time is what the server added. The server is started as a program; nothing of it is imported here.
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
from octavo.engine_options import EngineOptions
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.llm import LLM

PATIENCE = 600.0  # seconds for a server to become ready
STREAMS = 32  # at once
CASES: dict[str, Callable[[Load], Load]] = {
    "same": lambda load: load,
    "long": lambda load: replace(load, requests=10 * load.requests),
    "distinct": lambda load: replace(load, requests=10 * load.requests, distinct=True),
    "stream": lambda load: replace(load, requests=10 * load.requests, stream=True),
    "one": lambda load: replace(
        load, requests=max(load.requests // 10, 1), clients=1, stream=True, distinct=True
    ),
    "streams": lambda load: replace(
        load, requests=10 * STREAMS, clients=STREAMS + 4, stream=True, distinct=True, pause=0.2
    ),
    "burst": lambda load: replace(
        load, requests=10 * STREAMS, clients=STREAMS, stream=True, distinct=True, burst=True
    ),
}
STAMPED = ("one", "streams", "burst")  # the engine writes down its times, which takes some itself

SERVER = """
import sys
import msgspec
from octavo.serve.serve_config import ServeConfig
from octavo.serve.server import run
run(msgspec.json.decode(sys.argv[1], type=ServeConfig))
"""


@dataclass
class Running:
    host: str
    port: int
    pid: int | None = None  # of the front, where it was started here
    trace: Path | None = None

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the front and of the engine, so far; zeros where that cannot be known."""
        if self.pid is None:
            return 0.0, 0.0
        with suppress(OSError, IndexError, ValueError):
            child = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0]
            return _cpu_seconds(self.pid), _cpu_seconds(int(child))
        return 0.0, 0.0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _ready(running: Running) -> bool:
    connection = http.client.HTTPConnection(running.host, running.port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def server(
    model: str | None, engine: EngineOptions, trace: Path | None = None
) -> Iterator[Running]:
    """Start a server and wait until it is ready. The engine records its times in `trace`."""
    if trace is not None:
        engine = replace(engine, record_trace=str(trace))
    running = Running("127.0.0.1", _free_port(), trace=trace)
    config = {
        "model": model,
        "engine": asdict(engine),
        "name": "bench",
        "port": running.port,
        "max_queue": 4096,
    }
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, json.dumps(config)], stdout=said, stderr=said, text=True
        )
        running.pid = process.pid
        try:
            end = time.monotonic() + PATIENCE
            while not _ready(running):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    raise OctavoError(f"the server did not start: {said.read().strip()[-800:]}")
                time.sleep(0.05)
            yield running
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# ---- one case -------------------------------------------------------------------------------------------


def ask(running: Running, load: Load) -> dict[str, Any]:
    """What http_load.measure gives, from a process of its own, and the server's CPU seconds meanwhile."""
    load = replace(load, host=running.host, port=running.port)
    before = running.cpu_seconds()
    argv = [sys.executable, "-m", "octavo.bench.http_load", json.dumps(asdict(load))]
    finished = subprocess.run(argv, capture_output=True, text=True)
    if finished.returncode:
        raise OctavoError(
            f"the client ended with {finished.returncode}: {finished.stderr.strip()[-500:]}"
        )
    found: dict[str, Any] = json.loads(finished.stdout)
    spent = [b - a for a, b in zip(before, running.cpu_seconds(), strict=True)]
    return found | {"front_cpu_seconds": spent[0], "engine_cpu_seconds": spent[1]}


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(seconds)
    return (
        {
            f"p{q}": 1e3 * ordered[min(len(ordered) * q // 100, len(ordered) - 1)]
            for q in (50, 95, 99)
        }
        if ordered
        else {}
    )


def report(case: str, found: dict[str, Any], trace: Path | None) -> dict[str, Any]:
    """One run, in numbers that count good replies alone."""
    good = found["good"]
    load = found["load"]
    seconds = max(found["seconds"], 1e-9)
    count = max(len(good), 1)
    record = {
        "case": case,
        "clients": load["clients"],
        "requests": load["requests"],
        "good": len(good),
        "wrong": found["wrong"],
        "statuses": found["statuses"],
        "seconds": seconds,
        "requests_s": len(good) / seconds,
        "tok_s": found["tokens"] / seconds,
        "latency_ms": percentiles([end - sent for _, sent, _, end in good]),
        "ttft_ms": percentiles([first - sent for _, sent, first, _ in good])
        if load["stream"]
        else {},
        "cpu_us_a_request": {
            name: 1e6 * found[key] / count
            for name, key in {
                "front": "front_cpu_seconds",
                "engine": "engine_cpu_seconds",
                "client": "cpu_seconds",
            }.items()
        },
    }
    if trace is not None:
        record |= added(good, trace)
    return record


def added(good: list[tuple[str, float, float, float]], trace: Path) -> dict[str, Any]:
    """Where the time to the first byte went, request by request: on the way in, in the engine (and of that, until the step
    that was under way had ended), on the way out. What the server adds is the way in and the way out."""
    lines = map(json.loads, trace.read_text().splitlines())
    noted = {line["id"].rpartition("-")[0]: line for line in lines}
    parts: dict[str, list[float]] = {
        "in": [],
        "engine": [],
        "picked_up": [],
        "out": [],
        "added": [],
    }
    for id, sent, first, _ in good:
        if (line := noted.get(id)) is None:
            raise OctavoError(f"the engine noted nothing of request {id}")
        came = line["submitted"] - sent
        went = first - line["first_token"]
        values = (
            came,
            line["first_token"] - line["submitted"],
            line["queued"] - line["submitted"],
            went,
            came + went,
        )
        for name, value in zip(parts, values, strict=True):
            parts[name].append(value)
    return {f"{name}_ms": percentiles(values) for name, values in parts.items()}


def measure(
    running: Running,
    load: Load,
    names: list[str],
    repeat: int = 3,
    done: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """A record a case: the run with the median requests a second, with what was wrong in any of them."""
    ask(running, replace(load, requests=2 * load.clients, stream=True))  # warm
    results = []
    for name in names:
        runs = []
        for _ in range(repeat):
            case = CASES[name](load)
            # what was asked before is in the prefix cache
            load = replace(load, number=load.number + case.requests)
            runs.append(report(name, ask(running, case), running.trace))
            done()
        middle = sorted(runs, key=lambda r: r["requests_s"])[len(runs) // 2]
        wrong: dict[str, int] = {}
        for why, count in ((why, count) for run in runs for why, count in run["wrong"].items()):
            wrong[why] = wrong.get(why, 0) + count
        results.append({**middle, "wrong": wrong, "runs": [r["requests_s"] for r in runs]})
    return results


def in_process(llm: LLM, load: Load, repeat: int = 3) -> float:
    """Tokens a second of the same requests given to the engine directly, so many at once: ids in, ids out."""
    from octavo.params import SamplingParams
    from octavo.types import Request

    assert llm.tokenizer is not None
    params = SamplingParams(max_tokens=load.tokens, ignore_eos=True, detokenize=False)
    engine = llm.engine
    speeds = []
    for _ in range(repeat):
        prompts = [
            llm.tokenizer.encode(json.loads(load.body(i))["prompt"]) for i in range(load.requests)
        ]
        load = replace(load, number=load.number + load.requests)
        tokens = asked = 0
        start = time.perf_counter()
        while asked < min(load.clients, load.requests):
            engine.add(Request(str(asked), prompts[asked], params))
            asked += 1
        while not engine.idle:
            for out in engine.step():
                tokens += len(out.tokens)
                if out.finish_reason is not None and asked < load.requests:
                    engine.add(Request(str(asked), prompts[asked], params))
                    asked += 1
        speeds.append(tokens / (time.perf_counter() - start))
        if tokens != load.requests * load.tokens:
            raise OctavoError(
                f"{tokens} of {load.requests * load.tokens} tokens arrived in-process: not counted"
            )
    return statistics.median(speeds)
