"""Repeats the headline claims of five small engines that Octavo grew out of, under fair conditions.

Each row has the claim, what the claim really measured, and what this machine does in the fair run.
The shapes of the models are those of the claims, with random weights: speed does not depend on the
values. Speculative decoding needs trained weights, so it runs on the embedded model.
"""

from __future__ import annotations

import random
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from octavo.assemble import pick_device
from octavo.bench import measure_batching, measure_speculation
from octavo.bench.ablation import release_memory
from octavo.bench.drive import Job, drive
from octavo.bench.http_load import Load
from octavo.bench.http_load import measure as measure_http
from octavo.bench.interleave import interleave, ratios
from octavo.bench.measure_serve import percentiles, run_client, server
from octavo.bench.measure_speculation import Case
from octavo.bench.model_shapes import SHAPES, load_shape, write_directory
from octavo.bench.picture import Panel, bars
from octavo.bench.result_file import BenchRun
from octavo.bench.throughput import peak_memory
from octavo.bench.views import Result, ResultTable, ResultView
from octavo.engine_options import EngineOptions
from octavo.errors import OctavoError
from octavo.llm import LLM

CLIENTS = 50
REQUESTS = 500
DISTINCT_REQUESTS = {"cpu": 1000, "cuda": 5000}
TOKENS = 30
PROMPT = "The secret to building a high performance system is"
SHARED_PREFIX = 129
EXIT_LAYERS = {"8 of 22": 11, "18 of 22": 24}  # the same fractions of the embedded model's layers
LONG_REPLY = {"cpu": 64, "cuda": 1024}  # tokens of the last row


class Finding(NamedTuple):
    """A figure of a fair run."""

    name: str
    value: float
    unit: str

    def text(self) -> str:
        magnitude = abs(self.value)
        decimals = 1
        if magnitude >= 100:
            decimals = 0
        elif magnitude < 10:
            decimals = 2
        space = "" if self.unit in ("x", "%") else " "
        return f"{self.name} {self.value:,.{decimals}f}{space}{self.unit}"


class EngineClaim(NamedTuple):
    claim: str
    really: str
    fair_run: str
    measure: Callable[[ClaimBench], list[Finding]]
    needs: tuple[str, ...] = ()  # packages


class ClaimBench:
    """Measures claims on this machine."""

    def __init__(self, run: BenchRun, options: EngineOptions, rounds: int = 3):
        self.run = run
        self.options = options
        self.rounds = rounds

    def measure(self, names: list[str], advance: Callable[[str], None] = lambda name: None) -> None:
        for name in names:
            claim = CLAIMS[name]
            missing = [package for package in claim.needs if find_spec(package) is None]
            if missing:
                self.run.skip(name, f"not installed: {', '.join(missing)}")
                continue
            advance(name)
            try:
                findings = claim.measure(self)
            except OctavoError as error:
                self.run.skip(name, str(error))
                continue
            self.run.add_row(
                name=name,
                claim=claim.claim,
                really=claim.really,
                fair_run=claim.fair_run,
                findings=[finding._asdict() for finding in findings],
            )
            release_memory()

    def load(self, shape: str | None, **changes: Any) -> LLM:
        llm = load_shape(replace(self.options, **changes), shape)
        llm.warm_up()
        return llm


# ---- the claims ----------------------------------------------------------------------------------


def batching(bench: ClaimBench) -> list[Finding]:
    llm = bench.load(
        "tinyllama-1.1b", max_num_seqs=4, max_model_len=256, enable_prefix_caching=False
    )
    result = measure_batching.measure(llm, 32, bench.rounds)
    return [
        Finding("batched over sequential", result["ratio"]["median"], "x"),
        Finding("batched", result["batched_tok_s"]["median"], "tok/s"),
    ]


