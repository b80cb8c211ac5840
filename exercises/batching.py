"""Exercise of the lesson batching: how many steps do static and continuous batching take?

Every request arrives at once. The first step of a request computes its short prompt and gives its
first token, so a reply of r tokens takes r steps. Complete both functions."""

from __future__ import annotations

import pytest

from exercises.engine import add, new_engine, run


def static_steps(replies: list[int], slots: int) -> int:
    """Return the number of steps if groups of `slots` requests run until all of a group have
    ended."""
    raise NotImplementedError("complete this function")


def continuous_steps(replies: list[int], slots: int) -> int:
    """Return the number of steps if the next request takes a slot as soon as it is free."""
    raise NotImplementedError("complete this function")


@pytest.mark.parametrize("replies", [[6, 1, 2, 1, 5, 1, 2, 1], [3, 3, 3, 3], [9, 2, 2, 2, 2, 2]])
def test_steps(replies: list[int]) -> None:
    for batching, predict in (("static", static_steps), ("continuous", continuous_steps)):
        options = {"max_batch": 2} if batching == "static" else {}
        engine = new_engine(slots=2, budget=16, batching=batching, **options)
        for index, reply in enumerate(replies):
            add(engine, f"request {index}", prompt=2, reply=reply)
        assert predict(replies, 2) == run(engine), batching
