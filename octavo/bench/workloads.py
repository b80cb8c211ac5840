"""The workloads that systems are compared on, as token ids: speed does not depend on what random weights say.

offline        256 requests, prompt and output lengths uniform in 100..1024: nano-vllm's published one
single         one request, 128 in, 256 out
four           four short prompts, 32 out: what batching is worth
decode         256 requests of 16 in, 512 out
shared_prefix  256 requests that share 2,048 tokens and have 64 of their own, 64 out
prefill        64 requests of 2,000 in, 1 out; counted in prompt tokens
"""

from __future__ import annotations

import random
from typing import NamedTuple

from octavo.config import ModelConfig


class Workload(NamedTuple):
    prompts: list[list[int]]
    outputs: list[int]  # tokens of each
    counts_prompt: bool = False  # prompt tokens are what is counted
    shared: int = 0  # tokens that all prompts begin with


def _ids(rng: random.Random, count: int, vocab: int = 10000) -> list[int]:
    return [rng.randint(0, vocab) for _ in range(count)]


def offline(n: int = 256, low: int = 100, high: int = 1024) -> Workload:
    rng = random.Random(0)
    prompts = [_ids(rng, rng.randint(low, high)) for _ in range(n)]
    return Workload(prompts, [rng.randint(low, high) for _ in range(n)])


def uniform(n: int, prompt: int, output: int, counts_prompt: bool = False) -> Workload:
    rng = random.Random(2)
    return Workload([_ids(rng, prompt) for _ in range(n)], [output] * n, counts_prompt)


def shared_prefix(n: int = 256, prefix: int = 2048, tail: int = 64, output: int = 64) -> Workload:
    rng = random.Random(1)
    head = _ids(rng, prefix)
    return Workload([head + _ids(rng, tail) for _ in range(n)], [output] * n, shared=prefix)


WORKLOADS = {
    "offline": offline,
    "single": lambda: uniform(1, 128, 256),
    "four": lambda: uniform(4, 8, 32),
    "decode": lambda: uniform(256, 16, 512),
    "shared_prefix": shared_prefix,
    "prefill": lambda: uniform(64, 2000, 1, counts_prompt=True),
}


class Machine(NamedTuple):
    """Measured bandwidth and arithmetic rate of the device, from which limits are computed."""

    bytes_per_second: float
    flops_per_second: float


def limit_seconds(
    load: Workload,
    model: ModelConfig,
    parameters: int,
    step_bytes: int,
    kv_per_token: int,
    machine: Machine,
) -> float:
    """The shortest time in which the hardware can run the workload.

    Each prompt token is computed once with all parameters except the embedding and the head. Each
    step then reads the weights (`step_bytes`) and the KV of each sequence once. A shared prefix is
    computed once and read once per step."""
    lengths = [len(prompt) - load.shared for prompt in load.prompts]
    tokens = load.shared + sum(lengths)
    pairs = load.shared**2 / 2 + sum(n * load.shared + n * n / 2 for n in lengths)
    body = parameters - (1 if model.tied else 2) * model.vocab_size * model.hidden_size
    flops = 2 * body * tokens + 4 * model.num_layers * model.num_heads * model.head_dim * pairs
    read = 0.0
    for step in range(1, max(load.outputs)):
        live = [n + step for n, out in zip(lengths, load.outputs, strict=True) if out > step]
        read += step_bytes + (load.shared + sum(live)) * kv_per_token
    return flops / machine.flops_per_second + read / machine.bytes_per_second
