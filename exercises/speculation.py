"""Exercise of the lesson speculation: guess the next tokens, and keep what the model confirms.

Complete both functions, and compare them with octavo/core/drafters.py and
octavo/core/speculation.py."""

from __future__ import annotations

import random
from array import array

from octavo.core.drafters import continuation_of


def draft(tokens: list[int], length: int, count: int) -> list[int]:
    """Return up to `count` tokens that followed the latest earlier occurrence of the last `length`
    tokens. Return an empty list if they do not occur earlier."""
    raise NotImplementedError("complete this function")


def kept(drafts: list[int], sampled: list[int]) -> list[int]:
    """Return the tokens that a step adds to a sequence. `sampled[i]` is the model's own token after
    the first i drafts, so `sampled` has one token more than `drafts`. Drafts count up to the first
    that differs from the model's own token, and the model's token follows them."""
    raise NotImplementedError("complete this function")


def test_drafts_are_those_of_the_ngram_drafter() -> None:
    dice = random.Random(1)
    for _ in range(200):
        tokens = dice.choices(range(3), k=dice.randint(3, 20))
        known = array("i", tokens)
        expected = list(continuation_of(known, known, 2, 2, 4))
        assert draft(tokens, 2, 4) == expected, tokens


def test_kept_tokens_are_those_that_the_model_would_have_given() -> None:
    assert kept([7, 8, 9], [7, 8, 9, 4]) == [7, 8, 9, 4], "every draft is right"
    assert kept([7, 8, 9], [7, 3, 9, 4]) == [7, 3], "the second draft is wrong"
    assert kept([7], [1, 2]) == [1], "the first draft is wrong"
    assert kept([], [5]) == [5], "there is no draft"
