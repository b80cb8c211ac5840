"""Exercise of the lesson copy-on-write: how many blocks do n replies to one prompt hold?

The replies fork before the last token of the prompt: each of them computes that token, and samples
its first token. Blocks that are full by then are shared. A block that is not full is copied by
every reply but the last one that writes to it. Complete the function."""

from __future__ import annotations

import pytest

from exercises.engine import BLOCK_SIZE, add, new_engine


def blocks_held(prompt: int, generated: int, n: int, block_size: int) -> int:
    """Return how many different blocks n replies hold together. Each of them has computed the
    prompt and `generated` more positions, at least one."""
    raise NotImplementedError("complete this function")


@pytest.mark.parametrize(("prompt", "n"), [(10, 3), (8, 2), (5, 4), (4, 1)])
def test_blocks_held(prompt: int, n: int) -> None:
    engine = new_engine()
    add(engine, "a", prompt, reply=9, n=n)
    for _ in range(7):
        engine.step()
        sequences = list(engine.scheduler.running)
        generated = sequences[0].computed - prompt
        if len(sequences) == n and generated >= 1:
            held = len({block for seq in sequences for block in seq.block_table})
            assert blocks_held(prompt, generated, n, BLOCK_SIZE) == held
