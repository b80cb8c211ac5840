"""Traces record when requests arrived and how long they were, to be played again. A trace has
lengths and equal blocks, no text and no tokens.

Each completion is one line of JSON:

    {"arrival": 12.3, "prompt": 40, "output": 25, "blocks": [3, 1, 7, 5], "priority": 0,
     "tenant": "", "deadline": null, "id": "req_5f-0", "submitted": 12.301, "queued": 12.302,
     "first_token": 12.34, "index": 0, "end": "stop",
     "spans": [["queued", 12.302, 12.303, 0, 0, 0], ["prefill", 12.303, 12.34, 40, 7, 7],
               ["decode", 12.34, 12.6, 24, 8, 31]]}

`blocks` has a number for each full block of BLOCK tokens of prompt and output. Two equal numbers
mean equal tokens from the beginning up to there. The numbers are hashes under a secret that is
never written down, so a trace reveals which requests share a prefix and nothing else. `id` and the
fields after it are measurements, which are not played again: when the API server sent the
request to the engine, when the engine queued it (a step may have been running), when it had its
first token, how it ended, and its spans (spans.py): name, start, end, tokens, first and last step.

Each step is one line too. `octavo timeline` draws these lines, and a simulation skips them:

    {"step": 7, "plan": [12.302, 12.303], "launch": [12.303, 12.304], "wait": [12.304, 12.34],
     "device": [12.303, 12.34], "commit": [12.29, 12.291], "prefill": 40, "decode": 3, "blocks": {}}

Each pair has the begin and the end of a part. `commit` belongs to the step that landed before this
one, or is null. `blocks` counts the blocks that the step moves between tiers.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from octavo.core.blocks import chain_hash, root_hash
from octavo.core.counters import HostTime
from octavo.core.spans import SequenceSpans, TimeSpan, rounded
from octavo.core.step_spans import StepSpans
from octavo.errors import InvalidRequest
from octavo.events import PRUNED, Event, EventBus, Failed, Finished
from octavo.types import Sequence

Number = TypeVar("Number", int, float)
log = logging.getLogger(__name__)
BLOCK = 16
STEP_LINE = '{"step"'  # how the line of a step begins


@dataclass
class TraceEntry:
    arrival: float  # seconds; only differences count
    prompt: int  # tokens
    output: int  # tokens
    blocks: list[int] = field(default_factory=list)
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    id: str = ""
    submitted: float = 0.0  # on the clock of `arrival`; 0: unknown
    queued: float = 0.0
    first_token: float = 0.0
    index: int = 0  # index of the completion in its request
    end: str = ""  # why it ended
    spans: list[tuple[str, float, float, int, int, int]] = field(default_factory=list)


class Recorder:
    """Appends to a trace while an engine runs. Requests that ended before their first token,
    requests without a time of arrival, and beams that were pruned are left out."""

    def __init__(self, path: str | Path):
        try:
            # Line-buffered, so that a line is on disk as soon as it is written.
            self.file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise InvalidRequest(
                f"a trace cannot be written to {path}: {error.strerror}", "record_trace"
            ) from None
        self.secret = os.urandom(16)
        self.failed = False

    def listen_to(self, events: EventBus, clock: Callable[[], float], host_time: HostTime) -> None:
        """Record an engine with these events, this clock and these times of the host."""
        SequenceSpans(events, clock, self._on_end)
        StepSpans(events, clock, host_time, self._write)

    def _on_end(self, seq: Sequence, spans: list[TimeSpan], event: Event) -> None:
        if isinstance(event, Failed):
            self.record(seq, spans, "error")
        elif isinstance(event, Finished) and event.reason != PRUNED:
            self.record(seq, spans, event.reason)

    def record(self, seq: Sequence, spans: list[TimeSpan], reason: str) -> None:
        """Write a line about a sequence that has ended."""
        request = seq.request
        if seq.num_generated < 1 or not request.arrival:
            return
        # If bounded KV has dropped tokens of the output, only the prompt is known.
        tokens = array("i", request.prompt) if seq.dropped_tokens else seq.tokens
        blocks = []
        parent = self.secret + root_hash(request.cache_salt)
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            parent = chain_hash(parent, tokens[start : start + BLOCK])
            blocks.append(int.from_bytes(parent[:6], "little"))
        entry = TraceEntry(
            arrival=request.arrival,
            prompt=len(request.prompt),
            output=seq.num_generated,
            blocks=blocks,
            priority=request.priority,
            tenant=request.tenant,
            deadline=request.deadline,
            id=request.id,
            submitted=request.submitted,
            queued=seq.queued_at,
            first_token=seq.first_token_at or 0.0,
            index=seq.index,
            end=reason,
            spans=[_span_fields(span) for span in spans],
        )
        self._write(asdict(entry))

    def _write(self, values: dict[str, Any]) -> None:
        if self.failed:
            return
        try:
            self.file.write(json.dumps(values) + "\n")
        except OSError as error:
            log.error(
                "recording stops: the trace %s cannot be written (%s)",
                self.file.name,
                error.strerror,
            )
            self.failed = True
            with suppress(OSError):  # the buffered lines cannot be written either
                self.file.close()


def _span_fields(span: TimeSpan) -> tuple[str, float, float, int, int, int]:
    first_step = span.steps[0] if span.steps else 0
    last_step = span.steps[-1] if span.steps else 0
    return span.name, rounded(span.start), rounded(span.end), span.tokens, first_step, last_step


# ---- reading and making traces -------------------------------------------------------------------


def read(source: str) -> list[TraceEntry]:
    """Read a file, or make a synthetic trace such as poisson:rate=4,n=100. The entries are in order
    of arrival, the first at 0."""
    entries = list(_synthetic(source) if source.startswith("poisson:") else _lines(source))
    if not entries:
        raise InvalidRequest(f"{source} has no requests", "trace")
    entries.sort(key=lambda entry: entry.arrival)
    start = entries[0].arrival
    for entry in entries:
        entry.arrival -= start
        if entry.deadline is not None:
            entry.deadline -= start
    return entries


def _lines(path: str) -> Iterator[TraceEntry]:
    try:
        # Invalid UTF-8 is reported as invalid JSON below.
        opened = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error.strerror}): name a file of --record-trace, or a trace "
            "such as poisson:rate=4,n=100",
            "trace",
        ) from None
    with opened as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or line.startswith(STEP_LINE):
                continue
            try:
                entry = parse_line(line)
            except (ValueError, TypeError, AttributeError) as error:
                if not line.endswith("\n"):
                    log.warning("%s ends in the middle of line %d, which is ignored", path, number)
                    return
                raise InvalidRequest(
                    f"{path}, line {number} is not a request ({error}): a line is JSON with at "
                    "least arrival, prompt and output",
                    "trace",
                ) from None
            yield entry


def parse_line(line: str) -> TraceEntry:
    names = {entry_field.name for entry_field in fields(TraceEntry)}
    values = json.loads(line)
    entry = TraceEntry(**{name: value for name, value in values.items() if name in names})
    if entry.prompt < 1 or entry.output < 1 or not math.isfinite(entry.arrival):
        raise ValueError("prompt and output must be at least 1, and arrival must be a number")
    return entry


DEFAULTS = {
    "rate": "4",
    "n": "100",
    "prompt": "32-512",
    "output": "16-256",
    "shared": "0",
    "groups": "1",
    "skew": "0",
    "urgent": "0",
    "tenants": "1",
    "seed": "0",
}


@dataclass(frozen=True)
class SyntheticTrace:
    """The parameters of a synthetic trace such as poisson:rate=4,n=100."""

    rate: float  # requests per second
    num_requests: int
    prompt: tuple[int, int]  # the shortest and the longest, uniformly distributed
    output: tuple[int, int]
    shared: int  # tokens that the prompts of a group begin with
    groups: int
    skew: float  # how unequal groups are: the n-th one has a share of 1 / n ** skew
    urgent: float  # the fraction of requests with priority -1
    tenants: int
    seed: int

    @classmethod
    def parse(cls, spec: str) -> SyntheticTrace:
        settings = _parse_spec(spec)
        parsed = cls(
            rate=_number("rate", settings, float),
            num_requests=_number("n", settings, int),
            prompt=_lengths("prompt", settings),
            output=_lengths("output", settings),
            shared=_number("shared", settings, int),
            groups=_number("groups", settings, int),
            skew=_number("skew", settings, float),
            urgent=_number("urgent", settings, float),
            tenants=_number("tenants", settings, int),
            seed=_number("seed", settings, int),
        )
        in_range = 0 < parsed.rate < math.inf and 0 <= parsed.urgent <= 1 and parsed.shared >= 0
        if min(parsed.num_requests, parsed.groups, parsed.tenants) < 1 or not in_range:
            raise InvalidRequest(
                f"{spec}: rate, n, groups and tenants must be above 0, and urgent from 0 to 1",
                "trace",
            )
        if not 0 <= parsed.skew <= 10:
            raise InvalidRequest(f"{spec}: skew must be from 0 to 10", "trace")
        return parsed

    def group_weights(self) -> list[float]:
        return [1 / (1 + index) ** self.skew for index in range(self.groups)]


def _synthetic(spec: str) -> Iterator[TraceEntry]:
    """Make a trace with random arrivals."""
    synthetic = SyntheticTrace.parse(spec)
    shared = synthetic.shared
    generator = random.Random(synthetic.seed)
    cumulative_weights = list(accumulate(synthetic.group_weights()))
    arrival = 0.0
    for index in range(synthetic.num_requests):
        arrival += generator.expovariate(synthetic.rate)
        prompt = generator.randint(*synthetic.prompt)
        output = generator.randint(*synthetic.output)
        if synthetic.skew:
            (group,) = generator.choices(range(synthetic.groups), cum_weights=cumulative_weights)
        else:
            group = generator.randrange(synthetic.groups)
        num_shared = shared // BLOCK
        num_unique = (shared + prompt + output) // BLOCK - num_shared
        shared_blocks = [group * num_shared + block for block in range(num_shared)]
        unique_blocks = [10**6 * (1 + index) + block for block in range(num_unique)]
        yield TraceEntry(
            arrival=arrival,
            prompt=shared + prompt,
            output=output,
            blocks=shared_blocks + unique_blocks,
            priority=-1 if generator.random() < synthetic.urgent else 0,
            tenant=f"tenant {generator.randrange(synthetic.tenants)}",
        )


def _parse_spec(spec: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for part in filter(None, spec.partition(":")[2].split(",")):
        name, _, text = (piece.strip() for piece in part.partition("="))
        if name not in DEFAULTS:
            raise InvalidRequest(
                f"a synthetic trace has no {name}: use {', '.join(DEFAULTS)}, each as NAME=VALUE",
                "trace",
            )
        settings[name] = text
    return settings


def _number(name: str, settings: dict[str, str], kind: type[Number]) -> Number:
    text = settings.get(name, DEFAULTS[name])
    with suppress(ValueError):
        return kind(text)
    try:
        value = kind(float(text))
        if value != float(text):  # 1e3 is a whole number, 1.5 is not
            raise ValueError
        return value
    except (ValueError, OverflowError):
        expected = "a whole number" if kind is int else "a number"
        raise InvalidRequest(
            f"{name} of a synthetic trace must be {expected}, got {text!r}", "trace"
        ) from None


def _lengths(name: str, settings: dict[str, str]) -> tuple[int, int]:
    text = settings.get(name, DEFAULTS[name])
    matched = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low = int(matched[1]) if matched else 0
    high = int(matched[2] or matched[1]) if matched else 0
    if not 1 <= low <= high:
        raise InvalidRequest(
            f"{name} of a synthetic trace must be a number of tokens, N or A-B, of at least 1, got "
            f"{text!r}",
            "trace",
        )
    return low, high


def tokens_of_entry(entry: TraceEntry, index: int, vocab_size: int) -> list[int]:
    """Return made-up tokens of prompt and output, equal where the trace says so. Tokens behind the
    last full block are unique to the entry, whose index this is."""
    vocabulary = range(vocab_size)
    tokens = [
        token
        for number in entry.blocks
        for token in random.Random(number).choices(vocabulary, k=BLOCK)
    ]
    length = entry.prompt + entry.output
    num_unique = max(length - len(tokens), 0)
    tokens += random.Random(f"{index}").choices(vocabulary, k=num_unique)
    return tokens[:length]
