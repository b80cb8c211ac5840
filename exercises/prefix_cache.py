"""Exercise of the lesson prefix-cache: how much of a prompt is found in the cache?

A block is found if its tokens and all tokens before it are equal, and only full blocks are found.
The last token of a prompt is always computed. Complete the function."""

from __future__ import annotations

import pytest

from exercises.engine import BLOCK_SIZE, add, new_engine, run
from octavo.events import Admitted


def cached_tokens(prompt: list[int], earlier: list[int], block_size: int) -> int:
    """Return how many tokens of `prompt` are found if all full blocks of `earlier` are cached."""
    raise NotImplementedError("complete this function")


EARLIER = list(range(1, 15))


@pytest.mark.parametrize(
    "prompt",
    [EARLIER, EARLIER[:8], EARLIER[:9], EARLIER[:7], [*EARLIER[:5], 30, *EARLIER[6:]], [30, 31]],
)
def test_cached_tokens(prompt: list[int]) -> None:
    engine = new_engine()
    add(engine, "earlier", EARLIER, reply=1)
    run(engine)
    found = []
    engine.events.subscribe(lambda event: found.append(event.cached_tokens), Admitted)
    add(engine, "prompt", prompt, reply=1)
    run(engine)
    assert [cached_tokens(prompt, EARLIER, BLOCK_SIZE)] == found
