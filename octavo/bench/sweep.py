"""Measures throughput and latency against the number of concurrent clients.

Each client sends its next request when its last one has ended. The number of clients doubles until
the maximum. Two points between the best one and its neighbours then refine the result.

    saturation   the fewest clients that reach 95% of the highest throughput
    goodput      tokens per second of requests that met the latency target; the best number of
                 clients is the one with the highest goodput
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from octavo.bench.drive import Job, drive
from octavo.bench.http_load import Load
from octavo.bench.measure_serve import RunningServer, run_client
from octavo.bench.openai_endpoint import OpenAIEndpoint
from octavo.bench.picture import Axis, Panel, Series, points
from octavo.bench.result_file import BenchRun
from octavo.bench.views import Result, ResultTable, ResultView
from octavo.core.simulate import percentile
from octavo.errors import OctavoError
from octavo.llm import LLM

SATURATED = 0.95  # share of the highest throughput
REQUESTS_PER_CLIENT = 2


@dataclass(frozen=True)
class GoodputTarget:
    """The latency targets that a request must meet to count for the goodput, in seconds."""

    ttft: float
    itl: float


class RequestTimes(NamedTuple):
    """Seconds of one request."""

    ttft: float
    itl: float  # the mean time between two of its tokens
    tokens: int


class PointTimes(NamedTuple):
    requests: list[RequestTimes]
    seconds: float


class SweepTarget(Protocol):
    def run(self, clients: int, requests: int) -> PointTimes: ...


class InProcess:
    """Gives requests of random tokens to an engine in this process."""

    def __init__(self, llm: LLM, prompt: int, output: int):
        self.llm = llm
        self.prompt = prompt
        self.output = output
        self.generator = random.Random(0)

    def run(self, clients: int, requests: int) -> PointTimes:
        vocabulary = self.llm.config.vocab_size // 2
        jobs = [
            Job([self.generator.randrange(vocabulary) for _ in range(self.prompt)], self.output)
            for _ in range(requests)
        ]
        self.llm.reset_prefix_cache()
        report = drive(self.llm.engine, jobs, clients, temperature=0.7)
        times = [
            RequestTimes(arrived[0] - sent, mean_gap(arrived[0], arrived[-1], len(arrived)), count)
            for arrived, sent, count in zip(
                report.token_times, report.sent_at, map(len, report.replies), strict=True
            )
        ]
        return PointTimes(times, report.seconds)


class OverHttp:
    """Sends requests to a server, by the strict client."""

    def __init__(self, endpoint: OpenAIEndpoint, prompt: str, output: int):
        self.server = RunningServer(endpoint.with_model())
        self.prompt = prompt
        self.output = output
        self.sent = 0

    def run(self, clients: int, requests: int) -> PointTimes:
        load = Load(
            port=0,
            clients=clients,
            requests=requests,
            tokens=self.output,
            prompt=self.prompt,
            distinct=True,
            first_number=self.sent,
            stream=True,
            timeout=600.0,
        )
        self.sent += requests
        result = run_client(self.server, load)
        if result["wrong"]:
            problems = ", ".join(f"{count} x {text}" for text, count in result["wrong"].items())
            raise OctavoError(f"replies are wrong, so the point does not count: {problems}")
        times = [
            RequestTimes(first - sent, mean_gap(first, last, self.output), self.output)
            for _, sent, first, last in result["good"]
        ]
        return PointTimes(times, result["seconds"])


def mean_gap(first: float, last: float, tokens: int) -> float:
    return (last - first) / max(tokens - 1, 1)


class Sweep:
    def __init__(
        self,
        target: SweepTarget,
        run: BenchRun,
        latency: GoodputTarget,
        advance: Callable[[int], None] = lambda clients: None,
    ):
        self.target = target
        self.run = run
        self.latency = latency
        self.advance = advance

    def measure(self, max_clients: int) -> None:
        """Add a row for each number of clients, and then for two more around the best one."""
        self.target.run(1, 2)  # warm-up
        clients = 1
        while clients <= max_clients:
            self._add_point(clients)
            clients *= 2
        for between in self._neighbours():
            self._add_point(between)

    def _add_point(self, clients: int) -> None:
        self.advance(clients)
        point = self.target.run(clients, max(REQUESTS_PER_CLIENT * clients, 4))
        tokens = sum(request.tokens for request in point.requests)
        good = [
            request
            for request in point.requests
            if request.ttft <= self.latency.ttft and request.itl <= self.latency.itl
        ]
        row: dict[str, Any] = {
            "clients": clients,
            "tok_s": tokens / point.seconds,
            "requests_s": len(point.requests) / point.seconds,
            "good": len(good) / len(point.requests),
            "goodput_tok_s": sum(request.tokens for request in good) / point.seconds,
        }
        for name in ("ttft", "itl"):
            times = [getattr(request, name) for request in point.requests]
            row |= {f"{name}_p{q}_ms": 1e3 * percentile(times, q) for q in (50, 99)}
        self.run.add_row(**row)
        self.run.rows.sort(key=lambda row_in_order: row_in_order["clients"])
        self.run.set_fact(**summary(self.run.rows))

    def _neighbours(self) -> list[int]:
        """Return two numbers of clients: one between the best point and each of its neighbours."""
        measured = [row["clients"] for row in self.run.rows]
        best = measured.index(self.run.result["goodput"]["clients"])
        ends = measured[max(best - 1, 0) : best + 2]
        between = [round((low * high) ** 0.5) for low, high in pairwise(ends)]
        return [clients for clients in between if clients not in measured]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return where throughput saturates, and where goodput is highest."""
    highest = max(row["tok_s"] for row in rows)
    saturated = next(row for row in rows if row["tok_s"] >= SATURATED * highest)
    best = max(rows, key=lambda row: row["goodput_tok_s"])
    return {
        "saturation": {"clients": saturated["clients"], "tok_s": saturated["tok_s"]},
        "goodput": {"clients": best["clients"], "tok_s": best["goodput_tok_s"]},
    }


