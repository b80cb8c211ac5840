"""Traces: when requests came and how long they were, to be played again. Lengths and equalities, no text and no token.

A line of JSON for each completion:

    {"arrival": 12.3, "prompt": 40, "output": 25, "blocks": [3, 1, 7, 5], "priority": 0, "key": "", "deadline": null,
     "id": "req_5f-0", "submitted": 12.301, "queued": 12.302, "first": 12.34}

`blocks` has a number for each full block of BLOCK tokens of the prompt and the output: equal numbers, equal tokens from the
beginning up to there. The numbers are hashes under a key that is never written down: a trace keeps who shares a prefix with whom,
and nothing else of what was said. The last line is how the request fared, which is not played again: when it was handed to the
engine, when the engine took it in (a step may have been under way), and when its first token was there.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from octavo.core.blocks import chain, root
from octavo.errors import InvalidRequest
from octavo.types import Sequence

BLOCK = 16


@dataclass
class Entry:
    arrival: float  # seconds; only differences count
    prompt: int  # tokens
    output: int
    blocks: list[int] = field(default_factory=list)
    priority: int = 0
    key: str = ""
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
            raise InvalidRequest(f"a trace cannot be written to {path}: {error.strerror}", "record_trace") from None
        self.secret = os.urandom(16)

    def ended(self, seq: Sequence) -> None:
        request, output = seq.request, len(seq.tokens) - seq.prompt_len
        if output < 1 or not request.arrival:
            return
        blocks, parent = [], self.secret + root(request.cache_salt)
        known = array("i", request.prompt) if seq.dropped else seq.tokens
        for at in range(0, len(known) - BLOCK + 1, BLOCK):
            parent = chain(parent, known[at : at + BLOCK])
            blocks.append(int.from_bytes(parent[:6], "little"))
        entry = Entry(
            request.arrival, len(request.prompt), output, blocks, request.priority, request.key, request.deadline,
            request.id, request.submitted, seq.queued, seq.first,
        )  # fmt: skip
        self.file.write(json.dumps(asdict(entry)) + "\n")


def read(source: str) -> list[Entry]:
    """A file, or a made-up trace such as poisson:rate=4,n=100. In order of arrival, the first at 0."""
    found = sorted(_made_up(source) if source.startswith("poisson:") else _lines(source), key=lambda e: e.arrival)
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
        opened = open(path, encoding="utf-8")  # noqa: SIM115  (closed below)
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
                raise InvalidRequest(
                    f"{path}, line {number} is no request ({error}): a line has at least arrival, prompt and output, in JSON",
                    "trace",
                ) from None
            yield entry


DEFAULTS = {"rate": "4", "n": "100", "prompt": "32-512", "output": "16-256", "shared": "0", "groups": "1", "urgent": "0",
            "keys": "1", "seed": "0"}  # fmt: skip


def _made_up(spec: str) -> Iterator[Entry]:
    """rate: requests a second, at random times. n: how many. prompt, output: lengths, A-B: uniform. shared: tokens that the
    prompts of a group begin with, groups of them. urgent: the part that has priority -1. keys: tenants."""
    given = dict(re.findall(r"(\w+)=([^,]+)", spec.partition(":")[2]))
    if unknown := sorted(given.keys() - DEFAULTS.keys()):
        raise InvalidRequest(f"a made-up trace has no {unknown[0]}: it has {', '.join(DEFAULTS)}", "trace")
    try:
        value = {name: [float(x) for x in text.split("-")] for name, text in (DEFAULTS | given).items()}
    except ValueError:
        raise InvalidRequest(f"{spec}: values are numbers, or A-B for prompt and output", "trace") from None
    rate, n, shared, groups, urgent, keys, seed = (
        value[k][0] for k in ("rate", "n", "shared", "groups", "urgent", "keys", "seed")
    )
    if rate <= 0 or n < 1 or groups < 1 or keys < 1 or min(value["prompt"][0], value["output"][0]) < 1:
        raise InvalidRequest(f"{spec}: rate, n, groups, keys, prompt and output are above 0", "trace")
    g, now = random.Random(int(seed)), 0.0
    for i in range(int(n)):
        now += g.expovariate(rate)
        prompt, output = (g.randint(int(value[k][0]), int(value[k][-1])) for k in ("prompt", "output"))
        group, common = g.randrange(int(groups)), int(shared) // BLOCK
        total = (int(shared) + prompt + output) // BLOCK
        blocks = [group * common + j for j in range(common)] + [10**6 * (1 + i) + j for j in range(total - common)]
        level = -1 if g.random() < urgent else 0
        yield Entry(now, int(shared) + prompt, output, blocks, level, f"key {g.randrange(int(keys))}")


def tokens(entry: Entry, index: int, vocab_size: int) -> list[int]:
    """Prompt and output: made-up ids, equal where the trace says so. `index`: the entry's, whose rest nobody else has."""
    found = [t for number in entry.blocks for t in random.Random(number).choices(range(vocab_size), k=BLOCK)]
    rest = max(entry.prompt + entry.output - len(found), 0)
    return (found + random.Random(f"{index}").choices(range(vocab_size), k=rest))[: entry.prompt + entry.output]
