"""Tells a reasoning model's thoughts from its answer, piece by piece: what stands between <think> and </think>.

Works on text alone, however it was split; a tag that arrives in pieces is held back until it is whole.
"""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


class Thinking:
    """`thinking` starts as True where the prompt itself ends with an opening tag."""

    def __init__(self, thinking: bool = False):
        self.thinking = thinking
        self._held = ""

    def push(self, text: str) -> list[tuple[bool, str]]:
        """What the text makes certain: (is a thought, text), in order, without the tags."""
        text = self._held + text
        out = []
        while True:
            tag = CLOSE if self.thinking else OPEN
            before, found, after = text.partition(tag)
            if not found:
                break
            out.append((self.thinking, before))
            self.thinking = not self.thinking
            text = after
        keep = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
        self._held = text[len(text) - keep :]
        out.append((self.thinking, text[: len(text) - keep]))
        return [piece for piece in out if piece[1]]

    def finish(self) -> list[tuple[bool, str]]:
        """Nothing more comes: half a tag is text after all."""
        held = self._held
        self._held = ""
        return [(self.thinking, held)] if held else []
