"""Measures memory, load time, speed and quality of each format of weights or of KV.

The text is the language reference that is part of every Python (pydoc_data.topics). It is prose and
code, and depends only on the version of Python. Perplexity is that of all tokens except the first
of each passage. "top1" is how often the likeliest token is the same as at full precision.
"logprob_error" is the root mean square difference of the log-probabilities of the text.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from octavo.bench.interleave import spread
from octavo.bench.picture import Axis, Panel, Series, bars, points
from octavo.bench.views import Result, ResultTable, ResultView
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.memory import parameter_count
from octavo.params import SamplingParams

PLAIN = "none"
KV_FORMATS = ("auto", "int8", "fp8")
FORMATS: tuple[str, ...] = (
    PLAIN,
    "auto",
    "int8",
    "int8-g32",
    "int4-g32-asym",
    "int4-g32",
    "int4-g64-asym",
    "int4-g64",
    "int4-g128",
)
if torch.cuda.is_available():  # On a CPU these formats are like int8, or slow.
    FORMATS += ("int8-a8", "fp8", "fp8-a16")
PROMPT = 128  # tokens of the prompt whose TTFT is measured
OUTPUT = 64


def passages(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Return the token ids of consecutive passages of the text."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    token_ids = llm.get_tokenizer().encode(text[: 12 * count * length])
    if len(token_ids) < count * length:
        raise OctavoError(
            f"the text has only {len(token_ids)} tokens: ask for fewer than {count} passages of "
            f"{length}"
        )
    return [token_ids[index * length : (index + 1) * length] for index in range(count)]


def quality(llm: LLM, passage_ids: list[list[int]]) -> tuple[list[float], list[int]]:
    """Return the log-probability of each token, and the token that was the likeliest.

    The first token of each passage is left out.
    """
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    logprobs = []
    likeliest = []
    for token_ids in passage_ids:
        result = llm.generate([list(token_ids)], params, use_tqdm=False)[0]
        prompt_logprobs = result.prompt_logprobs or []
        for token_id, candidates in zip(token_ids[1:], prompt_logprobs[1:], strict=True):
            assert candidates is not None
            logprobs.append(candidates[token_id].logprob)
            likeliest.append(
                next(candidate for candidate, entry in candidates.items() if entry.rank == 1)
            )
    return logprobs, likeliest


def speed(llm: LLM, token_ids: list[int], repeat: int) -> dict[str, Any]:
    """Measure the TTFT, and the decode tokens per second of one request and of sixteen."""

    def generate_seconds(count: int, tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        prompts = [token_ids[offset : offset + PROMPT // count] for offset in range(count)]
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        if sum(len(result.outputs[0].token_ids) for result in results) != count * tokens:
            raise OctavoError("fewer tokens arrived than requested, so the run does not count")
        return elapsed

    generate_seconds(1, 4)  # warm-up
    first_token = list[float]()
    single = list[float]()
    batch = list[float]()
    for _ in range(repeat):
        prefill_seconds = generate_seconds(1, 1)
        first_token.append(prefill_seconds)
        single.append((OUTPUT - 1) / (generate_seconds(1, OUTPUT) - prefill_seconds))
        prefill_seconds = generate_seconds(16, 1)
        batch.append(16 * (OUTPUT - 1) / (generate_seconds(16, OUTPUT) - prefill_seconds))
    return {
        "ttft_s": statistics.median(first_token),
        "single_tok_s": spread(single),
        "batch16_tok_s": spread(batch),
    }


def measure(
    load: Callable[[str], LLM],
    formats: tuple[str, ...] = FORMATS,
    repeat: int = 3,
    count: int = 8,
    length: int = 512,
    advance: Callable[[str], None] = lambda format_name: None,
    plain: str = PLAIN,
) -> Iterator[dict[str, Any]]:
    """Yield one row for each format.

    `plain` is always measured first, because the others are compared with it.
    """
    plain_perplexity: float | None = None
    plain_scores: tuple[list[float], list[int]] | None = None
    for format_name in dict.fromkeys((plain, *formats)):
        start = time.perf_counter()
        llm = load(format_name)
        load_seconds = time.perf_counter() - start
        token_ids = passages(llm, count, length)
        scores = quality(llm, token_ids)
        plain_scores = plain_scores or scores
        logprobs, likeliest = scores
        plain_logprobs, plain_likeliest = plain_scores
        squared_errors = [
            (logprob - plain_logprob) ** 2
            for logprob, plain_logprob in zip(logprobs, plain_logprobs, strict=True)
        ]
        agreements = [
            token_id == plain_id
            for token_id, plain_id in zip(likeliest, plain_likeliest, strict=True)
        ]
        perplexity = math.exp(-statistics.fmean(logprobs))
        plain_perplexity = plain_perplexity or perplexity
        row = {
            "format": format_name,
            "weight_bytes": llm.memory.weights,
            "bytes_per_weight": llm.memory.weights / parameter_count(llm.model),
            "kv_bytes_per_token": llm.memory.kv_per_token,
            "load_s": load_seconds,
            **speed(llm, token_ids[0], repeat),
            "perplexity": perplexity,
            "perplexity_ratio": perplexity / plain_perplexity,
            "logprob_error": math.sqrt(statistics.fmean(squared_errors)),
            "top1": statistics.fmean(agreements),
        }
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        advance(format_name)
        yield row


# ---- view ----------------------------------------------------------------------------------------

QUALITY = ("tok/s", "x16 tok/s", "perplexity", "ratio", "top-1", "logprob error")


def quality_cells(row: dict[str, Any], digits: int) -> tuple[str, ...]:
    """Return speed and quality of one format, as the columns QUALITY name them."""
    return (
        f"{row['single_tok_s']['median']:.0f}",
        f"{row['batch16_tok_s']['median']:.0f}",
        f"{row['perplexity']:.{digits}f}",
        f"{row['perplexity_ratio']:.{digits + 1}f}",
        f"{row['top1']:.1%}",
        f"{row['logprob_error']:.{digits}f}",
    )


def tables(result: Result) -> list[ResultTable]:
    columns = ("format", "weights, MiB", "bytes each", "load s", "ttft ms", *QUALITY)
    rows = [
        (
            row["format"],
            f"{row['weight_bytes'] / 2**20:,.0f}",
            f"{row['bytes_per_weight']:.2f}",
            f"{row['load_s']:.1f}",
            f"{row['ttft_s'] * 1e3:.0f}",
            *quality_cells(row, digits=3),
        )
        for row in result["rows"]
    ]
    return [ResultTable(columns, rows)]


def kv_tables(result: Result) -> list[ResultTable]:
    columns = ("KV", "bytes a token", "of auto", *QUALITY)
    rows = [
        (
            row["format"],
            f"{row['kv_bytes_per_token']:,}",
            f"{row['kv_bytes_per_token'] / result['rows'][0]['kv_bytes_per_token']:.3f}",
            *quality_cells(row, digits=4),
        )
        for row in result["rows"]
    ]
    return [ResultTable(columns, rows)]


def panels(result: Result) -> list[Panel]:
    """Draw bytes per weight against perplexity, and the speed of one request and of sixteen."""
    results = result["rows"]
    format_names = [row["format"] for row in results]
    positions = [(row["bytes_per_weight"], row["perplexity_ratio"]) for row in results]
    return [
        points(
            "Size and quality",
            [Series("", positions, format_names)],
            Axis("bytes per weight, including scales (left is better)", is_logarithmic=True),
            Axis(f"perplexity, relative to {format_names[0]} (down is better)"),
        ),
        bars(
            "One request",
            format_names,
            {"": [row["single_tok_s"]["median"] for row in results]},
            "tok/s",
            380,
        ),
        bars(
            "Sixteen requests",
            format_names,
            {"": [row["batch16_tok_s"]["median"] for row in results]},
            "tok/s",
            380,
        ),
    ]


def kv_panels(result: Result) -> list[Panel]:
    """Draw only the speeds: KV formats do not change the weights."""
    return panels(result)[1:]


VIEW = ResultView(tables, panels)
KV_VIEW = ResultView(kv_tables, kv_panels)
