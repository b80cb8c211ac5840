"""The naive engine: one request at a time, no cache, no batch, no blocks. What the real one must equal, token for token.

Its model is a hash of everything before the position, so that one wrong, missing or stale KV entry changes the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from octavo.types import Guide, SamplingParams, child_seed

VOCAB = 50
EOS = 0


def model(entries: Iterable[tuple[int, int]], seed: int, mask: bytes | None = None) -> int:
    """The next token after the entries (token, position): what logits, seed and sampler are to a real model."""
    digest = hashlib.blake2b(repr((list(entries), seed)).encode(), digest_size=8).digest()
    allowed = [t for t in range(VOCAB) if mask is None or mask[t // 8] >> t % 8 & 1]
    return allowed[int.from_bytes(digest, "little") % len(allowed)]


def generate(
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    index: int = 0,
    max_model_len: int = 10**9,
    guide: Guide | None = None,
) -> list[int]:
    """The index-th completion of a request."""
    tokens, seed = list(prompt), child_seed(seed, index)
    guide = guide.copy() if guide else None
    stop = set(params.stop_token_ids or []) | (set() if params.ignore_eos and not guide else {EOS})
    while len(tokens) < min(len(prompt) + (params.max_tokens or max_model_len), max_model_len):
        tokens.append(model(((t, p) for p, t in enumerate(tokens)), seed, guide.mask if guide else None))
        if tokens[-1] in stop and len(tokens) - len(prompt) >= params.min_tokens:
            break
        if guide:
            guide.accept(tokens[-1])
    return tokens[len(prompt) :]