@contextmanager
def failing_server() -> Iterator[int]:
    """Start a server that answers every request with status 500, and yield its port."""
    reply = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as listener:

        def talk(connection: socket.socket) -> None:
            with connection:
                while connection.recv(65536):
                    connection.sendall(reply)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def serving(bench: ClaimBench) -> list[Finding]:
    load = Load(
        port=0,
        clients=CLIENTS,
        requests=REQUESTS,
        tokens=TOKENS,
        prompt=PROMPT,
        exact=True,
        timeout=900.0,
        reply_timeout=900.0,
    )
    findings = []
    distinct = DISTINCT_REQUESTS[pick_device(bench.options.device).type]
    with tempfile.TemporaryDirectory(prefix="octavo-claims-") as directory:
        write_directory(SHAPES["gpt2"], Path(directory))
        options = replace(bench.options, max_num_seqs=64, max_model_len=1024, load_format="dummy")
        with server(directory, options) as running:
            run_client(running, replace(load, requests=2 * CLIENTS))  # warm-up
            for case, changes in (
                ("one prompt", {}),
                ("distinct prompts", {"distinct": True, "requests": distinct}),
            ):
                result = run_client(running, replace(load, **changes))  # type: ignore[arg-type]
                if result["wrong"]:
                    raise OctavoError(f"replies are wrong and do not count: {result['wrong']}")
                seconds = result["seconds"]
                latency = percentiles([end - sent for _, sent, _, end in result["good"]])
                findings += [
                    Finding(case, len(result["good"]) / seconds, "requests/s"),
                    Finding(case, result["tokens"] / seconds, "tok/s"),
                    Finding("p50", latency["p50"], "ms"),
                    Finding("p95", latency["p95"], "ms"),
                ]
    with failing_server() as port:
        result = measure_http(replace(load, port=port))
        answered = sum(result["statuses"].values())
        findings.append(
            Finding(
                "the claim's way of counting, against a server that only fails",
                answered / result["seconds"],
                "requests/s",
            )
        )
    return findings


def window_batching(bench: ClaimBench) -> list[Finding]:
    base = bench.load("gpt2", max_num_seqs=8, max_model_len=512, enable_prefix_caching=False)
    generator = random.Random(0)
    jobs = [
        Job([generator.randrange(1000) for _ in range(10)], generator.randint(16, 48))
        for _ in range(32)
    ]
    modes = {name: base.with_options(batching=name) for name in ("none", "window", "continuous")}

    def runner(llm: LLM) -> Callable[[], float]:
        return lambda: drive(llm.engine, jobs, clients=8).tokens_per_second

    drive(modes["continuous"].engine, jobs, clients=8)  # warm-up
    speeds = interleave({name: runner(llm) for name, llm in modes.items()}, bench.rounds)
    return [
        Finding(
            "window over one at a time", ratios(speeds["window"], speeds["none"])["median"], "x"
        ),
        Finding(
            "continuous over one at a time",
            ratios(speeds["continuous"], speeds["none"])["median"],
            "x",
        ),
    ]


def prefix_cache(bench: ClaimBench) -> list[Finding]:
    generator = random.Random(0)
    shared = [generator.randrange(1000) for _ in range(SHARED_PREFIX)]
    jobs = [Job(shared + [generator.randrange(1000) for _ in range(8)], 1) for _ in range(4)]
    queried = sum(len(job.prompt) for job in jobs)
    plain = bench.load(
        "tinyllama-1.1b", max_num_seqs=4, max_model_len=512, enable_prefix_caching=False
    )
    caching = plain.with_options(enable_prefix_caching=True)
    counters = caching.engine.scheduler.counters
    drive(plain.engine, jobs)  # warm-up
    seconds: dict[str, list[float]] = {"plain": [], "shared": [], "again": []}
    hits = {"shared": 0.0, "again": 0.0}  # those of the last round
    for _ in range(bench.rounds):
        seconds["plain"].append(drive(plain.engine, jobs).seconds)
        caching.reset_prefix_cache()
        for side in hits:
            cached_before = counters.cached_tokens
            seconds[side].append(drive(caching.engine, jobs).seconds)
            hits[side] = 100 * (counters.cached_tokens - cached_before) / queried
    speedup = {side: ratios(seconds["plain"], seconds[side])["median"] for side in hits}
    return [
        Finding("prefill", speedup["shared"], "x faster"),
        Finding("hits", hits["shared"], "%"),
        Finding("prefill after completion", speedup["again"], "x faster"),
        Finding("hits after completion", hits["again"], "%"),
    ]


def speculation(bench: ClaimBench) -> list[Finding]:
    llm = bench.load(None, max_num_seqs=4, max_model_len=1024, num_gpu_blocks_override=512)
    methods = {
        f"K={drafts}, exit {label}": f"early_exit,layer={layer},k={drafts},adaptive=no"
        for label, layer in EXIT_LAYERS.items()
        for drafts in (4, 2)
    }
    methods_read = {
        name: measure_speculation.parse_method("claims", text) for name, text in methods.items()
    }
    grid = measure_speculation.measure(llm, methods_read, [Case("chat", 1, 0.0)], 50, bench.rounds)
    findings = []
    for record in grid:
        findings += [
            Finding(record["method"], record["ratio"]["median"], "x"),
            Finding("predicted", record["predicted_ratio"] or 0.0, "x"),
            Finding("accepted", 100 * (record["acceptance"] or 0.0), "%"),
        ]
    working = {
        "suffix drafts on texts that repeat": measure_speculation.parse_method("claims", "suffix")
    }
    (best,) = measure_speculation.measure(llm, working, [Case("copy", 1, 0.0)], 50, bench.rounds)
    findings.append(Finding(best["method"], best["ratio"]["median"], "x"))
    return findings


