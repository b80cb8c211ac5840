"""Compares engines and servers in one run, in which they take turns.

    engines    the embedded model in each engine's own format, one process for each (peers/)
    endpoints  any server with the OpenAI API, by the strict client (http_load.py)

    decode     one request of 32 tokens, greedy: tokens per second after the first token
    prefill    one prompt of 512 tokens: prompt tokens per second
    streams    16 requests of 32 tokens, 64 new tokens each: tokens per second

All engines are loaded before the first round, and wait without computing while another one is
measured. Only token ids that arrived count.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from octavo.bench.http_load import Load
from octavo.bench.interleave import spread
from octavo.bench.measure_serve import RunningServer, run_client
from octavo.bench.openai_endpoint import OpenAIEndpoint
from octavo.bench.other_work import MAX_OTHER_WORK, measure_undisturbed
from octavo.bench.peers.engines import PACKAGES
from octavo.bench.picture import Panel, bars
from octavo.bench.result_file import BenchRun
from octavo.bench.views import Result, ResultTable, ResultView, spread_text
from octavo.errors import OctavoError

WORKER = Path(__file__).parent / "peers" / "peer_worker.py"
OURS = "octavo"
OURS_WITH_DRAFTS = "octavo-drafts"
WORKLOADS = ("decode", "prefill", "streams")
SHORT_PROMPT = 32
LONG_PROMPT = 512
DECODE_TOKENS = 128
STREAMS = 16
STREAM_TOKENS = 64
START_SECONDS = 600.0  # time limit for an engine to load
RUN_SECONDS = 300.0  # time limit of one measurement
PAUSE_SECONDS = 0.3  # Threads of the engine measured last may spin for a while before they sleep.
MAX_ATTEMPTS = 5  # attempts at a measurement that other programs disturb


class Contender(Protocol):
    name: str
    facts: dict[str, Any]
    pid: int | None  # the process that computes, if it is known

    def measure(self, workload: str, number: int) -> float:
        """Return tokens per second. `number` counts the rounds: each has prompts of its own."""
        ...

    def close(self) -> None: ...


# ---- texts ---------------------------------------------------------------------------------------


class BenchPrompts:
    """Takes prompts of token ids from a text. No two prompts of a run are equal."""

    def __init__(self, token_ids: Sequence[int]):
        self.token_ids = token_ids

    def prompt(self, number: int, length: int) -> list[int]:
        start = number * LONG_PROMPT % (len(self.token_ids) - LONG_PROMPT)
        return list(self.token_ids[start : start + length])


def embedded_prompts() -> BenchPrompts:
    """Return prompts from Python's language reference, in tokens of the embedded model."""
    from pydoc_data.topics import topics

    from octavo.assemble import read_tokenizer
    from octavo.model.embedded import embedded_path
    from octavo.model.gguf import open_gguf

    tokenizer = read_tokenizer(open_gguf(embedded_path()))
    assert tokenizer is not None
    return BenchPrompts(tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))))


# ---- engines -------------------------------------------------------------------------------------


