"""Continuous batching against one request after another: same prompts, same engine, same tokens.

A decode step reads every weight once, however many sequences it serves. Batching saves these reads,
and the hardware limit shows how much it can save. Each repeat runs both sides and alternates which
side runs first, so that slow drift of the machine affects both sides equally. Faster disturbances
spoil the medians; the result reports them under `noise`.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.memory import weight_bytes
from octavo.model.layers import Embedding
from octavo.params import SamplingParams

STEADY = 1.25  # fastest over slowest of one side's repeats, on a machine that does nothing else
PROMPTS = (
    "The capital of France is",
    "The largest ocean on Earth is the",
    "Python is a programming language designed",
    "In 1969, the first humans landed on",
)


def encode(llm: LLM, prompts: tuple[str, ...] = PROMPTS) -> list[list[int]]:
    """Ids by the model's tokenizer; without one, a beginning-of-text id and one for each word: 6 to 8 ids a prompt."""
    if llm.tokenizer is not None:
        return [llm.tokenizer.encode(prompt) for prompt in prompts]
    vocabulary = llm.config.vocab_size
    first = llm.config.bos_id or 0
    return [
        [first, *(zlib.crc32(word.encode()) % vocabulary for word in prompt.split())]
        for prompt in prompts
    ]


def measure(
    llm: LLM, max_tokens: int = 32, repeat: int = 3, done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Measure tokens per second of both sides, the ratio of each repeat, and the hardware limit.

    Calls `done` after each of the 2 * (1 + repeat) runs."""
    prompts = encode(llm)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    def timed(batches: list[list[list[int]]]) -> tuple[float, list[list[int]]]:
        ids: list[list[int]] = []
        start = time.perf_counter()
        for batch in batches:
            for result in llm.generate(list(batch), params, use_tqdm=False):
                ids.append(result.outputs[0].token_ids)
                if len(ids[-1]) != max_tokens:
                    raise OctavoError(
                        f"{len(ids[-1])} of {max_tokens} tokens arrived ({result.error or 'no error'}): not counted"
                    )
        seconds = time.perf_counter() - start
        done()
        return sum(map(len, ids)) / seconds, ids

    def both(batched_first: bool) -> list[tuple[float, list[list[int]]]]:
        sides = [[[prompt] for prompt in prompts], [prompts]]
        return (
            [timed(side) for side in sides]
            if not batched_first
            else [timed(side) for side in sides[::-1]][::-1]
        )

    both(False)  # warm-up
    runs = [both(bool(i % 2)) for i in range(repeat)]
    sequential, batched = ([run[side][0] for run in runs] for side in (0, 1))
    ratios = [b / s for s, b in zip(sequential, batched, strict=True)]
    step_bytes = bytes_per_step(llm)
    bandwidth = copy_bandwidth(llm.device)
    return {
        "bench": "batching",
        "requests": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "repeat": repeat,
        "sequential_tok_s": spread(sequential),
        "batched_tok_s": spread(batched),
        "ratio": spread(ratios),
        "noise": noise(sequential, batched, ratios, len(prompts)),
        "same_tokens": all(one[1] == many[1] for one, many in runs),
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
    """Why these figures are not to be trusted; empty where nothing speaks against them."""
    found = []
    for name, values in (("one after another", sequential), ("batched", batched)):
        if max(values) > STEADY * min(values):
            found.append(f"{name} varied {max(values) / min(values):.1f}-fold between repeats")
    if max(ratios) > requests:
        found.append(
            f"a ratio of {max(ratios):.1f} is more than {requests} requests can gain: the sides met different conditions"
        )
    if len(ratios) < 3:
        found.append(f"{len(ratios)} repeats show no spread")
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bytes_per_step(llm: LLM) -> int:
    """Of weights that a decode step reads: all, but of an embedding that is not also the head only a row a sequence."""
    # of rotations: looked up too
    tables = sum(t.numel() * t.element_size() for t in llm.model.buffers(recurse=False))
    looked_up = [m for m in llm.model.modules() if isinstance(m, Embedding) and not llm.config.tied]
    return weight_bytes(llm.model) - tables - sum(map(weight_bytes, looked_up))


def copy_bandwidth(device: torch.device, size: int = 2**28, rounds: int = 5) -> float:
    """Bytes a second, read and written together, of the fastest of some copies: what the memory gives."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size / best
