"""What each format of weights or of KV costs and gains: memory, load time, speed, and how far its predictions are from full
precision.

The text is the language reference that comes with every Python (pydoc_data.topics): prose and code, the same everywhere but for
the version. Perplexity is over all its tokens but each passage's first; "top1" is how often the likeliest token is the same as
at full precision, "logprob_error" the root mean square difference of the text's log-probabilities.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from octavo.bench.measure_batching import spread
from octavo.bench.picture import Axis, Panel, Series, bars, points
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
if torch.cuda.is_available():  # only there they differ from int8, or are fast
    FORMATS += ("int8-a8", "fp8")
PROMPT = 128  # tokens, of which the time to the first token is measured
OUTPUT = 64


def passages(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Token ids of consecutive pieces of the text."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = llm.get_tokenizer().encode(text[: 12 * count * length])
    if len(ids) < count * length:
        raise OctavoError(
            f"the text has only {len(ids)} tokens: ask for fewer than {count} passages of {length}"
        )
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def quality(llm: LLM, texts: list[list[int]]) -> tuple[list[float], list[int]]:
    """Of every token but each passage's first: its log-probability, and which token was the likeliest instead."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    logprobs = []
    likeliest = []
    for text in texts:
        result = llm.generate([list(text)], params, use_tqdm=False)[0]
        for token, entry in zip(text[1:], (result.prompt_logprobs or [])[1:], strict=True):
            assert entry is not None
            logprobs.append(entry[token].logprob)
            likeliest.append(next(t for t, found in entry.items() if found.rank == 1))
    return logprobs, likeliest


def speed(llm: LLM, text: list[int], repeat: int) -> dict[str, Any]:
    """Seconds to the first token, and tokens a second of one request and of sixteen, the prompts' tokens not counted."""

    def seconds(count: int, tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        prompts = [text[i : i + PROMPT // count] for i in range(count)]
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - start
        if sum(len(r.outputs[0].token_ids) for r in results) != count * tokens:
            raise OctavoError("fewer tokens arrived than were asked for: not counted")
        return took

    seconds(1, 4)
    runs = [
        (seconds(1, 1), seconds(1, OUTPUT), seconds(16, 1), seconds(16, OUTPUT))
        for _ in range(repeat)
    ]
    return {
        "ttft_s": statistics.median(r[0] for r in runs),
        "single_tok_s": spread([(OUTPUT - 1) / (r[1] - r[0]) for r in runs]),
        "batch16_tok_s": spread([16 * (OUTPUT - 1) / (r[3] - r[2]) for r in runs]),
    }


def measure(
    load: Callable[[str], LLM],
    formats: tuple[str, ...] = FORMATS,
    repeat: int = 3,
    count: int = 8,
    length: int = 512,
    done: Callable[[str], None] = lambda name: None,
    plain: str = PLAIN,
) -> list[dict[str, Any]]:
    """One row a format, in order. `plain` is measured in any case, first: the others are compared with it."""
    rows: list[dict[str, Any]] = []
    base: tuple[list[float], list[int]] | None = None
    for name in dict.fromkeys((plain, *formats)):
        start = time.perf_counter()
        llm = load(name)
        took = time.perf_counter() - start
        texts = passages(llm, count, length)
        found = quality(llm, texts)
        base = base or found
        pairs = list(zip(found[0], base[0], strict=True))
        rows.append(
            {
                "format": name,
                "weight_bytes": llm.memory.weights,
                "bytes_per_weight": llm.memory.weights / parameter_count(llm.model),
                "kv_bytes_per_token": llm.memory.kv_per_token,
                "load_s": took,
                **speed(llm, texts[0], repeat),
                "perplexity": math.exp(-statistics.fmean(found[0])),
                "logprob_error": math.sqrt(statistics.fmean((a - b) ** 2 for a, b in pairs)),
                "top1": statistics.fmean(a == b for a, b in zip(found[1], base[1], strict=True)),
            }
        )
        rows[-1]["perplexity_ratio"] = rows[-1]["perplexity"] / rows[0]["perplexity"]
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        done(name)
    return rows


def panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """Bytes a weight against perplexity, and the speed of one request and of sixteen."""
    names = [row["format"] for row in rows]
    spots = [(row["bytes_per_weight"], row["perplexity_ratio"]) for row in rows]
    return [
        points(
            "Size and quality",
            [Series("", spots, names)],
            Axis("bytes a weight, scales included (left is better)", log=True),
            Axis(f"perplexity, relative to {names[0]} (down is better)"),
        ),
        bars(
            "One request",
            names,
            {"": [row["single_tok_s"]["median"] for row in rows]},
            "tok/s",
            380,
        ),
        bars(
            "Sixteen requests",
            names,
            {"": [row["batch16_tok_s"]["median"] for row in rows]},
            "tok/s",
            380,
        ),
    ]