class EngineProcess:
    """An engine in a process of its own. Raises OctavoError if it does not start."""

    def __init__(self, name: str, python: str, models: Path, threads: int, prompts: BenchPrompts):
        self.name = name
        self.prompts = prompts
        self.lines: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [python, str(WORKER), name, str(models), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pid: int | None = self.process.pid
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.facts = self._receive(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            raise OctavoError(f"{self.name} gave no answer within {seconds:g} s") from None
        if not line:
            raise OctavoError(f"{self.name} ended with exit code {self.process.wait()}")
        message: dict[str, Any] = json.loads(line)
        problem = message.get("missing") or message.get("error")
        if problem is not None:
            raise OctavoError(f"{self.name}: {problem}")
        return message

    def generate_seconds(self, prompts: list[list[int]], count: int) -> float:
        """Return how long the engine takes. Raises OctavoError unless every token arrives."""
        assert self.process.stdin is not None
        request = json.dumps({"prompts": prompts, "count": count})
        with suppress(OSError):  # If the process has ended, _receive raises an error.
            print(request, file=self.process.stdin, flush=True)
        answer = self._receive(RUN_SECONDS)
        lengths = [len(reply) for reply in answer["replies"]]
        if lengths != [count] * len(prompts):
            raise OctavoError(
                f"{self.name} returned {lengths} tokens instead of {count} for each prompt, so the "
                "run does not count"
            )
        self.facts["peak_rss_bytes"] = answer["peak_rss_bytes"]
        return float(answer["seconds"])

    def measure(self, workload: str, number: int) -> float:
        time.sleep(PAUSE_SECONDS)
        if workload == "prefill":
            prompt = self.prompts.prompt(number, LONG_PROMPT)
            return LONG_PROMPT / self.generate_seconds([prompt], 1)
        if workload == "decode":
            prompt = self.prompts.prompt(number, SHORT_PROMPT)
            one_token = self.generate_seconds([prompt], 1)
            all_tokens = self.generate_seconds([prompt], DECODE_TOKENS)
            return (DECODE_TOKENS - 1) / max(all_tokens - one_token, 1e-9)
        prompts = [
            self.prompts.prompt(STREAMS * number + stream, SHORT_PROMPT)
            for stream in range(STREAMS)
        ]
        return STREAMS * STREAM_TOKENS / self.generate_seconds(prompts, STREAM_TOKENS)

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# ---- endpoints -----------------------------------------------------------------------------------


class EndpointContender:
    """A server with the OpenAI API. Its prompts are text of about the same number of tokens as the
    prompts of the engines. The usage in its replies has the exact number."""

    pid: int | None = None

    def __init__(self, name: str, endpoint: OpenAIEndpoint, text: str):
        self.name = name
        self.server = RunningServer(endpoint.with_model())
        self.text = text
        self.facts: dict[str, Any] = {"version": "", "weights": self.server.endpoint.model}

    def _load(self, number: int, length: int, **fields: Any) -> Load:
        characters = 4 * length  # about four characters to a token
        start = number * characters % max(len(self.text) - characters, 1)
        return Load(
            port=0,
            prompt=self.text[start : start + characters],
            distinct=True,
            first_number=1000 * number,
            stream=True,
            **fields,
        )

    def _run(self, load: Load) -> dict[str, Any]:
        result = run_client(self.server, load)
        if result["wrong"]:
            problems = ", ".join(f"{count} x {text}" for text, count in result["wrong"].items())
            raise OctavoError(f"{self.name}: replies are wrong and do not count: {problems}")
        return result

    def measure(self, workload: str, number: int) -> float:
        if workload == "prefill":
            load = self._load(number, LONG_PROMPT, clients=1, requests=1, tokens=1)
            result = self._run(load)
            (_, sent, first_byte, _) = result["good"][0]
            return float(result["prompt_tokens"]) / (first_byte - sent)
        if workload == "decode":
            load = self._load(number, SHORT_PROMPT, clients=1, requests=1, tokens=DECODE_TOKENS)
            result = self._run(load)
            (_, _, first_byte, last_byte) = result["good"][0]
            return float(result["tokens"] - 1) / (last_byte - first_byte)
        load = self._load(
            number, SHORT_PROMPT, clients=STREAMS, requests=STREAMS, tokens=STREAM_TOKENS
        )
        result = self._run(load)
        return float(result["tokens"]) / float(result["seconds"])

    def close(self) -> None:
        pass


# ---- a run ---------------------------------------------------------------------------------------


class Comparison:
    """Measures contenders in turn. The result is up to date after each round."""

    def __init__(
        self,
        run: BenchRun,
        rounds: int,
        advance: Callable[[str], None] = lambda name: None,
    ):
        self.run = run
        self.rounds = rounds
        self.advance = advance
        self.contenders: list[Contender] = []
        self.figures: dict[str, dict[str, list[float]]] = {}
        self.other_work = 0.0  # the largest share of the cores that others used in a measurement

    def add(self, name: str, start: Callable[[], Contender]) -> None:
        """Start a contender. If it does not start, record the reason and measure the others."""
        self.advance(f"starting {name}")
        try:
            contender = start()
        except OctavoError as error:
            self.run.skip(name, str(error))
            return
        self.contenders.append(contender)
        self.figures[contender.name] = {workload: [] for workload in WORKLOADS}

    def measure(self) -> None:
        """Run all rounds. The first is a warm-up and does not count."""
        for number in range(1 + self.rounds):
            for workload in WORKLOADS:
                order = self.contenders if number % 2 == 0 else self.contenders[::-1]
                for contender in list(order):
                    self._measure_one(contender, workload, number)
            if number:
                self._save()

    def _measure_one(self, contender: Contender, workload: str, number: int) -> None:
        self.advance(f"round {number} of {self.rounds}: {workload}, {contender.name}")
        try:
            measurement = measure_undisturbed(
                lambda: contender.measure(workload, number),
                () if contender.pid is None else (contender.pid,),
                attempts=MAX_ATTEMPTS if number and contender.pid is not None else 1,
            )
        except OctavoError as error:
            self.run.skip(contender.name, str(error))
            self.contenders.remove(contender)
            contender.close()
            return
        if number:
            self.figures[contender.name][workload].append(measurement.figure)
            if contender.pid is not None:
                self.other_work = max(self.other_work, measurement.other_work)

    def _save(self) -> None:
        rows = []
        for contender in self.contenders:
            figures = self.figures[contender.name]
            row = {"name": contender.name, **contender.facts}
            rows.append(row | {workload: spread(figures[workload]) for workload in WORKLOADS})
        self.run.result["rows"] = rows
        self.run.set_fact(bars=bars_of(rows), other_work=self.other_work)
        self.run.save()

    def close(self) -> None:
        for contender in self.contenders:
            contender.close()


def bars_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each workload the best peer, and how many times as fast Octavo is. The comparison
    is without drafts on either side."""
    ours = next((row for row in rows if row["name"] == OURS), None)
    peers = [row for row in rows if row["name"] not in (OURS, OURS_WITH_DRAFTS)]
    if ours is None or not peers:
        return {}
    bars = {}
    for workload in WORKLOADS:
        best = max(peers, key=lambda row: row[workload]["median"])
        ratio = ours[workload]["median"] / best[workload]["median"]
        bars[workload] = {"best_peer": best["name"], "ratio": ratio}
    return bars


def default_python(peers: Path | None) -> str:
    """Return the Python of the peers' environment. Without one, return Octavo's own."""
    candidate = None if peers is None else peers / "bin" / "python"
    return str(candidate) if candidate is not None and candidate.exists() else sys.executable


def installed_engines(peers: Path) -> list[str]:
    """Return the engines whose packages are installed in the peers' environment."""
    python = peers / "bin" / "python"
    if not python.exists():
        return []
    peer_packages = {name: package for name, package in PACKAGES.items() if name != OURS}
    program = (
        "import importlib.util, sys;"
        "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    )
    command = [str(python), "-c", program, *set(peer_packages.values())]
    importable = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return [name for name, package in peer_packages.items() if package in importable]


# ---- view ----------------------------------------------------------------------------------------

TITLES = {
    "decode": "decode, tok/s",
    "prefill": "prefill, tok/s",
    "streams": f"{STREAMS} streams, tok/s",
}


def tables(result: Result) -> list[ResultTable]:
    columns = ["system", "version", "weights", *TITLES.values(), "ready, s", "peak memory, MiB"]
    rows = [
        [
            f"**{row['name']}**" if row["name"] == OURS else row["name"],
            row["version"],
            str(row["weights"]),
            *(
                f"{row[workload]['median']:,.0f} [{spread_text(row[workload])}]"
                for workload in WORKLOADS
            ),
            f"{row['ready_s']:.1f}" if "ready_s" in row else "",
            f"{row['peak_rss_bytes'] / 2**20:,.0f}" if "peak_rss_bytes" in row else "",
        ]
        for row in result["rows"]
    ]
    return [ResultTable(columns, rows, left=(0, 1, 2))]


def notes(result: Result) -> list[str]:
    lines = [
        f"{TITLES[workload].partition(',')[0]}: Octavo is {bar['ratio']:.2f} times as fast as "
        f"{bar['best_peer']}, the best of the others."
        for workload, bar in result.get("bars", {}).items()
    ]
    other_work = result.get("other_work", 0.0)
    if other_work > MAX_OTHER_WORK:
        lines.append(
            f"Other programs used up to {other_work:.0%} of the cores in a measurement: figures of "
            "an idle machine are higher."
        )
    return lines


def panels(result: Result) -> list[Panel]:
    names = [row["name"] for row in result["rows"]]
    return [
        bars(
            TITLES[workload].partition(",")[0],
            names,
            {"median": [row[workload]["median"] for row in result["rows"]]},
            "tok/s",
            width=420,
        )
        for workload in WORKLOADS
    ]


VIEW = ResultView(tables, panels, notes)
