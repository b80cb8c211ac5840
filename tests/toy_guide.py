"""A guide without a grammar: the allowed tokens are a hash of all tokens accepted so far. So a token
that was accepted twice, too early, in another order or in the copy of another sequence changes all
masks after it."""

from __future__ import annotations

import hashlib
import random

from octavo.errors import GuideError
from tests import oracle


def pack(allowed: list[int], vocab_size: int = oracle.VOCAB) -> bytes:
    """Return a mask as Guide.mask packs it."""
    mask = bytearray(-(-vocab_size // 32) * 4)
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


class ToyGuide:
    def __init__(self, seed: int, state: bytes = b""):
        self.seed, self.state = seed, state
        g = random.Random(repr((seed, state)))
        tokens = range(1, oracle.VOCAB)
        self.allowed = (
            [oracle.EOS] if g.random() < 0.05 else g.sample(tokens, g.choice([1, 2, 5, 20]))
        )
        if g.random() < 0.1:
            self.allowed.append(oracle.EOS)
        self.mask = pack(self.allowed)

    def accept(self, token: int) -> None:
        if token not in self.allowed:
            raise GuideError(f"{token} is not among {self.allowed}")
        state = hashlib.blake2b(self.state + bytes([token]), digest_size=8).digest()
        self.__init__(self.seed, state)  # type: ignore[misc]

    def copy(self) -> ToyGuide:
        return ToyGuide(self.seed, self.state)
