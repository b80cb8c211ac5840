"""A guide that allows exactly the tokens of a known reply, so that the engine computes their
logprobs."""

from __future__ import annotations


class ReplayGuide:
    """Allows one known token after the other."""

    def __init__(self, tokens: list[int], vocab_size: int, position: int = 0):
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._position = position

    @property
    def mask(self) -> bytes:
        token = self._tokens[self._position]
        bits = bytearray(-(-self._vocab_size // 32) * 4)
        bits[token >> 3] = 1 << (token & 7)
        return bytes(bits)

    def accept(self, token: int) -> None:
        self._position += 1

    def copy(self) -> ReplayGuide:
        return ReplayGuide(self._tokens, self._vocab_size, self._position)