# ---- view ----------------------------------------------------------------------------------------


def tables(result: Result) -> list[ResultTable]:
    columns = (
        *("clients", "tok/s", "requests/s", "TTFT p50, ms", "TTFT p99, ms"),
        *("ITL p50, ms", "ITL p99, ms", "within the target", "goodput, tok/s"),
    )
    rows = [
        (
            f"{row['clients']:,}",
            f"{row['tok_s']:,.0f}",
            f"{row['requests_s']:,.1f}",
            f"{row['ttft_p50_ms']:,.0f}",
            f"{row['ttft_p99_ms']:,.0f}",
            f"{row['itl_p50_ms']:,.1f}",
            f"{row['itl_p99_ms']:,.1f}",
            f"{row['good']:.0%}",
            f"{row['goodput_tok_s']:,.0f}",
        )
        for row in result["rows"]
    ]
    return [ResultTable(columns, rows, left=())]


def notes(result: Result) -> list[str]:
    if not result["rows"]:
        return []
    target = result["target"]
    saturation = result["saturation"]
    goodput = result["goodput"]
    return [
        f"Throughput saturates at {saturation['clients']:,} clients with "
        f"{saturation['tok_s']:,.0f} tok/s: more clients add less than 5%.",
        f"With at most {target['ttft_ms']:,.0f} ms to the first token and {target['itl_ms']:,.0f} "
        f"ms between tokens, {goodput['clients']:,} clients are best: {goodput['tok_s']:,.0f} "
        "tok/s.",
    ]


def panels(result: Result) -> list[Panel]:
    rows = result["rows"]

    def line(name: str, field: str) -> Series:
        return Series(name, [(row["clients"], row[field]) for row in rows])

    clients = Axis("clients", is_logarithmic=True)
    return [
        points(
            "Throughput against concurrency",
            [line("all requests", "tok_s"), line("within the target", "goodput_tok_s")],
            clients,
            Axis("tok/s", starts_at_zero=True),
            connected=True,
        ),
        points(
            "Latency against concurrency",
            [
                line("TTFT p50", "ttft_p50_ms"),
                line("TTFT p99", "ttft_p99_ms"),
                line("ITL p50", "itl_p50_ms"),
                line("ITL p99", "itl_p99_ms"),
            ],
            clients,
            Axis("ms", is_logarithmic=True),
            connected=True,
        ),
    ]


VIEW = ResultView(tables, panels, notes)
