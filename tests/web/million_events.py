"""A long recording: many requests on an engine without a model."""

from __future__ import annotations

import random

from octavo.core.event_stream import EventStream
from octavo.params import SamplingParams
from octavo.types import Request
from tests.workloads import make_engine


def record_many(num_events: int) -> bytes:
    """Return a recording of at least this many events."""
    engine = make_engine(4000, 4, slots=64, budget=512, depth=1, max_len=200)
    parts: list[bytes] = []
    stream = EventStream(engine)
    stream.open(lambda lines, is_start: parts.append(lines))
    dice = random.Random(1)
    number = 0
    while engine.events.number < num_events + 1000:
        for _ in range(8):
            number += 1
            prompt = [dice.randrange(1, 30) for _ in range(dice.randint(5, 60))]
            params = SamplingParams(max_tokens=dice.randint(5, 40), ignore_eos=True)
            engine.add(Request(f"request {number}", prompt, params))
        for _ in range(4):
            engine.step()
    stream.flush()
    return b"".join(parts)
