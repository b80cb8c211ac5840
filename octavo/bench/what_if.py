"""Simulates the requests of a recording under other settings, for the tab What if of the live page.

    python -m octavo.bench.what_if '{"policy": "shortest"}' < events.jsonl

reads a recording of --record-events. It simulates the recorded requests twice, under the recorded
settings and under the changed ones, and prints JSON with the event streams of both simulations. The
scheduler is the real one, and the time of each step comes from a cost model that is fitted to the
steps of the recording. The simulation of the recorded settings shows how accurate the model is.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.bench.calibrate import MeasuredStep, errors, fit
from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.engine import Engine
from octavo.core.event_stream import FIELDS, EventStream
from octavo.core.policy import POLICIES
from octavo.core.scheduler import Scheduler
from octavo.core.simulate import (
    EMBEDDED_CPU,
    VOCABULARY,
    CostRunner,
    Costs,
    VirtualClock,
    replay,
    requests_of,
)
from octavo.core.trace import BLOCK, TraceEntry
from octavo.errors import InvalidRequest

MIN_STEPS = 20  # Fewer steps do not determine a cost model.
SETTINGS = ("policy", "token_budget", "max_num_seqs", "num_blocks")


@dataclass
class RecordedRequest:
    """One sequence of a recording."""

    arrival: float  # seconds
    prompt: int
    priority: int
    tenant: str
    deadline: float | None
    generated: int = 0
    planned: int = 0  # positions
    contents: dict[int, int] = field(default_factory=dict)  # logical block -> content


@dataclass
class PlannedStep:
    """The work of a step, for the cost model."""

    sampled: list[int] = field(default_factory=list)  # sequences
    prefill: int = 0
    kv_entries: int = 0
    pairs: int = 0

    @property
    def features(self) -> tuple[float, ...]:
        """The values of octavo/core/simulate.py:FEATURES."""
        return 1.0, self.prefill, len(self.sampled), self.kv_entries, self.pairs


class RecordedRun:
    """The requests of a recording and the times of its steps."""

    def __init__(self, lines: Iterable[bytes], engine: str = ""):
        """Read the requests of the engine process with this name in the snapshots. Without a name,
        read those of the last engine process."""
        self.lines: list[bytes] = []  # lines of this engine process
        self.about: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.requests: dict[int, RecordedRequest] = {}
        self.steps: list[MeasuredStep] = []
        self._blocks: dict[int, tuple[int, int]] = {}  # block -> (sequence, logical block)
        self._contents: dict[int, int] = {}  # block -> content
        self._decode: list[int] = []
        self._in_flight: dict[int, PlannedStep] = {}
        self._landed_at = 0
        is_chosen = False
        for line in lines:
            kind, _, step, _, *values = json.loads(line)
            if kind == "snapshot":
                is_chosen = engine in ("", values[0].get("engine"))
                if is_chosen and values[0].get("stream") != self.about.get("stream"):
                    self.lines = []
            if not is_chosen:
                continue
            self.lines.append(line)
            event = dict(zip(FIELDS[kind], values, strict=False), step=step)
            handler = getattr(self, f"_on_{kind}", None)
            if handler is not None:
                handler(event)
        if not self.about and engine:
            raise InvalidRequest(
                "the events of this engine process are no longer kept: choose a later step",
                "engine",
            )
        if not self.about:
            raise InvalidRequest("the recording has no snapshot: record it again", "recording")

    # ---- handlers of events ----------------------------------------------------------------------

    def _on_snapshot(self, event: dict[str, Any]) -> None:
        """Begin with the sequences of an engine. A later engine process replaces an earlier one."""
        if self.about.get("stream") == event["about"]["stream"]:
            return
        self.about = event["about"]
        self.settings = event["state"]["settings"]
        self.requests = {}
        self.steps = []
        for seq in event["state"]["sequences"]:
            self._on_arrived(seq)
            self.requests[seq["seq"]].planned = seq["planned"]
        self._contents = {block: content for block, content, _ in event["state"]["contents"]}

    def _on_arrived(self, event: dict[str, Any]) -> None:
        deadline = event["deadline"]
        self.requests[event["seq"]] = RecordedRequest(
            arrival=event["arrival"] / 1e6,
            prompt=event["prompt"],
            priority=event["priority"],
            tenant=event["tenant"],
            deadline=None if deadline is None else deadline / 1e6,
        )

    def _on_forked(self, event: dict[str, Any]) -> None:
        parent = self.requests[event["parent"]]
        self.requests[event["seq"]] = replace(parent, contents=dict(parent.contents))

    def _on_admitted(self, event: dict[str, Any]) -> None:
        self.requests[event["seq"]].planned = event["cached"]

    def _on_shared(self, event: dict[str, Any]) -> None:
        for index, block in enumerate(event["blocks"]):
            content = self._contents.get(block)
            if content:
                self.requests[event["seq"]].contents[index] = content

    def _on_allocated(self, event: dict[str, Any]) -> None:
        for index, block in enumerate(event["blocks"], event["first"]):
            self._blocks[block] = event["seq"], index

    def _on_published(self, event: dict[str, Any]) -> None:
        self._contents[event["block"]] = event["content"]
        seq, index = self._blocks.get(event["block"], (0, 0))
        if seq in self.requests:
            self.requests[seq].contents[index] = event["content"]

    def _on_evicted(self, event: dict[str, Any]) -> None:
        self._contents.pop(event["block"], None)

    def _on_settings(self, event: dict[str, Any]) -> None:
        self.settings = event["settings"]

    def _on_finished(self, event: dict[str, Any]) -> None:
        self.requests[event["seq"]].generated = event["generated"]

    _on_failed = _on_finished

    def _on_planned(self, event: dict[str, Any]) -> None:
        if event["decode"] is not None:
            self._decode = event["decode"]
        planned = PlannedStep(sampled=list(self._decode))
        for index, seq in enumerate(self._decode):
            request = self.requests[seq]
            request.planned += 1 + (event["drafts"][index] if event["drafts"] else 0)
            planned.kv_entries += request.planned
        for seq, start, tokens, _, samples in event["chunks"]:
            self.requests[seq].planned = start + tokens
            planned.prefill += tokens
            planned.pairs += tokens * (2 * start + tokens) // 2
            if samples:
                planned.sampled.append(seq)
        self._in_flight[event["step"]] = planned

    def _on_landed(self, event: dict[str, Any]) -> None:
        planned = self._in_flight.get(event["of"], PlannedStep())
        counts = event["tokens"] or [1] * len(planned.sampled)
        for seq, tokens in zip(planned.sampled, counts, strict=False):
            if seq in self.requests:
                self.requests[seq].generated += tokens

    def _on_committed(self, event: dict[str, Any]) -> None:
        started_at = max(event["started"], self._landed_at)
        self._landed_at = event["landed"]
        planned = self._in_flight.pop(event["of"], None)
        if planned is not None:
            seconds = max(event["landed"] - started_at, 1) / 1e6
            self.steps.append(MeasuredStep(planned.features, seconds))

    # ---- results ---------------------------------------------------------------------------------

    def trace(self) -> list[TraceEntry]:
        """Return the requests in order of arrival, the first at 0. A request without generated
        tokens gets the mean output length of the others."""
        generated_counts = [
            request.generated for request in self.requests.values() if request.generated
        ]
        if not generated_counts:
            raise InvalidRequest("no request of the recording has a token", "recording")
        mean_output = round(statistics.mean(generated_counts))
        start = min(request.arrival for request in self.requests.values())
        entries = [
            TraceEntry(
                arrival=request.arrival - start,
                prompt=request.prompt,
                output=request.generated or mean_output,
                blocks=self._trace_blocks(request),
                priority=request.priority,
                tenant=request.tenant,
                deadline=None if request.deadline is None else request.deadline - start,
            )
            for request in self.requests.values()
        ]
        return sorted(entries, key=lambda entry: entry.arrival)

    def _trace_blocks(self, request: RecordedRequest) -> list[int]:
        """Return a number for each BLOCK tokens. Equal numbers mean that these tokens and all
        tokens before them are equal."""
        size = self.about["block_size"]
        num_known = 0
        while num_known in request.contents:
            num_known += 1
        blocks = []
        for index in range(num_known * size // BLOCK):
            last = ((index + 1) * BLOCK - 1) // size
            blocks.append(request.contents[last] * BLOCK + index % BLOCK)
        return blocks

    def costs(self) -> Costs:
        return fit(self.steps) if len(self.steps) >= MIN_STEPS else EMBEDDED_CPU

    def configs(self, changes: dict[str, Any]) -> tuple[CacheConfig, ScheduleConfig]:
        """Return the recorded configuration with some settings changed."""
        about = self.about
        settings = self.settings | changes
        num_slots = settings.get("max_num_seqs", about["max_num_seqs"])
        cache = CacheConfig(
            block_size=about["block_size"],
            num_blocks=settings.get("num_blocks", settings["block_limit"]),
            prefix_caching=about["prefix_caching"],
            host_blocks=about["host_blocks"],
        )
        schedule = ScheduleConfig(
            max_num_seqs=num_slots,
            max_num_batched_tokens=max(settings["token_budget"], num_slots),
            max_model_len=about["max_model_len"],
            depth=about["depth"],
            policy=settings["policy"],
            batching=about["batching"],
        )
        return cache, schedule


def simulated_lines(run: RecordedRun, costs: Costs, changes: dict[str, Any]) -> str:
    """Return the event stream of a simulation."""
    cache, schedule = run.configs(changes)
    clock = VirtualClock()
    requests, tokens = requests_of(run.trace(), VOCABULARY)
    scheduler = Scheduler(cache, schedule, VOCABULARY, clock=clock)
    engine = Engine(scheduler, CostRunner(costs, clock, tokens), clock.sleep)
    line_chunks: list[bytes] = []
    stream = EventStream(engine, {"simulated": True})
    stream.open(lambda lines, is_start: line_chunks.append(lines))
    replay(engine, requests, clock.sleep)
    stream.flush()
    return b"".join(line_chunks).decode()


def check_changes(changes: Any) -> dict[str, Any]:
    """Return the changes, or raise InvalidRequest if one of them is not known."""
    if not isinstance(changes, dict) or not changes.keys() <= set(SETTINGS):
        raise InvalidRequest(f"the changes may have {', '.join(SETTINGS)}", "changes")
    policy = changes.get("policy", "fcfs")
    if policy not in POLICIES:
        raise InvalidRequest(f"unknown policy {policy!r}: use {', '.join(POLICIES)}", "policy")
    for name in SETTINGS[1:]:
        value = changes.get(name, 1)
        if not isinstance(value, int) or not 1 <= value <= 2**20:
            raise InvalidRequest(f"{name} must be a whole number from 1 to {2**20}", name)
    return changes


def what_if(recording: bytes, changes: Any) -> dict[str, Any]:
    """Simulate the requests of a recording under its own settings and under changed ones. `changes`
    may name the engine process whose requests are simulated."""
    engine = changes.get("engine", "") if isinstance(changes, dict) else ""
    if isinstance(changes, dict):
        changes = {name: value for name, value in changes.items() if name != "engine"}
    checked = check_changes(changes)
    run = RecordedRun(recording.splitlines(), engine)
    costs = run.costs()
    is_fitted = len(run.steps) >= MIN_STEPS
    return {
        "changes": checked,
        "settings": run.settings,
        "error": errors(costs, run.steps)["total_error"] if is_fitted else None,
        "events": b"\n".join(run.lines).decode(),
        "recorded": simulated_lines(run, costs, {}),
        "changed": simulated_lines(run, costs, checked),
    }


def main() -> int:
    try:
        result = what_if(sys.stdin.buffer.read(), json.loads(sys.argv[1]))
    except InvalidRequest as error:
        result = {"message": str(error)}
    json.dump(result, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
