"""Reads the facts of a lesson from its recording. Times are in milliseconds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from octavo.core.event_stream import FIELDS


@dataclass
class RequestFacts:
    """One sequence of a recording. Requests are called A, B, C in the order of arrival."""

    name: str
    prompt: int
    arrival: float
    cached: int = 0  # tokens found in the prefix cache at its first admission
    first_token: float = 0.0
    finished: float = 0.0
    last_step: int = 0  # the step that computed its last token
    tokens: list[float] = field(default_factory=list)  # when each token arrived
    preemptions: int = 0
    recomputed: int = 0
    tenant: str = ""
    text: str = ""  # its reply

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def longest_gap(self) -> float:
        """The longest time between two of its tokens."""
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)


class RunFacts:
    def __init__(self, recording: bytes):
        lines = [json.loads(line) for line in recording.splitlines()]
        self.events = [
            dict(zip(FIELDS[kind], values, strict=False), kind=kind, step=step, time=time / 1000)
            for kind, _, step, time, *values in lines
        ]
        self.about: dict[str, Any] = lines[0][4]
        self.sequences: dict[int, RequestFacts] = {}
        self.steps = 0
        self.most_running = 0
        self.most_used = 0  # blocks
        self._sampling: Counter[int] = Counter()  # step -> sequences that sample in it
        # (name, step) -> what the request did in the step; see octavo/lessons/chart.py
        self.activity: dict[tuple[str, int], str] = {}
        self._read()

    def of(self, name: str) -> RequestFacts:
        return next(seq for seq in self.sequences.values() if seq.name == name)

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def step_of(self, kind: str, name: str = "", index: int = 0) -> int:
        """Return the step of the event with this index among those of a kind and of a request.
        Without a name, the events of all requests count."""
        steps = [
            event["step"]
            for event in self.all(kind)
            if not name or self.sequences[event["seq"]].name == name
        ]
        return int(steps[index])

    @cached_property
    def milliseconds(self) -> float:
        """The time from the first arrival to the last token."""
        start = min(seq.arrival for seq in self.sequences.values())
        return max(seq.finished for seq in self.sequences.values()) - start

    @property
    def last_step(self) -> int:
        return int(self.events[-1]["step"])

    def text_of(self, name: str) -> str:
        return self.of(name).text

    @property
    def drafts(self) -> tuple[int, int]:
        """The numbers of drafted and accepted tokens."""
        drafted = sum(sum(event["drafts"] or ()) for event in self.all("planned"))
        generated = sum(len(seq.tokens) for seq in self.sequences.values())
        sampling_items = sum(self._sampling.values())
        return drafted, generated - sampling_items

    @property
    def best_draft_step(self) -> int:
        """The step that gave the most tokens."""
        best = max(self.all("landed"), key=lambda event: sum(event["tokens"] or [1]))
        return int(best["of"])

    @property
    def recomputed(self) -> int:
        return sum(seq.recomputed for seq in self.sequences.values())

    # ---- reading ---------------------------------------------------------------------------------

    def _read(self) -> None:
        running: set[int] = set()
        used: Counter[int] = Counter()
        in_step: dict[int, list[int]] = {}
        decode: list[int] = []
        for event in self.events:
            kind = event["kind"]
            if kind in ("arrived", "forked"):
                self._add(event)
            elif kind == "admitted":
                running.add(event["seq"])
                self._admit(event)
            elif kind == "preempted":
                running.discard(event["seq"])
                self.sequences[event["seq"]].preemptions += 1
            elif kind == "finished":
                running.discard(event["seq"])
                self.sequences[event["seq"]].finished = event["time"]
            elif kind == "planned":
                decode = decode if event["decode"] is None else event["decode"]
                sampling = [chunk[0] for chunk in event["chunks"] if chunk[4]]
                in_step[event["step"]] = decode + sampling
                self._sampling[event["step"]] = len(decode) + len(sampling)
                self.steps += 1
                self._note_activity(event, decode)
            elif kind == "landed":
                self._add_tokens(event, in_step.pop(event["of"], []))
            if kind in ("allocated", "shared"):
                used.update(block for block in event["blocks"] if block)
            elif kind == "copied":
                used.update([event["target"]])
                used.subtract([event["source"]])
            elif kind == "released":
                used.subtract(event["blocks"])
            self.most_running = max(self.most_running, len(running))
            self.most_used = max(self.most_used, sum(count > 0 for count in used.values()))

    def _note_activity(self, event: dict[str, Any], decode: list[int]) -> None:
        """Record the activity of each unfinished sequence in a planned step."""
        activity_of = dict.fromkeys(decode, "decode") | {c[0]: "prefill" for c in event["chunks"]}
        for seq_id, seq in self.sequences.items():
            if seq.finished:
                continue
            idle = "preempted" if seq.preemptions else "waiting"
            self.activity[seq.name, event["step"]] = activity_of.get(seq_id, idle)

    def _add(self, event: dict[str, Any]) -> None:
        if event["kind"] == "arrived":
            name = chr(ord("A") + event["name"] - 1)
            prompt = event["prompt"]
            arrival = event["arrival"] / 1000
            tenant = event["tenant"]
        else:
            parent = self.sequences[event["parent"]]
            name = f"{parent.name}.{event['index']}"
            prompt = parent.prompt
            arrival = parent.arrival
            tenant = parent.tenant
        self.sequences[event["seq"]] = RequestFacts(name, prompt, arrival, tenant=tenant)

    def _admit(self, event: dict[str, Any]) -> None:
        seq = self.sequences[event["seq"]]
        if not seq.preemptions:
            seq.cached = event["cached"]
        seq.recomputed += event["recomputed"]

    def _add_tokens(self, event: dict[str, Any], sequences: list[int]) -> None:
        counts = event["tokens"] or [1] * len(sequences)
        for seq_id, count in zip(sequences, counts, strict=False):
            seq = self.sequences[seq_id]
            seq.first_token = seq.first_token or event["time"]
            seq.tokens += [event["time"]] * count
            seq.last_step = event["of"]
        for seq_id, piece in event["text"] or ():
            self.sequences[seq_id].text += piece
