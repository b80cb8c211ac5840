"""Exercise of the lesson chunked-prefill: into which chunks is a prompt divided?

A step computes at most `budget` tokens. Sequences that decode take one token each, and the prompt
gets the rest. Complete the function."""

from __future__ import annotations

import pytest

from exercises.engine import add, new_engine
from octavo.events import StepPlanned


def chunks_of(prompt: int, decoding: int, budget: int) -> list[int]:
    """Return the sizes of the chunks of a prompt, while `decoding` sequences decode beside it."""
    raise NotImplementedError("complete this function")


@pytest.mark.parametrize(("prompt", "decoding"), [(40, 2), (14, 2), (30, 0), (45, 1)])
def test_chunks(prompt: int, decoding: int) -> None:
    engine = new_engine(budget=16)
    for index in range(decoding):
        add(engine, f"decoding {index}", prompt=2, reply=30)
    engine.step()
    found = []
    engine.events.subscribe(
        lambda event: found.extend(
            item.num_tokens for item in event.plan.items if item.start is not None
        ),
        StepPlanned,
    )
    add(engine, "long", prompt, reply=1)
    for _ in range(6):
        engine.step()
    assert chunks_of(prompt, decoding, 16) == found
