"""Compares continuous batching with one request after another: same prompts, engine and tokens.

A decode step reads every weight once, however many sequences it serves. Batching saves these reads,
and the hardware limit shows how much it can save. Each repeat runs both sides and alternates which
side runs first, so that slow drift of the machine affects both sides equally. Faster disturbances
distort the medians; the result reports them under `noise`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from octavo.bench.interleave import MAX_VARIATION, spread
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.memory import weight_bytes
from octavo.model.layers import Embedding
from octavo.params import SamplingParams

PROMPTS = (
    "The capital of France is",
    "The largest ocean on Earth is the",
    "Python is a programming language designed",
    "In 1969, the first humans landed on",
)


def encode(llm: LLM, prompts: tuple[str, ...] = PROMPTS) -> list[list[int]]:
    """Return the ids of the prompts.

    Without a tokenizer, a prompt has a BOS id and one id for each word: 6 to 8 ids.
    """
    if llm.tokenizer is not None:
        return [llm.tokenizer.encode(prompt) for prompt in prompts]
    vocabulary = llm.config.vocab_size
    first_id = llm.config.bos_id or 0
    return [
        [first_id, *(zlib.crc32(word.encode()) % vocabulary for word in prompt.split())]
        for prompt in prompts
    ]


class TimedRun(NamedTuple):
    tokens_per_second: float
    token_ids: list[list[int]]


def timed_run(llm: LLM, batches: list[list[list[int]]], max_tokens: int) -> TimedRun:
    """Generate one batch of prompts after the other."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    token_ids: list[list[int]] = []
    start = time.perf_counter()
    for batch in batches:
        for result in llm.generate(list(batch), params, use_tqdm=False):
            token_ids.append(result.outputs[0].token_ids)
            if len(token_ids[-1]) != max_tokens:
                raise OctavoError(
                    f"{len(token_ids[-1])} of {max_tokens} tokens arrived "
                    f"({result.error or 'no error'}), so the run does not count"
                )
    seconds = time.perf_counter() - start
    return TimedRun(sum(map(len, token_ids)) / seconds, token_ids)


def measure(
    llm: LLM, max_tokens: int = 32, repeat: int = 3, advance: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Measure tokens per second of both sides, the ratio of each repeat, and the hardware limit.

    `advance` is called after each of the 2 * (1 + repeat) runs.
    """
    prompts = encode(llm)

    def run_both_sides(batched_first: bool) -> list[TimedRun]:
        sides = [[[prompt] for prompt in prompts], [prompts]]
        runs = []
        for side in reversed(sides) if batched_first else sides:
            runs.append(timed_run(llm, side, max_tokens))
            advance()
        return runs[::-1] if batched_first else runs

    run_both_sides(False)  # warm-up
    runs = [run_both_sides(bool(round_index % 2)) for round_index in range(repeat)]
    sequential_speeds = [sequential_run.tokens_per_second for sequential_run, _ in runs]
    batched_speeds = [batched_run.tokens_per_second for _, batched_run in runs]
    ratios = [
        batched_speed / sequential_speed
        for sequential_speed, batched_speed in zip(sequential_speeds, batched_speeds, strict=True)
    ]
    step_bytes = bytes_per_step(llm)
    bandwidth = copy_bandwidth(llm.device)
    return {
        "bench": "batching",
        "requests": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "repeat": repeat,
        "sequential_tok_s": spread(sequential_speeds),
        "batched_tok_s": spread(batched_speeds),
        "ratio": spread(ratios),
        "noise": noise(sequential_speeds, batched_speeds, ratios, len(prompts)),
        "same_tokens": all(
            sequential_run.token_ids == batched_run.token_ids
            for sequential_run, batched_run in runs
        ),
        "step_bytes": step_bytes,
        "bandwidth_bytes_s": bandwidth,
        "limit_step_s": step_bytes / bandwidth,
        "limit_sequential_tok_s": bandwidth / step_bytes,
        "limit_batched_tok_s": len(prompts) * bandwidth / step_bytes,
        "device": llm.device.type,
        "dtype": str(llm.model_dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def noise(
    sequential: list[float], batched: list[float], ratios: list[float], requests: int
) -> list[str]:
    """Return why the figures are not reliable. An empty list means that no problem was found."""
    problems = []
    for side, speeds in (("one after another", sequential), ("batched", batched)):
        if max(speeds) > MAX_VARIATION * min(speeds):
            problems.append(f"{side} varied {max(speeds) / min(speeds):.1f}-fold between repeats")
    if max(ratios) > requests:
        problems.append(
            f"a ratio of {max(ratios):.1f} is more than {requests} requests can gain, so the two "
            "sides ran under different conditions"
        )
    if len(ratios) < 3:
        problems.append(f"{len(ratios)} repeats are too few to show the spread")
    return problems


def bytes_per_step(llm: LLM) -> int:
    """Return the bytes of weights that a decode step reads.

    A step reads all weights, but only one row for each sequence of an embedding that is not also
    the head. The embedding is not counted then.
    """
    # The tables of rotary embeddings are looked up too.
    buffer_bytes = sum(
        buffer.numel() * buffer.element_size() for buffer in llm.model.buffers(recurse=False)
    )
    embeddings = [
        module
        for module in llm.model.modules()
        if isinstance(module, Embedding) and not llm.config.tied
    ]
    return weight_bytes(llm.model) - buffer_bytes - sum(map(weight_bytes, embeddings))


def copy_bandwidth(device: torch.device, copy_bytes: int = 2**28, rounds: int = 5) -> float:
    """Return the bytes per second, read and written together, of the fastest of some copies."""
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_seconds = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return 2 * copy_bytes / best_seconds
