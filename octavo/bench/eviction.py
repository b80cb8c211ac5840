"""Measures bounded KV: memory and speed over a long reply, and perplexity of a long text.

    full      keeps the whole text
    window    keeps the latest tokens: kv_eviction sinks without sinks
    sinks     keeps the first block and the latest tokens
    heavy     keeps the first block, the latest half, and the most attended of the other tokens

The text is that of octavo/bench/measure_quant.py. A guide forces the engine to generate it token by
token, so the bench measures how replies are computed. With a full cache this makes no difference,
and the text is one prompt. The perplexity is that of the tokens after the first `budget` ones.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

from octavo.bench.measure_quant import passages, quality
from octavo.bench.picture import Axis, Panel, Series, bars, points
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.params import SamplingParams
from octavo.process_usage import rss_bytes
from octavo.text.replay_guide import ReplayGuide
from octavo.types import Request

Advance: TypeAlias = Callable[[int, int, str], None]  # (completed, total, note)

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kv_eviction": "none"},
    "window": {"kv_eviction": "sinks", "kv_sinks": 0},
    "sinks": {"kv_eviction": "sinks"},
    "heavy": {"kv_eviction": "heavy"},
}


def force_text(llm: LLM, token_ids: list[int], prompt_length: int, advance: Advance) -> list[float]:
    """Return the log-probabilities of the tokens after the first `prompt_length` ones."""
    forced_ids = token_ids[prompt_length:]
    params = SamplingParams(
        max_tokens=len(forced_ids), temperature=0, ignore_eos=True, logprobs=0, detokenize=False
    )
    llm.engine.add(
        Request(
            "text",
            token_ids[:prompt_length],
            params,
            guide=ReplayGuide(forced_ids, llm.config.vocab_size),
        )
    )
    logprobs: list[float] = []
    while not llm.engine.idle:
        for output in llm.engine.step():
            if output.error:
                raise OctavoError(f"the text could not be computed: {output.error}")
            logprobs += [record.logprob for record in output.logprobs or []]
        if len(logprobs) % 256 == 0:
            advance(len(logprobs), len(forced_ids), "")
    if not set(llm.eos_ids).isdisjoint(forced_ids) or len(logprobs) != len(forced_ids):
        raise OctavoError(
            f"{len(logprobs)} log-probabilities arrived for {len(forced_ids)} tokens, so the run "
            "does not count"
        )
    return logprobs


def generate(
    llm: LLM, prompt: list[int], tokens: int, segment_tokens: int, advance: Advance
) -> dict[str, Any]:
    """Generate one long reply and record speed, peak blocks and memory of each segment."""
    params = SamplingParams(
        max_tokens=tokens, temperature=1, seed=0, ignore_eos=True, detokenize=False
    )
    llm.engine.add(Request("reply", prompt, params))
    scheduler = llm.engine.scheduler
    segments = list[dict[str, Any]]()
    generated = 0
    peak_blocks = 0
    reported = 0
    pool = scheduler.pool
    dropped_before = scheduler.counters.dropped_blocks
    segment_start = time.perf_counter()
    while not llm.engine.idle:
        generated += sum(len(output.tokens) for output in llm.engine.step())
        peak_blocks = max(peak_blocks, pool.num_blocks - pool.num_available)
        if generated - reported >= segment_tokens or (llm.engine.idle and generated > reported):
            now = time.perf_counter()
            segments.append(
                {
                    "tokens": generated - reported,
                    "tok_s": (generated - reported) / (now - segment_start),
                    "blocks": peak_blocks,
                    "rss_bytes": rss_bytes(),
                    "kv_bytes": peak_blocks * pool.block_size * llm.memory.kv_per_token,
                }
            )
            advance(generated, tokens, f"{segments[-1]['tok_s']:.0f} tok/s")
            segment_start = time.perf_counter()
            peak_blocks = 0
            reported = generated
    if generated != tokens:
        raise OctavoError(f"{generated} of {tokens} tokens arrived, so the run does not count")
    return {"parts": segments, "dropped_blocks": scheduler.counters.dropped_blocks - dropped_before}


def flatness(segments: list[dict[str, Any]], budget: int) -> dict[str, Any]:
    """Compare the first and the last quarter of the segments that began with a full cache.

    Speeds are medians. `speed_kept` is the ratio of the last to the first. Memory is the growth
    between the first and the last of these segments.
    """
    segment_starts = accumulate((segment["tokens"] for segment in segments), initial=0)
    full_segments = [
        segment
        for segment, segment_start in zip(segments, segment_starts, strict=False)
        if segment_start >= budget
    ]
    full_segments = full_segments or segments[-1:]
    quarter = max(1, len(full_segments) // 4)
    first_speed = statistics.median(segment["tok_s"] for segment in full_segments[:quarter])
    last_speed = statistics.median(segment["tok_s"] for segment in full_segments[-quarter:])
    growth = {
        f"{name}_grown": full_segments[-1][name] - full_segments[0][name]
        for name in ("rss_bytes", "kv_bytes")
    }
    return {
        "first_tok_s": first_speed,
        "last_tok_s": last_speed,
        "speed_kept": last_speed / first_speed,
        **growth,
    }


def measure(
    load: Callable[[dict[str, Any]], LLM],
    budget: int,
    tokens: int,
    text: int,
    policies: tuple[str, ...] = tuple(POLICIES),
    advance: Callable[[str, int, int, str], None] = lambda what, count, total, note: None,
) -> list[dict[str, Any]]:
    """Return one result for each policy.

    `tokens` is the length of the reply with a bounded cache, and `text` the length of the text with
    every policy. 0 skips the measurement. `advance` gets (description, completed, total, note).
    """
    results = []
    for policy in policies:
        options = POLICIES[policy]
        llm = load(options if policy == "full" else {**options, "kv_budget": budget})
        (token_ids,) = passages(llm, 1, max(text, budget))
        result: dict[str, Any] = {
            "policy": policy,
            "kv_tokens": text if policy == "full" else budget,
        }
        if text:
            advance_text = partial(advance, f"{policy}: text")
            start = time.perf_counter()
            if policy == "full":
                logprobs = quality(llm, [token_ids])[0]
            else:
                logprobs = force_text(llm, token_ids, budget // 2, advance_text)
            result["perplexity"] = math.exp(-statistics.fmean(logprobs[budget - text :]))
            result["text_s"] = time.perf_counter() - start
        if policy != "full" and tokens:
            reply = generate(
                llm,
                token_ids[: min(64, budget)],
                tokens,
                max(1, min(1000, tokens // 4)),
                partial(advance, f"{policy}: reply"),
            )
            result |= reply | flatness(reply["parts"], budget)
        results.append(result)
        del llm
        gc.collect()
    for result in results if text else []:
        result["ratio"] = result["perplexity"] / results[0]["perplexity"]
    return results


def panels(results: list[dict[str, Any]]) -> list[Panel]:
    """Draw speed and memory along the reply, and the perplexity of the text."""
    replies = [result for result in results if "parts" in result]

    def series_of(field: str, unit: float) -> list[Series]:
        series = []
        for result in replies:
            segment_ends = accumulate(segment["tokens"] for segment in result["parts"])
            curve = [
                (float(end), segment[field] / unit)
                for end, segment in zip(segment_ends, result["parts"], strict=True)
            ]
            series.append(Series(result["policy"], curve))
        return series

    reply_axis = Axis("tokens of the reply", starts_at_zero=True)
    charts = list[Panel]()
    if replies:
        charts.append(
            points(
                "Speed",
                series_of("tok_s", 1),
                reply_axis,
                Axis("tokens a second", starts_at_zero=True),
                connected=True,
                mark_size=2,
            )
        )
        memory_axis = Axis("MiB", starts_at_zero=True)
        charts.append(
            points(
                "Memory of the process",
                series_of("rss_bytes", 2**20),
                reply_axis,
                memory_axis,
                connected=True,
                mark_size=2,
            )
        )
    if "perplexity" in results[0]:
        names = [result["policy"] for result in results]
        values = {"": [result["perplexity"] for result in results]}
        charts.append(bars("Perplexity of the text", names, values, "by what is kept"))
    return charts
