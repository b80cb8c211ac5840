"""Guides of replies that may begin with reasoning, with a tag of several ordinary tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.text.reasoning_guide import ReasoningGuide, allows
from octavo.text.replay_guide import ReplayGuide

VOCAB = 128
END = 0


class Bytes:
    """A tokenizer with one token for each character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def guide(answer: str | None, budget: int | None = None) -> ReasoningGuide:
    marks: Any = SimpleNamespace(opening="<think>", closing="</think>", is_open=False)
    rest = None if answer is None else ReplayGuide([*answer.encode(), END], VOCAB)
    return ReasoningGuide(Bytes(), marks, VOCAB, [END], budget, rest)  # type: ignore[arg-type]


def allowed(found: ReasoningGuide) -> set[int]:
    return {token for token in range(VOCAB) if allows(found.mask, token)}


def follow(found: ReasoningGuide, text: str | Sequence[int]) -> None:
    for token in text.encode() if isinstance(text, str) else text:
        assert allows(found.mask, token), (text, chr(token))
        found.accept(token)


@pytest.mark.parametrize("answer", ["<tool>", "<think", "plain"])
@pytest.mark.parametrize("reasoning", ["", "<think>a < b, <tool></think>"])
def test_an_answer_may_begin_like_the_opening_tag(answer: str, reasoning: str) -> None:
    found = guide(answer)
    copied = found.copy()
    follow(found, reasoning + answer)
    assert allowed(found) == ({END, ord(">")} if answer + reasoning == "<think" else {END})
    follow(copied, answer)


def test_both_continuations_are_allowed_while_both_fit() -> None:
    found = guide("<tool>")
    assert allowed(found) == {ord("<")}
    follow(found, "<t")
    assert allowed(found) == {ord("h"), ord("o")}
    follow(found, "h")
    assert allowed(found) == {ord("i")}
    follow(found, "ink>")
    assert END not in allowed(found)


def test_without_a_structure_a_reply_may_begin_with_a_part_of_the_tag() -> None:
    found = guide(None, budget=2)
    follow(found, "<table>")
    assert len(allowed(found)) == VOCAB
    found = guide(None, budget=2)
    follow(found, "<think>ab")
    assert allowed(found) == {ord("<")}
    follow(found, "</think>x")
    assert len(allowed(found)) == VOCAB
