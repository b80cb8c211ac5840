"""Compares the transports of the server: HTTP, WebSocket and gRPC, complete replies and streams.

One server runs for all transports, which are measured in turn. The client of each transport runs in
a separate process (transport_client.py). The replies are short, so that the transport is a large
part of the time.

    latency      one client: time to the complete reply, and to its first text
    throughput   16 clients
    CPU          time of the server's front process for one request
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from octavo.bench.interleave import interleave, spread
from octavo.bench.measure_serve import RunningServer, percentiles
from octavo.bench.picture import Panel, bars
from octavo.bench.result_file import BenchRun
from octavo.bench.transport_client import TransportLoad
from octavo.bench.views import Result, ResultTable, ResultView
from octavo.errors import OctavoError

TRANSPORTS = ("http", "http stream", "websocket", "grpc", "grpc stream")
NEEDS = {"websocket": "websockets", "grpc": "grpc", "grpc stream": "grpc"}
CLIENTS = 16
PROMPT = "The secret to building a high performance system is"


class TransportBench:
    def __init__(
        self,
        server: RunningServer,
        grpc_port: int,
        run: BenchRun,
        requests: int,
        tokens: int,
    ):
        self.server = server
        self.grpc_port = grpc_port
        self.run = run
        self.requests = requests
        self.tokens = tokens

    def measure(
        self, names: list[str], rounds: int, advance: Callable[[], None] = lambda: None
    ) -> None:
        for name in names:
            self._run_client(name, CLIENTS, CLIENTS)  # warm-up
        single = interleave(self._sides(names, 1, self.requests), rounds, advance)
        many = interleave(self._sides(names, CLIENTS, 4 * self.requests), rounds, advance)
        for name in names:
            totals = [seconds for result in single[name] for seconds in result["total"]]
            firsts = [seconds for result in single[name] for seconds in result["first"]]
            self.run.add_row(
                transport=name,
                latency_ms=percentiles(totals),
                first_ms=percentiles(firsts),
                requests_s=spread([result["good"] / result["seconds"] for result in many[name]]),
                front_us=spread([result["front_us"] for result in many[name]]),
                client_us=spread([result["client_us"] for result in many[name]]),
            )

    def _sides(
        self, names: list[str], clients: int, requests: int
    ) -> dict[str, Callable[[], dict[str, Any]]]:
        return {name: partial(self._run_client, name, clients, requests) for name in names}

    def _run_client(self, name: str, clients: int, requests: int) -> dict[str, Any]:
        endpoint = self.server.endpoint
        load = TransportLoad(
            transport=name,
            host=endpoint.host,
            port=endpoint.port,
            grpc_port=self.grpc_port,
            clients=clients,
            requests=requests,
            tokens=self.tokens,
            prompt=PROMPT,
            model=endpoint.model,
        )
        before = self.server.cpu_seconds()[0]
        finished = subprocess.run(
            [sys.executable, "-m", "octavo.bench.transport_client"],
            input=json.dumps(asdict(load)),
            capture_output=True,
            text=True,
        )
        if finished.returncode:
            raise OctavoError(f"the client of {name} failed: {finished.stderr.strip()[-500:]}")
        result: dict[str, Any] = json.loads(finished.stdout)
        if result["wrong"]:
            raise OctavoError(f"{name}: replies are wrong and do not count: {result['wrong']}")
        count = result["good"]
        front_seconds = self.server.cpu_seconds()[0] - before
        return result | {
            "front_us": 1e6 * front_seconds / count,
            "client_us": 1e6 * result["client_cpu_seconds"] / count,
        }


# ---- view ----------------------------------------------------------------------------------------


def tables(result: Result) -> list[ResultTable]:
    columns = (
        *("transport", "latency p50, ms", "p99, ms", "first text p50, ms"),
        *(f"requests/s, {CLIENTS} clients", "front CPU, us", "client CPU, us"),
    )
    rows = [
        (
            row["transport"],
            f"{row['latency_ms']['p50']:.1f}",
            f"{row['latency_ms']['p99']:.1f}",
            f"{row['first_ms']['p50']:.1f}",
            f"{row['requests_s']['median']:,.0f}",
            f"{row['front_us']['median']:,.0f}",
            f"{row['client_us']['median']:,.0f}",
        )
        for row in result["rows"]
    ]
    return [ResultTable(columns, rows)]


def panels(result: Result) -> list[Panel]:
    names = [row["transport"] for row in result["rows"]]
    return [
        bars(
            "Latency of a short reply, one client",
            names,
            {
                "whole reply, p50": [row["latency_ms"]["p50"] for row in result["rows"]],
                "first text, p50": [row["first_ms"]["p50"] for row in result["rows"]],
            },
            "ms",
        ),
        bars(
            f"Throughput, {CLIENTS} clients",
            names,
            {"requests/s": [row["requests_s"]["median"] for row in result["rows"]]},
            "requests/s",
            width=420,
        ),
    ]


VIEW = ResultView(tables, panels)
