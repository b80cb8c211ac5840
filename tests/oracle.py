"""A naive engine: one request at a time, no cache, no batch, no blocks. The tokens of the real
engine must equal its tokens.

Its model is a hash of everything before the position, so that one wrong, missing or stale KV entry
changes the output. Its beam search is that of transformers, literally: every beam with every token
of the vocabulary.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable

from octavo.params import SamplingParams
from octavo.types import Guide, child_seed

VOCAB = 50
EOS = 0


def model(
    entries: Iterable[tuple[int, int]], seed: int, mask: bytes | None = None, at: int | None = None
) -> int:
    """Return the next token after the entries (token, position), in place of logits, seed and
    sampler of a real model. `at` is its position in the text, which determines the sampling noise.
    None means the position behind the last entry."""
    context = list(entries)
    key = (context, seed) if at in (None, len(context)) else (context, seed, at)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    allowed = [t for t in range(VOCAB) if mask is None or mask[t // 8] >> t % 8 & 1]
    return allowed[int.from_bytes(digest, "little") % len(allowed)]


def attention(entries: list[tuple[int, int]], size: int) -> list[float]:
    """Return a made-up attention mass of each block, a hash of its tokens and the last token."""
    last = entries[-1][0]
    return [
        sum(hash((t, last)) % 97 for t, _ in entries[i : i + size]) / 97
        for i in range(0, len(entries), size)
    ]


def logprobs(entries: Iterable[tuple[int, int]]) -> list[float]:
    """Return the logprob of every token after the entries."""
    g = random.Random(repr(list(entries)))
    weights = [g.random() ** 4 for _ in range(VOCAB)]
    weights[EOS] += g.choice([0.0, 0.0, 2.0])
    total = math.log(sum(weights))
    return [math.log(w) - total for w in weights]


def beam_search(
    prompt: list[int], params: SamplingParams, max_model_len: int = 10**9
) -> list[tuple[float, list[int]]]:
    """Return the n best beams: (score, tokens)."""
    width, penalty = params.best_of or params.n, params.length_penalty
    stop = set(params.stop_token_ids or []) | (set() if params.ignore_eos else {EOS})
    longest = min(params.max_tokens or max_model_len, max_model_len - len(prompt))
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        grown = []
        for score, tokens in running:
            next_logprobs = logprobs((t, p) for p, t in enumerate(prompt + tokens))
            for token in range(VOCAB):
                if token not in stop or length > params.min_tokens:
                    grown.append((score + next_logprobs[token], [*tokens, token]))
        grown = sorted(grown, reverse=True)[: (1 + max(len(stop), 1)) * width]
        over = [tokens[-1] in stop or length == longest for _, tokens in grown]
        ended += [
            (score / length**penalty, tokens)
            for (score, tokens), end in zip(grown[:width], over, strict=False)
            if end
        ]
        ended = sorted(ended, reverse=True)[:width]
        running = [beam for beam, end in zip(grown, over, strict=True) if not end][:width]
        if length == longest or (len(ended) == width and params.early_stopping is True):
            break
        ideal = longest if params.early_stopping == "never" and penalty > 0 else length
        if len(ended) == width and running[0][0] / ideal**penalty <= ended[-1][0]:
            break
    return ended[: params.n]


def generate(
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    index: int = 0,
    max_model_len: int = 10**9,
    guide: Guide | None = None,
    keep: tuple[int, int, int] | None = None,
) -> list[int]:
    """Return the index-th completion of a request. `keep` is the sinks and the budget of a bounded
    cache, and how many tokens are dropped when it is full."""
    tokens, seed = list(prompt), child_seed(seed, index)
    guide = guide.copy() if guide else None
    stop = set(params.stop_token_ids or []) | (set() if params.ignore_eos and not guide else {EOS})
    kept = list(prompt)  # the cache: a token's position is its index in it
    max_length = min(len(prompt) + (params.max_tokens or max_model_len), max_model_len)
    if keep is not None:
        max_length = len(prompt) + (params.max_tokens or max_model_len - len(prompt))
    while len(tokens) < max_length:
        if keep is not None and len(kept) > keep[1]:
            del kept[keep[0] : keep[0] + keep[2]]
        tokens.append(
            model(
                ((t, p) for p, t in enumerate(kept)),
                seed,
                guide.mask if guide else None,
                len(tokens),
            )
        )
        kept.append(tokens[-1])
        if tokens[-1] in stop and len(tokens) - len(prompt) >= params.min_tokens:
            break
        if guide:
            guide.accept(tokens[-1])
    return tokens[len(prompt) :]


def state(entries: Iterable[tuple[int, int]]) -> float:
    """Return the hidden state of the last entry: a number that depends on every entry."""
    value = 0
    for token, position in entries:
        value = (31 * value + 7 * token + position + 1) % 1009
    return float(value)


def pooled(prompt: list[int], pooling: str) -> list[float]:
    """Return the output of a request for hidden states of its prompt."""
    entries = [(token, position) for position, token in enumerate(prompt)]
    states = [state(entries[: length + 1]) for length in range(len(entries))]
    if pooling == "mean":
        return [sum(states)]
    return states if pooling == "all" else states[-1:]
