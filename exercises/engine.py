"""An engine without a model, for the tests of the exercises."""

from __future__ import annotations

from typing import Any

from octavo.core.engine import Engine
from octavo.params import SamplingParams
from octavo.types import Request
from tests.workloads import make_engine

BLOCK_SIZE = 4


def new_engine(num_blocks: int = 40, slots: int = 4, budget: int = 16, **options: Any) -> Engine:
    """Return an engine whose blocks have four positions. `options` are those of ScheduleConfig."""
    return make_engine(num_blocks, BLOCK_SIZE, slots=slots, budget=budget, depth=1, **options)


def add(engine: Engine, name: str, prompt: int | list[int], reply: int, **fields: Any) -> None:
    """Add a request. `prompt` is a list of tokens, or a number of tokens that no other request
    begins with."""
    if isinstance(prompt, int):
        first = 1 + sum(map(ord, name)) % 29
        prompt = [(first + place) % 30 + 1 for place in range(prompt)]
    n = fields.pop("n", 1)
    params = SamplingParams(n=n, max_tokens=reply, ignore_eos=True, seed=1)
    engine.add(Request(name, prompt, params, **fields))


def run(engine: Engine) -> int:
    """Run all requests to their ends. Returns the number of steps."""
    before = engine.events.step
    while not engine.idle:
        engine.step()
    return engine.events.step - before
