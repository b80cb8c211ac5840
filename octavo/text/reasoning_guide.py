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
        self._opening_tokens = 0  # The number of tokens of the opening tag so far.
        # The guide of an answer without reasoning, while the tokens so far may begin one.
        self._untagged_answer = answer.copy() if answer is not None else None
        self._forced_ids: list[int] = []  # The tokens that must come next.
        self._reasoning_tokens = 0  # The number of tokens of the reasoning so far.
        self._last_bytes = b""  # The last bytes of the reasoning.
        self._check_budget()

    @property
    def mask(self) -> bytes:
        if self._forced_ids:
            return only(self._forced_ids[0], len(self._free_mask))
        if self._phase == "reasoning":
            return self._reasoning_mask
        if self._answer is None:
            return self._free_mask
        if self._phase == "answer":
            return self._answer.mask
        opening = only(self._opening_ids[self._opening_tokens], len(self._free_mask))
        if self._untagged_answer is None:
            return opening
        return union(self._untagged_answer.mask, opening)

    def accept(self, token: int) -> None:
        if self._forced_ids:
            self._forced_ids.pop(0)
            if not self._forced_ids and self._phase == "closing":
                self._phase = "answer"
        elif self._phase == "reasoning":
            self._accept_reasoning(token)
        elif self._phase == "start":
            self._accept_start(token)
        elif self._answer is not None:
            self._answer.accept(token)

    def _accept_start(self, token: int) -> None:
        if token != self._opening_ids[self._opening_tokens]:
            self._begin_answer(token)
            return
        if self._untagged_answer is not None and allows(self._untagged_answer.mask, token):
            self._untagged_answer.accept(token)
        else:
            self._untagged_answer = None
        self._opening_tokens += 1
        if self._opening_tokens == len(self._opening_ids):
            self._phase = "reasoning"
            self._check_budget()

    def _begin_answer(self, token: int) -> None:
        self._phase = "answer"
        if self._untagged_answer is not None:
            self._answer = self._untagged_answer
            self._answer.accept(token)

    def _accept_reasoning(self, token: int) -> None:
        self._reasoning_tokens += 1
        self._last_bytes = (self._last_bytes + self._tokenizer.token_bytes(token))[
            -4 * len(self._closing) :
        ]
        if self._closing in self._last_bytes:
            self._phase = "answer"
        else:
            self._check_budget()

    def _check_budget(self) -> None:
        """Force the closing tag if the budget is used up."""
        is_used_up = self._budget is not None and self._reasoning_tokens >= self._budget
        if self._phase == "reasoning" and is_used_up:
            self._phase = "closing"
            self._forced_ids += self._closing_ids

    def copy(self) -> ReasoningGuide:
        duplicate = copy.copy(self)
        duplicate._forced_ids = list(self._forced_ids)
        if self._answer is not None:
            duplicate._answer = self._answer.copy()
        if self._untagged_answer is not None:
            duplicate._untagged_answer = self._untagged_answer.copy()
        return duplicate


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
    remaining = bytearray(mask)
    for token in tokens:
        remaining[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return bytes(remaining)
