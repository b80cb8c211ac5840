"""Detection of texts that repeat themselves."""

from __future__ import annotations

import random
import time
from array import array
from typing import Any

import pytest

from octavo.core.repetition import repeats
from octavo.errors import InvalidRequest
from octavo.params import (
    STRUCTURED_REPETITION,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputs,
)


def naive(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        tail = tokens[-size * params.min_count :]
        if len(tail) == size * params.min_count and tail == tail[:size] * params.min_count:
            return True
    return False


def test_repeats_equals_a_comparison_of_every_pattern() -> None:
    chance = random.Random(1)
    num_repeats = 0
    for _ in range(5000):
        # ids of which one's bytes occur in the bytes of others
        tokens = [chance.choice([0, 1, 256, 257, 65536]) for _ in range(chance.randrange(30))]
        pattern = [chance.choice([0, 1, 256]) for _ in range(chance.randrange(1, 5))]
        tokens += pattern * chance.randrange(1, 9)
        min_size = chance.randrange(0, 3)
        params = RepetitionDetectionParams(
            chance.randrange(max(min_size, 1), 7), min_size, chance.randrange(2, 7)
        )
        generated = chance.randrange(1, len(tokens) + 1)
        expected = naive(tokens[-generated:], params)
        assert repeats(array("i", tokens), generated, params) is expected
        num_repeats += expected
    assert num_repeats > 500


def test_the_prompt_does_not_count() -> None:
    tokens = array("i", [5] * 20)
    params = RepetitionDetectionParams(max_pattern_size=1, min_count=10)
    assert repeats(tokens, 10, params) and not repeats(tokens, 9, params)


def test_repeats_takes_little_time() -> None:
    chance = random.Random(1)
    tokens = array("i", [chance.choice([1, 2, chance.randrange(50_000)]) for _ in range(8000)])
    start = time.process_time()
    for _ in range(1000):
        repeats(tokens, len(tokens), STRUCTURED_REPETITION)
    assert time.process_time() - start < 0.1, "100 us per call: fifty times what it takes"


def test_structured_outputs_have_a_default() -> None:
    assert SamplingParams().repetition is None
    spec = StructuredOutputs(regex="a+")
    assert SamplingParams(structured_outputs=spec).repetition is STRUCTURED_REPETITION
    off = RepetitionDetectionParams()
    assert SamplingParams(structured_outputs=spec, repetition_detection=off).repetition is None
    own = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    assert SamplingParams(repetition_detection=own).repetition is own


@pytest.mark.parametrize(
    "options",
    [dict(max_pattern_size=-1), dict(max_pattern_size=257, min_count=2), dict(max_pattern_size=4),
     dict(max_pattern_size=4, min_count=1), dict(max_pattern_size=4, min_pattern_size=5, min_count=2),
     dict(max_pattern_size=4, min_count=10**6), dict(max_pattern_size="4", min_count=2)],
    ids=str,
)  # fmt: skip
def test_inconsistent_parameters_are_refused(options: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RepetitionDetectionParams(**options)
    assert str(caught.value.param).startswith("repetition_detection.")


def test_beam_search_refuses_repetition_detection() -> None:
    own = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    with pytest.raises(InvalidRequest, match="beam search"):
        SamplingParams(n=2, use_beam_search=True, repetition_detection=own)
