"""What bounded KV costs and keeps: memory and speed over a long reply, and perplexity of a long text against a whole cache.

    full      the whole text is kept
    window    the latest tokens alone: kv_eviction sinks with no sinks
    sinks     the first block and the latest tokens
    heavy     the first block, the latest half, and of the rest what is attended to most

The text is that of octavo/bench/measure_quant.py. It is told to the engine token by token, as a reply that a guide allows nothing else to
be, so that what is measured is how replies are computed; with a whole cache that makes no difference, and it is one prompt.
Perplexity is over what follows the first `budget` tokens.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from octavo.bench.measure_quant import passages, quality
from octavo.bench.picture import Axis, Panel, Series, bars, points
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.params import SamplingParams
from octavo.types import Request

Done: TypeAlias = Callable[[int, int, str], None]  # so many of so many, and a note

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kv_eviction": "none"},
    "window": {"kv_eviction": "sinks", "kv_sinks": 0},
    "sinks": {"kv_eviction": "sinks"},
    "heavy": {"kv_eviction": "heavy"},
}


class Told:
    """A guide along a text that is known."""

    def __init__(self, ids: list[int], vocab_size: int, at: int = 0):
        self.ids = ids
        self.vocab_size = vocab_size
        self.at = at

    @property
    def mask(self) -> bytes:
        token = self.ids[self.at]
        return (1 << token).to_bytes(-(-self.vocab_size // 32) * 4, "little")

    def accept(self, token: int) -> None:
        self.at += 1

    def copy(self) -> Told:
        return Told(self.ids, self.vocab_size, self.at)


def tell(llm: LLM, ids: list[int], prompt: int, done: Done) -> list[float]:
    """Log-probabilities of the tokens after the first `prompt` ones."""
    rest = ids[prompt:]
    params = SamplingParams(
        max_tokens=len(rest), temperature=0, ignore_eos=True, logprobs=0, detokenize=False
    )
    llm.engine.add(Request("text", ids[:prompt], params, guide=Told(rest, llm.config.vocab_size)))
    found: list[float] = []
    while not llm.engine.idle:
        for out in llm.engine.step():
            if out.error:
                raise OctavoError(f"the text could not be told: {out.error}")
            found += [record.logprob for record in out.logprobs or []]
        if len(found) % 256 == 0:
            done(len(found), len(rest), "")
    if not set(llm.eos_ids).isdisjoint(rest) or len(found) != len(rest):
        raise OctavoError(
            f"{len(found)} log-probabilities arrived for {len(rest)} tokens: not counted"
        )
    return found


def rss_bytes() -> int:
    """Memory of this process that is in use; 0 where the system does not tell."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def generate(llm: LLM, prompt: list[int], tokens: int, every: int, done: Done) -> dict[str, Any]:
    """One long reply in parts of `every` tokens: tokens a second, the most blocks in use, and memory at each part's end."""
    params = SamplingParams(
        max_tokens=tokens, temperature=1, seed=0, ignore_eos=True, detokenize=False
    )
    llm.engine.add(Request("reply", prompt, params))
    scheduler = llm.engine.scheduler
    parts = list[dict[str, Any]]()
    count = 0
    most = 0
    told = 0
    pool = scheduler.pool
    dropped = scheduler.counters.dropped_blocks
    start = time.perf_counter()
    while not llm.engine.idle:
        count += sum(len(out.tokens) for out in llm.engine.step())
        most = max(most, pool.num_blocks - len(pool.free_blocks))
        if count - told >= every or (llm.engine.idle and count > told):
            now = time.perf_counter()
            part = {
                "tokens": count - told,
                "tok_s": (count - told) / (now - start),
                "blocks": most,
                "rss_bytes": rss_bytes(),
            }
            parts.append({**part, "kv_bytes": most * pool.block_size * llm.memory.kv_per_token})
            done(count, tokens, f"{parts[-1]['tok_s']:.0f} tok/s")
            start = time.perf_counter()
            most = 0
            told = count
    if count != tokens:
        raise OctavoError(f"{count} tokens arrived of {tokens}: not counted")
    return {"parts": parts, "dropped_blocks": scheduler.counters.dropped_blocks - dropped}


def flatness(parts: list[dict[str, Any]], budget: int) -> dict[str, Any]:
    """The first quarter of the parts that began with a full cache against the last one: speeds are medians, and what is left of
    the speed; memory is what was added in between."""
    starts = accumulate((part["tokens"] for part in parts), initial=0)
    full = [part for part, start in zip(parts, starts, strict=False) if start >= budget] or parts[
        -1:
    ]
    some = max(1, len(full) // 4)
    first, last = (
        statistics.median(part["tok_s"] for part in some_parts)
        for some_parts in (full[:some], full[-some:])
    )
    grown = {f"{name}_grown": full[-1][name] - full[0][name] for name in ("rss_bytes", "kv_bytes")}
    return {"first_tok_s": first, "last_tok_s": last, "speed_kept": last / first, **grown}


def measure(
    load: Callable[[dict[str, Any]], LLM],
    budget: int,
    tokens: int,
    text: int,
    policies: tuple[str, ...] = tuple(POLICIES),
    done: Callable[[str, int, int, str], None] = lambda what, count, of, note: None,
) -> list[dict[str, Any]]:
    """One row a policy. `tokens` of a reply where the cache is bounded, `text` tokens of text everywhere; 0: none. Says `done`
    how far it is with what."""
    rows = []
    for name in policies:
        options = POLICIES[name]
        llm = load(options if name == "full" else {**options, "kv_budget": budget})
        (ids,) = passages(llm, 1, max(text, budget))
        row: dict[str, Any] = {"policy": name, "kv_tokens": text if name == "full" else budget}
        if text:
            said = partial(done, f"{name}: text")
            start = time.perf_counter()
            logprobs = (
                quality(llm, [ids])[0] if name == "full" else tell(llm, ids, budget // 2, said)
            )
            row["perplexity"] = math.exp(-statistics.fmean(logprobs[budget - text :]))
            row["text_s"] = time.perf_counter() - start
        if name != "full" and tokens:
            found = generate(
                llm,
                ids[: min(64, budget)],
                tokens,
                max(1, min(1000, tokens // 4)),
                partial(done, f"{name}: reply"),
            )
            row |= found | flatness(found["parts"], budget)
        rows.append(row)
        del llm
        gc.collect()
    for row in rows if text else []:
        row["ratio"] = row["perplexity"] / rows[0]["perplexity"]
    return rows


def panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """What `measure` found: speed and memory along the reply, perplexity of the text."""
    replies = [row for row in rows if "parts" in row]

    def along(field: str, unit: float) -> list[Series]:
        found = []
        for row in replies:
            ends = accumulate(part["tokens"] for part in row["parts"])
            points = [
                (float(x), part[field] / unit) for x, part in zip(ends, row["parts"], strict=True)
            ]
            found.append(Series(row["policy"], points))
        return found

    reply = Axis("tokens of the reply", zero=True)
    shown = list[Panel]()
    if replies:
        shown.append(
            points(
                "Speed",
                along("tok_s", 1),
                reply,
                Axis("tokens a second", zero=True),
                joined=True,
                size=2,
            )
        )
        memory = Axis("MiB", zero=True)
        shown.append(
            points(
                "Memory of the process",
                along("rss_bytes", 2**20),
                reply,
                memory,
                joined=True,
                size=2,
            )
        )
    if "perplexity" in rows[0]:
        names = [row["policy"] for row in rows]
        values = {"": [row["perplexity"] for row in rows]}
        shown.append(bars("Perplexity of the text", names, values, "by what is kept"))
    return shown
