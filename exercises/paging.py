"""Exercise of the lesson paging: how much memory is reserved and not used?

Paging leaves only a part of the last block of each sequence unused. Contiguous allocation reserves
positions for the longest possible reply. Complete both functions."""

from __future__ import annotations

from exercises.engine import BLOCK_SIZE, add, new_engine


def unused_with_paging(lengths: list[int], block_size: int) -> int:
    """Return how many positions of their blocks sequences of these lengths do not use."""
    raise NotImplementedError("complete this function")


def unused_when_contiguous(lengths: list[int], limits: list[int]) -> int:
    """Return how many positions are not used if each sequence has reserved as many positions as
    its limit. A limit is the length of the prompt plus the maximum length of the reply."""
    raise NotImplementedError("complete this function")


def test_unused_positions() -> None:
    engine = new_engine()
    prompts = {"a": 5, "b": 8, "c": 9}
    for name, prompt in prompts.items():
        add(engine, name, prompt, reply=20)
    for _ in range(4):
        engine.step()
    sequences = list(engine.scheduler.running)
    lengths = [seq.computed for seq in sequences]
    reserved = sum(len(seq.block_table) * BLOCK_SIZE for seq in sequences)
    assert unused_with_paging(lengths, BLOCK_SIZE) == reserved - sum(lengths)
    limits = [prompt + 20 for prompt in prompts.values()]
    assert unused_when_contiguous(lengths, limits) == sum(limits) - sum(lengths)
