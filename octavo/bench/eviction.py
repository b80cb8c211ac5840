"""What bounded KV costs and keeps: memory and speed over a long reply, and perplexity of a long text against a whole cache.

    full      the whole text is kept
    window    the latest tokens alone: kv_eviction sinks with no sinks
    sinks     the first block and the latest tokens
    heavy     the first block, the latest half, and of the rest what is attended to most

The text is that of octavo/bench/quant.py. It is told to the engine token by token, as a reply that a guide allows nothing else to
be, so that what is measured is how replies are computed. Perplexity is over what follows the first `budget` tokens.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from octavo.bench.quant import passages
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.types import Request, SamplingParams

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kv_eviction": "none"},
    "window": {"kv_eviction": "sinks", "kv_sinks": 0},
    "sinks": {"kv_eviction": "sinks"},
    "heavy": {"kv_eviction": "heavy"},
}


class Told:
    """A guide along a text that is known."""

    def __init__(self, ids: list[int], vocab_size: int, at: int = 0):
        self.ids, self.vocab_size, self.at = ids, vocab_size, at

    @property
    def mask(self) -> bytes:
        token = self.ids[self.at]
        return (1 << token).to_bytes(-(-self.vocab_size // 32) * 4, "little")

    def accept(self, token: int) -> None:
        self.at += 1

    def copy(self) -> Told:
        return Told(self.ids, self.vocab_size, self.at)


def tell(llm: LLM, ids: list[int], prompt: int) -> list[float]:
    """Log-probabilities of the tokens after the first `prompt` ones."""
    rest = ids[prompt:]
    params = SamplingParams(max_tokens=len(rest), temperature=0, ignore_eos=True, logprobs=0, detokenize=False)
    llm.engine.add(Request("text", ids[:prompt], params, guide=Told(rest, llm.config.vocab_size)))
    found: list[float] = []
    while not llm.engine.idle:
        for out in llm.engine.step():
            if out.error:
                raise OctavoError(f"the text could not be told: {out.error}")
            found += [record.logprob for record in out.logprobs or []]
    if not set(llm.eos_ids).isdisjoint(rest) or len(found) != len(rest):
        raise OctavoError(f"{len(found)} log-probabilities arrived for {len(rest)} tokens: not counted")
    return found


def generate(llm: LLM, prompt: list[int], tokens: int, every: int) -> dict[str, Any]:
    """One long reply: tokens a second in each part of `every` tokens, and the most blocks that were in use in it."""
    params = SamplingParams(max_tokens=tokens, temperature=1, seed=0, ignore_eos=True, detokenize=False)
    llm.engine.add(Request("reply", prompt, params))
    scheduler, parts, count, most, told = llm.engine.scheduler, list[dict[str, Any]](), 0, 0, 0
    pool, dropped = scheduler.pool, scheduler.count.dropped_blocks
    start = time.perf_counter()
    while not llm.engine.idle:
        count += sum(len(out.tokens) for out in llm.engine.step())
        most = max(most, pool.num_blocks - len(pool.free))
        if count - told >= every or (llm.engine.idle and count > told):
            now = time.perf_counter()
            parts.append({"tokens": count - told, "tok_s": (count - told) / (now - start), "blocks": most})
            start, most, told = now, 0, count
    if count != tokens:
        raise OctavoError(f"{count} tokens arrived of {tokens}: not counted")
    return {"parts": parts, "dropped_blocks": scheduler.count.dropped_blocks - dropped}


def measure(
    load: Callable[[dict[str, Any]], LLM],
    budget: int,
    tokens: int,
    text: int,
    policies: tuple[str, ...] = tuple(POLICIES),
    done: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """One row a policy. `tokens` of a reply where the cache is bounded, `text` tokens of text everywhere."""
    rows = []
    for name in policies:
        options = POLICIES[name]
        llm = load(options if name == "full" else {**options, "kv_budget": budget})
        (ids,) = passages(llm, 1, text)
        start = time.perf_counter()
        logprobs = tell(llm, ids, budget // 2)[budget - budget // 2 :]
        row: dict[str, Any] = {
            "policy": name,
            "perplexity": math.exp(-statistics.fmean(logprobs)),
            "text_s": time.perf_counter() - start,
            "kv_tokens": text if name == "full" else budget,
        }
        if name in ("sinks", "heavy") and tokens:
            row |= generate(llm, ids[: min(64, budget)], tokens, max(1, min(1000, tokens // 4)))
        rows.append(row)
        del llm
        gc.collect()
        done()
    for row in rows:
        row["ratio"] = row["perplexity"] / rows[0]["perplexity"]
    return rows
