"""Turns a recorded trace into a file for Perfetto (ui.perfetto.dev) and chrome://tracing.

The file is JSON in Chrome's trace event format. It has these tracks:

    engine     host: plan, launch, wait and commit of each step
               device: the steps
               tiers: the blocks that a step moves
               counters: prefill tokens and decoding sequences per step
    requests   one track per completion: received, queued, prefill, decode, preempted, swapped

Slices of one track follow each other. Times are in microseconds from the first entry.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from octavo.core.trace import STEP_LINE, TraceEntry, parse_line
from octavo.errors import InvalidRequest

TraceEvent = dict[str, Any]
ENGINE = 1  # process ids in the file
REQUESTS = 2
HOST = 1  # tracks of the engine
DEVICE = 2
TIERS = 3
HOST_PARTS = ("commit", "plan", "launch", "wait")


def read_recording(path: Path) -> tuple[list[TraceEntry], list[dict[str, Any]]]:
    """Return the requests and the steps of a file of --record-trace."""
    requests: list[TraceEntry] = []
    steps: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error.strerror}): name a file of --record-trace", "trace"
        ) from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.startswith(STEP_LINE):
                steps.append(json.loads(line))
            elif line.strip():
                requests.append(parse_line(line))
        except (ValueError, TypeError, AttributeError) as error:
            if number > text.count("\n"):  # A server that was killed leaves an incomplete line.
                break
            raise InvalidRequest(
                f"{path}, line {number} was not written by --record-trace ({error})", "trace"
            ) from None
    if not steps:
        raise InvalidRequest(
            f"{path} has no steps: record it again with --record-trace of this version", "trace"
        )
    return requests, steps


def trace_events(requests: list[TraceEntry], steps: list[dict[str, Any]]) -> list[TraceEvent]:
    """Return the events of a recording, in the order of their times."""
    origin = min(
        [step["plan"][0] for step in steps] + [request.arrival for request in requests],
        default=0.0,
    )
    tracks = Tracks(origin)
    tracks.name_process(ENGINE, "engine")
    tracks.name_track(ENGINE, HOST, "host")
    tracks.name_track(ENGINE, DEVICE, "device")
    if any(step["blocks"] for step in steps):
        tracks.name_track(ENGINE, TIERS, "tiers")
    for step in steps:
        _add_step(tracks, step)
    tracks.name_process(REQUESTS, "requests")
    for number, request in enumerate(sorted(requests, key=lambda entry: entry.arrival), 1):
        name = request.id or f"request {number}"
        tracks.name_track(REQUESTS, number, f"{name}[{request.index}]" if request.index else name)
        _add_request(tracks, number, request)
    return sorted(tracks.events, key=lambda event: event.get("ts", -math.inf))


class Tracks:
    """Collects trace events. The slices of a track never overlap."""

    def __init__(self, origin: float):
        self.origin = origin
        self.events: list[TraceEvent] = []
        self.ends: dict[tuple[int, int], float] = {}  # (process, track) -> end of its last slice

    def name_process(self, process: int, name: str) -> None:
        self._add_metadata("process_name", process, 0, {"name": name})
        self._add_metadata("process_sort_index", process, 0, {"sort_index": process})

    def name_track(self, process: int, track: int, name: str) -> None:
        self._add_metadata("thread_name", process, track, {"name": name})
        self._add_metadata("thread_sort_index", process, track, {"sort_index": track})

    def _add_metadata(self, name: str, process: int, track: int, args: dict[str, Any]) -> None:
        self.events.append({"ph": "M", "name": name, "pid": process, "tid": track, "args": args})

    def add_slice(
        self,
        track: tuple[int, int],
        name: str,
        interval: tuple[float, float],
        args: dict[str, Any],
    ) -> None:
        """Add a slice. If the previous slice of the track ends later than the interval starts, the
        slice begins at the end of the previous one."""
        start = max(interval[0], self.ends.get(track, -math.inf))
        end = max(interval[1], start)
        self.ends[track] = end
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": "request" if track[0] == REQUESTS else "step",
                "pid": track[0],
                "tid": track[1],
                "ts": self._microseconds(start),
                "dur": self._microseconds(end) - self._microseconds(start),
                "args": args,
            }
        )

    def add_counter(self, name: str, time: float, args: dict[str, int]) -> None:
        event = {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "args": args}
        self.events.append({**event, "ts": self._microseconds(time)})

    def _microseconds(self, time: float) -> int:
        return round((time - self.origin) * 1e6)


def _add_step(tracks: Tracks, step: dict[str, Any]) -> None:
    args = {"step": step["step"], "prefill": step["prefill"], "decode": step["decode"]}
    for part in HOST_PARTS:
        if step[part] is not None:
            # The line of a step has the commit of the step before it.
            tracks.add_slice((ENGINE, HOST), part, step[part], {} if part == "commit" else args)
    kinds = [kind for kind in ("prefill", "decode") if step[kind]]
    tracks.add_slice((ENGINE, DEVICE), " + ".join(kinds) or "blocks", step["device"], args)
    tracks.add_counter("prefill tokens", step["device"][0], {"tokens": step["prefill"]})
    tracks.add_counter("decoding sequences", step["device"][0], {"sequences": step["decode"]})
    if step["blocks"]:
        name = ", ".join(f"{count} {move}" for move, count in step["blocks"].items())
        tracks.add_slice((ENGINE, TIERS), name, step["device"], {**args, **step["blocks"]})


def _add_request(tracks: Tracks, number: int, request: TraceEntry) -> None:
    track = (REQUESTS, number)
    sizes = {"prompt_tokens": request.prompt, "output_tokens": request.output}
    if request.spans:
        received = (request.arrival, request.spans[0][1])
        tracks.add_slice(track, "received", received, {**sizes, "end": request.end})
    for name, start, end, tokens, first_step, last_step in request.spans:
        args = {}
        if first_step:
            args = {"tokens": tokens, "first_step": first_step, "last_step": last_step}
        tracks.add_slice(track, name, (start, end), args)


def write_timeline(source: Path, target: Path) -> dict[str, int]:
    """Write the file, and return how many requests and steps it shows."""
    requests, steps = read_recording(source)
    content = {"traceEvents": trace_events(requests, steps), "displayTimeUnit": "ms"}
    target.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return {"requests": len(requests), "steps": len(steps)}
