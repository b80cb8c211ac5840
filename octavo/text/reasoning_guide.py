"""A guide for replies that begin with reasoning: free text, then the closing tag, then the answer.

    start       the model may open its reasoning, or begin the answer; both stay possible while the
                tokens fit both (the tag may be several ordinary tokens, as in "<", "think", ">")
    reasoning   every token is allowed; after `budget` tokens the closing tag is forced
    answer      what the structured output allows, or every token without one

A reply whose prompt has opened the reasoning begins with the second phase.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from octavo.params import ReasoningMarks
from octavo.text.tokenizer import Tokenizer
from octavo.types import Guide


class ReasoningGuide:
    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: ReasoningMarks,
        vocab_size: int,
        end_ids: Sequence[int],
        budget: int | None = None,
        answer: Guide | None = None,
    ):
        """`answer` is the guide of the structured output, at the start of its text."""
        self._tokenizer = tokenizer
        self._closing = marks.closing.encode()
        self._closing_ids = tag_ids(tokenizer, marks.closing)
        self._opening_ids = tag_ids(tokenizer, marks.opening)
        self._budget = budget
        self._answer = answer
        self._free_mask = all_tokens(vocab_size)
        # A structured answer must come, so the reasoning cannot end the text.
        self._reasoning_mask = without(self._free_mask, end_ids if answer is not None else ())
        self._phase = "reasoning" if marks.is_open else "start"
        self._opened = 0  # The tokens of the opening tag so far.
        # The guide of the answer while the tokens of the opening tag fit the answer too.
        self._rival = answer.copy() if answer is not None else None
        self._forced: list[int] = []  # The tokens that must come next.
        self._count = 0  # The tokens of the reasoning so far.
        self._tail = b""  # The last bytes of the reasoning.
        self._check_budget()

    @property
    def mask(self) -> bytes:
        if self._forced:
            return only(self._forced[0], len(self._free_mask))
        if self._phase == "reasoning":
            return self._reasoning_mask
        if self._answer is None:
            return self._free_mask
        if self._phase == "answer":
            return self._answer.mask
        opening = only(self._opening_ids[self._opened], len(self._free_mask))
        return opening if self._rival is None else union(self._rival.mask, opening)

    def accept(self, token: int) -> None:
        if self._forced:
            self._forced.pop(0)
            if not self._forced and self._phase == "closing":
                self._phase = "answer"
        elif self._phase == "reasoning":
            self._accept_reasoning(token)
        elif self._phase == "start":
            self._accept_start(token)
        elif self._answer is not None:
            self._answer.accept(token)

    def _accept_start(self, token: int) -> None:
        if token != self._opening_ids[self._opened]:
            self._begin_answer(token)
            return
        if self._rival is not None and allows(self._rival.mask, token):
            self._rival.accept(token)
        else:
            self._rival = None
        self._opened += 1
        if self._opened == len(self._opening_ids):
            self._phase = "reasoning"
            self._check_budget()

    def _begin_answer(self, token: int) -> None:
        self._phase = "answer"
        if self._rival is not None:
            self._answer = self._rival
            self._answer.accept(token)

    def _accept_reasoning(self, token: int) -> None:
        self._count += 1
        self._tail = (self._tail + self._tokenizer.token_bytes(token))[-4 * len(self._closing) :]
        if self._closing in self._tail:
            self._phase = "answer"
        else:
            self._check_budget()

    def _check_budget(self) -> None:
        """Force the closing tag if the budget is used up."""
        is_used_up = self._budget is not None and self._count >= self._budget
        if self._phase == "reasoning" and is_used_up:
            self._phase = "closing"
            self._forced += self._closing_ids

    def copy(self) -> ReasoningGuide:
        twin = copy.copy(self)
        twin._forced = list(self._forced)
        if self._answer is not None:
            twin._answer = self._answer.copy()
        if self._rival is not None:
            twin._rival = self._rival.copy()
        return twin


def tag_ids(tokenizer: Tokenizer, tag: str) -> list[int]:
    return tokenizer.encode(tag, add_special_tokens=False, parse_special=True)


# ---- masks: one bit for each token, in whole 32-bit words --------------------------------------


def all_tokens(vocab_size: int) -> bytes:
    size = -(-vocab_size // 32) * 4
    return ((1 << vocab_size) - 1).to_bytes(size, "little")


def only(token: int, size: int) -> bytes:
    return (1 << token).to_bytes(size, "little")


def union(left: bytes, right: bytes) -> bytes:
    joined = int.from_bytes(left, "little") | int.from_bytes(right, "little")
    return joined.to_bytes(len(left), "little")


def allows(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def without(mask: bytes, tokens: Sequence[int]) -> bytes:
    found = bytearray(mask)
    for token in tokens:
        found[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return bytes(found)