def single_stream(bench: ClaimBench) -> list[Finding]:
    llm = bench.load("qwen3-1.7b", max_num_seqs=1, max_model_len=2048, enable_prefix_caching=False)
    tokens = LONG_REPLY[llm.device.type]
    job = Job([7] * 128, tokens)
    reports = [drive(llm.engine, [job]) for _ in range(bench.rounds)]
    middle = sorted(reports, key=lambda report: report.seconds)[len(reports) // 2]
    return [
        Finding("TTFT", 1e3 * middle.median_first_token(), "ms"),
        Finding("ITL p50", 1e3 * middle.gap_percentile(50), "ms"),
        Finding(f"{tokens} tokens:", middle.tokens_per_second, "tok/s"),
        Finding("memory", peak_memory(llm) / 2**30, "GiB"),
    ]


SERVER_PACKAGES = ("starlette", "uvicorn", "msgspec")
CLAIMS: dict[str, EngineClaim] = {
    "batching": EngineClaim(
        "4 requests of 32 tokens in one batch are 3.1 times as fast as one after another",
        "TinyLlama in float32 on a laptop's CPU, one run; 1.83 times on an RTX 4060",
        "TinyLlama's shape, the same four prompts, both sides in turn",
        batching,
    ),
    "serving": EngineClaim(
        "1,308 requests/s and 39,239 tok/s with 50 clients, 500 requests of 30 tokens on a CPU; "
        "p50 16 ms, p95 264 ms",
        "the client ignored HTTP statuses and multiplied requests by max_tokens; the first honest "
        "figure was 6.75 requests/s and 202 tok/s",
        "GPT-2's shape, exactly 30 counted tokens for each reply, statuses checked",
        serving,
        SERVER_PACKAGES,
    ),
    "window batching": EngineClaim(
        "a batching window of 20 ms and 8 requests gives up to 8 times the throughput",
        "not measured",
        "GPT-2's shape, 8 clients that send one request after another",
        window_batching,
    ),
    "prefix cache": EngineClaim(
        "a prefix of 129 tokens in 4 requests: prefill 2 times as fast, 63.2% hits",
        "an RTX 4060; nothing was kept after a request had ended",
        "TinyLlama's shape, all four at once, and once more after they have ended",
        prefix_cache,
    ),
    "speculation": EngineClaim(
        "early exit: K=4 after 8 layers 0.46x, K=2 after 8 0.65x, K=4 after 18 0.59x, K=2 after "
        "18 0.78x",
        "TinyLlama, one prompt, 50 tokens, one run; 1% to 38% of the drafts were accepted",
        "the embedded model with the same fractions of its layers, greedy, chat prompts",
        speculation,
    ),
    "single stream": EngineClaim(
        "TTFT, ITL, tok/s and memory of Qwen3-1.7B, 1,024 tokens, batch 1",
        "no figures were published",
        "Qwen3-1.7B's shape, a prompt of 128 tokens",
        single_stream,
    ),
}


# ---- view ----------------------------------------------------------------------------------------


def figures_text(row: dict[str, Any]) -> str:
    return "; ".join(Finding(**finding).text() for finding in row["findings"])


def tables(result: Result) -> list[ResultTable]:
    columns = ("claim", "what it really was", "fair run", "measured")
    rows = [
        (row["claim"], row["really"], row["fair_run"], figures_text(row)) for row in result["rows"]
    ]
    return [ResultTable(columns, rows, left=(0, 1, 2, 3))]


def panels(result: Result) -> list[Panel]:
    names = []
    values = []
    for row in result["rows"]:
        for finding in row["findings"]:
            if finding["unit"].startswith("x"):
                names.append(f"{row['name']}: {finding['name']}")
                values.append(finding["value"])
    return [bars("Fair runs of the claims", names, {"ratio": values}, "x", width=760)]


VIEW = ResultView(tables, panels)
