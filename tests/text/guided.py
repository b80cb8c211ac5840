"""Follows texts along guides."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from octavo.params import StructuredOutputs
from octavo.text import Tokenizer
from octavo.text.detokenize import Detokenizer
from octavo.text.guide import Guides
from octavo.types import Guide

PADDING = 40  # ids of a model beyond its tokenizer's


def make(tokenizer: Tokenizer) -> Guides:
    return Guides(tokenizer, tokenizer.vocab_size + PADDING, tuple(sorted(tokenizer.end_ids)))


def allowed(guide: Guide) -> list[int]:
    return list(_tokens(guide.mask))


@lru_cache(maxsize=256)
def _tokens(mask: bytes) -> tuple[int, ...]:
    return tuple(
        i * 8 + k for i, byte in enumerate(mask) if byte for k in range(8) if byte >> k & 1
    )


def may_follow(guide: Guide, token: int) -> bool:
    return bool(guide.mask[token >> 3] >> (token & 7) & 1)


def accepts(guides: Guides, tokenizer: Tokenizer, text: str, **spec: Any) -> bool:
    """Whether the text, as it is tokenised, may be written and be the whole text."""
    guide = guides.compile(StructuredOutputs(**spec)).copy()
    for token in tokenizer.encode(text, add_special_tokens=False, parse_special=False):
        if not may_follow(guide, token):
            return False
        guide.accept(token)
    return any(may_follow(guide, token) for token in tokenizer.end_ids)


def walk(guide: Guide, tokenizer: Tokenizer, g: random.Random, most: int = 400) -> str | None:
    """A text of tokens chosen at random among those allowed. None: it did not come to an end."""
    guide, text = guide.copy(), Detokenizer(tokenizer, continuing=True)
    written = ""
    for _ in range(most):
        choices = allowed(guide)
        assert max(choices) < tokenizer.vocab_size, "an id without a token is allowed"
        token = g.choice(choices)
        if token in tokenizer.end_ids:
            return written + text.finish()
        assert token not in tokenizer.special_ids, "a control token is allowed in the text"
        written += text.push([token])
        guide.accept(token)
    return None
