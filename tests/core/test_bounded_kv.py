"""Which block is dropped from a full cache, and how that changes the sequence."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core import bounded_kv
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler
from octavo.params import SamplingParams
from octavo.types import Request, Sequence
from tests import oracle
from tests.fake_runner import FakeRunner

SIZE, BLOCKS, SINKS = 4, 8, 1
CACHE = CacheConfig(SIZE, 100, True, kv_eviction="heavy", kv_budget=SIZE * BLOCKS, kv_sinks=SINKS)


def sequence(tokens: int, prompt: int = 6) -> Sequence:
    request = Request("r", list(range(prompt)), SamplingParams())
    return Sequence(1, request, 0, array("i", range(tokens)), prompt, 100, 0, frozenset())


def test_a_dropped_block_changes_tokens_limit_and_prompt() -> None:
    seq = sequence(13)
    bounded_kv.drop_block_tokens(seq, 1, SIZE)  # tokens 4..7, of which 4 and 5 were the prompt's
    assert list(seq.tokens) == [0, 1, 2, 3, 8, 9, 10, 11, 12]
    assert (
        seq.token_limit,
        seq.dropped_tokens,
        seq.dropped_prompt_tokens,
        seq.kept_prompt_tokens,
    ) == (96, 4, 2, 4)
    assert seq.num_generated == 13 - 6, "the number of generated tokens does not change"
    bounded_kv.drop_block_tokens(seq, 1, SIZE)
    assert list(seq.tokens) == [0, 1, 2, 3, 12] and (
        seq.dropped_prompt_tokens,
        seq.kept_prompt_tokens,
    ) == (2, 4)


def test_the_least_attended_block_of_the_middle_is_dropped() -> None:
    seq = sequence(33)
    assert bounded_kv.pick_block(seq, CACHE) == 1, "without attention samples, the oldest block"
    # the first block stays, and so do the latest four
    seq.attention_mass = [0.0, 0.9, 0.5, 0.2, 0.0, 0.0, 0.0, 0.0]
    assert bounded_kv.pick_block(seq, CACHE) == 3
    assert bounded_kv.pick_block(seq, replace(CACHE, kv_eviction="sinks")) == 1
    bounded_kv.drop_block_tokens(seq, 3, SIZE)
    assert seq.attention_mass == [0.0, 0.9, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_fewer_attention_samples_than_dropped_blocks() -> None:
    seq = sequence(33)
    seq.attention_mass = [0.1]
    bounded_kv.drop_block_tokens(seq, 3, SIZE)
    assert seq.attention_mass == [0.1]


def test_prompt_positions_are_not_attention_samples() -> None:
    """A forked sequence computes the last position of the prompt as a decoding sequence does, and
    others compute it as part of their prompt."""
    seq = sequence(8, prompt=8)
    assert [bounded_kv.samples_attention(seq, position, CACHE) for position in (6, 7, 8, 9)] == [
        False,
        False,
        True,
        True,
    ]


def test_older_attention_samples_count_for_less() -> None:
    seq = sequence(9)
    bounded_kv.add_attention_sample(seq, [1.0])
    bounded_kv.add_attention_sample(seq, [0.5, 0.5])
    assert seq.attention_mass == pytest.approx([0.5 + bounded_kv.MASS_DECAY, 0.5])


def heavy_hitters(prompt: list[int], count: int, seed: int) -> tuple[list[int], set[int]]:
    """Generate with a cache that keeps the sinks, the latest half and the heaviest blocks between
    them. Return the generated tokens, and the indices at which blocks were dropped."""
    kept, mass, generated, dropped = list(prompt), [0.0] * BLOCKS, list[int](), set[int]()
    for n in range(count):
        if len(kept) > CACHE.kv_budget:
            lightest = min(range(SINKS, BLOCKS // 2), key=lambda j: (mass[j], j))
            del kept[lightest * SIZE : (lightest + 1) * SIZE], mass[lightest]
            mass.append(0.0)
            dropped.add(lightest)
        entries = [(t, p) for p, t in enumerate(kept)]
        # the first token comes with the prompt, and is no sample
        if n > 0 and len(kept) % (SIZE // bounded_kv.SAMPLES_PER_BLOCK) == 0:
            sample = oracle.attention(entries, SIZE)
            mass = [
                bounded_kv.MASS_DECAY * m + (sample[j] if j < len(sample) else 0.0)
                for j, m in enumerate(mass)
            ]
        generated.append(oracle.model(entries, seed, at=len(prompt) + n))
        kept.append(generated[-1])
    return generated, dropped


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_heavy_hitters_equal_a_naive_loop(depth: int) -> None:
    scheduler = Scheduler(CACHE, ScheduleConfig(4, 64, 60, depth), oracle.VOCAB, (oracle.EOS,))
    engine = Engine(scheduler, FakeRunner(100, SIZE))
    prompts = {"a": [3, 1, 4, 1, 5], "b": [9, 2, 6, 5, 3, 5, 8], "c": list(range(1, 31))}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.add(Request(name, prompt, SamplingParams(max_tokens=150, ignore_eos=True, seed=i)))
    got: dict[str, list[int]] = {name: [] for name in prompts}
    while not engine.idle:
        for out in engine.step():
            got[out.request_id] += out.tokens
        scheduler.check()
    for i, (name, prompt) in enumerate(prompts.items()):
        want, dropped = heavy_hitters(prompt, 150, i)
        assert got[name] == want and len(dropped) > 1
    assert scheduler.pool.num_available == 100
