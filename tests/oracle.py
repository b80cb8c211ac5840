"""The naive engine: one request at a time, no cache, no batch, no blocks. What the real one must equal, token for token.

Its model is a hash of everything before the position, so that one wrong, missing or stale KV entry changes the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from octavo.types import Guide, SamplingParams, child_seed

VOCAB = 50
EOS = 0


def model(entries: Iterable[tuple[int, int]], seed: int, mask: bytes | None = None, at: int | None = None) -> int:
    """The next token after the entries (token, position): what logits, seed and sampler are to a real model. `at`: its place in
    the text, which is what its noise goes by; None: behind the last entry."""
    found = list(entries)
    key = (found, seed) if at in (None, len(found)) else (found, seed, at)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    allowed = [t for t in range(VOCAB) if mask is None or mask[t // 8] >> t % 8 & 1]
    return allowed[int.from_bytes(digest, "little") % len(allowed)]


def attention(entries: list[tuple[int, int]], size: int) -> list[float]:
    """How much of it each block gets: some like each other's tokens, some do not."""
    last = entries[-1][0]
    return [sum(hash((t, last)) % 97 for t, _ in entries[i : i + size]) / 97 for i in range(0, len(entries), size)]


def generate(
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    index: int = 0,
    max_model_len: int = 10**9,
    guide: Guide | None = None,
    keep: tuple[int, int, int] | None = None,
) -> list[int]:
    """The index-th completion of a request. `keep`: sinks and budget of a cache, and how many tokens leave it when it is full."""
    tokens, seed = list(prompt), child_seed(seed, index)
    guide = guide.copy() if guide else None
    stop = set(params.stop_token_ids or []) | (set() if params.ignore_eos and not guide else {EOS})
    kept = list(prompt)  # the cache: a token's position is its place here
    most = min(len(prompt) + (params.max_tokens or max_model_len), max_model_len)
    if keep is not None:
        most = len(prompt) + (params.max_tokens or max_model_len - len(prompt))
    while len(tokens) < most:
        if keep is not None and len(kept) > keep[1]:
            del kept[keep[0] : keep[0] + keep[2]]
        tokens.append(model(((t, p) for p, t in enumerate(kept)), seed, guide.mask if guide else None, len(tokens)))
        kept.append(tokens[-1])
        if tokens[-1] in stop and len(tokens) - len(prompt) >= params.min_tokens:
            break
        if guide:
            guide.accept(tokens[-1])
    return tokens[len(prompt) :]
