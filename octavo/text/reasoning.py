"""Separates the reasoning of a model, between <think> and </think>, from its answer.

The filter works on text, however it is split. It holds back a tag that is incomplete.
"""

from __future__ import annotations

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"


class ReasoningFilter:
    """`in_reasoning` is true at the start if the prompt ends with an opening tag."""

    def __init__(self, in_reasoning: bool = False):
        self.in_reasoning = in_reasoning
        self._held_text = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """Return the text that is certain now as (is reasoning, text), without the tags."""
        text = self._held_text + text
        pieces = []
        while True:
            tag = CLOSE_TAG if self.in_reasoning else OPEN_TAG
            before_tag, tag_found, after_tag = text.partition(tag)
            if not tag_found:
                break
            pieces.append((self.in_reasoning, before_tag))
            self.in_reasoning = not self.in_reasoning
            text = after_tag
        held_length = next(
            (length for length in range(len(tag) - 1, 0, -1) if text.endswith(tag[:length])), 0
        )
        self._held_text = text[len(text) - held_length :]
        pieces.append((self.in_reasoning, text[: len(text) - held_length]))
        return [piece for piece in pieces if piece[1]]

    def finish(self) -> list[tuple[bool, str]]:
        """Return the text that was held back. It is not a tag."""
        held_text = self._held_text
        self._held_text = ""
        return [(self.in_reasoning, held_text)] if held_text else []
