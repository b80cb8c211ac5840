"""Traces: when requests came and how long they were, to be played again. Lengths and equalities, no text and no token.

A line of JSON for each completion:

    {"arrival": 12.3, "prompt": 40, "output": 25, "blocks": [3, 1, 7, 5], "priority": 0, "tenant": "", "deadline": null,
     "id": "req_5f-0", "submitted": 12.301, "queued": 12.302, "first": 12.34}

`blocks` has a number for each full block of BLOCK tokens of the prompt and the output: equal numbers, equal tokens from the
beginning up to there. The numbers are hashes under a key that is never written down: a trace keeps who shares a prefix with whom,
and nothing else of what was said. The last line is how the request fared, which is not played again: when it was handed to the
engine, when the engine took it in (a step may have been under way), and when its first token was there.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from octavo.core.blocks import chain, root
from octavo.errors import InvalidRequest
from octavo.types import Sequence

T = TypeVar("T", int, float)
log = logging.getLogger(__name__)
BLOCK = 16


@dataclass
class Entry:
    arrival: float  # seconds; only differences count
    prompt: int  # tokens
    output: int
    blocks: list[int] = field(default_factory=list)
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    id: str = ""
    submitted: float = 0.0  # on the clock of `arrival`; 0: not known
    queued: float = 0.0
    first: float = 0.0


class Recorder:
    """Adds to a trace while an engine runs. Left out: what ended before its first token, what has no time of arrival, and beams
    that lost before their search was over."""

    def __init__(self, path: str | Path):
        try:
            self.file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  (a line is there as soon as it is written)
        except OSError as error:
            raise InvalidRequest(
                f"a trace cannot be written to {path}: {error.strerror}", "record_trace"
            ) from None
        self.secret, self.full = os.urandom(16), False

    def ended(self, seq: Sequence) -> None:
        request, output = seq.request, seq.num_generated
        if self.full or output < 1 or not request.arrival:
            return
        blocks, parent = [], self.secret + root(request.cache_salt)
        known = array("i", request.prompt) if seq.dropped_tokens else seq.tokens
        for at in range(0, len(known) - BLOCK + 1, BLOCK):
            parent = chain(parent, known[at : at + BLOCK])
            blocks.append(int.from_bytes(parent[:6], "little"))
        entry = Entry(
            request.arrival, len(request.prompt), output, blocks, request.priority, request.tenant, request.deadline,
            request.id, request.submitted, seq.queued_at, seq.first_token_at or 0.0,
        )  # fmt: skip
        try:
            self.file.write(json.dumps(asdict(entry)) + "\n")
        except OSError as error:
            log.error(
                "no more requests are recorded: the trace %s cannot be written (%s)",
                self.file.name,
                error.strerror,
            )
            self.full = True
            with suppress(OSError):  # what it holds back cannot be written either
                self.file.close()


def read(source: str) -> list[Entry]:
    """A file, or a made-up trace such as poisson:rate=4,n=100. In order of arrival, the first at 0."""
    found = sorted(
        _made_up(source) if source.startswith("poisson:") else _lines(source),
        key=lambda e: e.arrival,
    )
    if not found:
        raise InvalidRequest(f"{source} has no requests", "trace")
    first = found[0].arrival
    for entry in found:
        entry.arrival -= first
        entry.deadline = None if entry.deadline is None else entry.deadline - first
    return found


def _lines(path: str) -> Iterator[Entry]:
    known = {f.name for f in fields(Entry)}
    try:
        opened = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115  (closed below; what is no JSON is told of there)
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error.strerror}): name a file of --record-trace, or a trace such as poisson:rate=4,n=100",
            "trace",
        ) from None
    with opened as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
                entry = Entry(**{name: value for name, value in values.items() if name in known})
                if entry.prompt < 1 or entry.output < 1 or not math.isfinite(entry.arrival):
                    raise ValueError("prompt and output are at least 1, arrival is a number")
            except (ValueError, TypeError, AttributeError) as error:
                if not line.endswith("\n"):
                    log.warning("%s breaks off in line %d, which is left out", path, number)
                    return
                raise InvalidRequest(
                    f"{path}, line {number} is no request ({error}): a line has at least arrival, prompt and output, in JSON",
                    "trace",
                ) from None
            yield entry


DEFAULTS = {"rate": "4", "n": "100", "prompt": "32-512", "output": "16-256", "shared": "0", "groups": "1", "urgent": "0",
            "tenants": "1", "seed": "0"}  # fmt: skip


def _made_up(spec: str) -> Iterator[Entry]:
    """rate: requests a second, at random times. n: how many. prompt, output: lengths, A-B: uniform. shared: tokens that the
    prompts of a group begin with, groups of them. urgent: the part that has priority -1. tenants: how many."""
    given: dict[str, str] = {}
    for part in filter(None, spec.partition(":")[2].split(",")):
        name, _, text = (one.strip() for one in part.partition("="))
        if name not in DEFAULTS:
            raise InvalidRequest(
                f"a made-up trace has no {name}: it has {', '.join(DEFAULTS)}, each as NAME=VALUE",
                "trace",
            )
        given[name] = text
    rate, urgent = (_number(k, given, float) for k in ("rate", "urgent"))
    n, shared, groups, tenants, seed = (
        _number(k, given, int) for k in ("n", "shared", "groups", "tenants", "seed")
    )
    lengths = [_lengths(k, given) for k in ("prompt", "output")]
    if not (
        0 < rate < math.inf and 0 <= urgent <= 1 and shared >= 0 and min(n, groups, tenants) >= 1
    ):
        raise InvalidRequest(
            f"{spec}: rate, n, groups and tenants are above 0, urgent is from 0 to 1", "trace"
        )
    g, now = random.Random(seed), 0.0
    for i in range(n):
        now += g.expovariate(rate)
        prompt, output = (g.randint(low, high) for low, high in lengths)
        group, common = g.randrange(groups), shared // BLOCK
        total = (shared + prompt + output) // BLOCK
        blocks = [group * common + j for j in range(common)] + [
            10**6 * (1 + i) + j for j in range(total - common)
        ]
        level = -1 if g.random() < urgent else 0
        yield Entry(now, shared + prompt, output, blocks, level, f"tenant {g.randrange(tenants)}")


def _number(name: str, given: dict[str, str], kind: type[T]) -> T:
    text = given.get(name, DEFAULTS[name])
    with suppress(ValueError):
        return kind(text)
    try:
        if (found := kind(float(text))) != float(text):  # 1e3 is a whole number too
            raise ValueError
        return found
    except (ValueError, OverflowError):
        what = "a whole number" if kind is int else "a number"
        raise InvalidRequest(f"a made-up trace's {name} is {what}, not {text!r}", "trace") from None


def _lengths(name: str, given: dict[str, str]) -> tuple[int, int]:
    text = given.get(name, DEFAULTS[name])
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 1 <= low <= high:
        raise InvalidRequest(
            f"a made-up trace's {name} is tokens: N or A-B, from 1 upwards, not {text!r}", "trace"
        )
    return low, high


def tokens(entry: Entry, index: int, vocab_size: int) -> list[int]:
    """Prompt and output: made-up ids, equal where the trace says so. `index`: the entry's, whose rest nobody else has."""
    found = [
        t
        for number in entry.blocks
        for t in random.Random(number).choices(range(vocab_size), k=BLOCK)
    ]
    rest = max(entry.prompt + entry.output - len(found), 0)
    return (found + random.Random(f"{index}").choices(range(vocab_size), k=rest))[
        : entry.prompt + entry.output
    ]
