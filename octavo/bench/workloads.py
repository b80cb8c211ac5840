"""The workloads for comparisons between systems, as token ids.

The speed does not depend on the ids or on the weights, so the weights may be random.

    offline        256 requests with 100 to 1024 tokens in and out, uniform, as in nano-vllm
    single         one request, 128 tokens in, 256 out
    four           four short prompts, 32 tokens out: the gain of batching
    decode         256 requests, 16 tokens in, 512 out
    shared_prefix  256 requests that share 2,048 tokens and have 64 of their own, 64 out
    prefill        64 requests, 2,000 tokens in, 1 out; counted in prompt tokens
    long_prompts   32 requests, 3,800 tokens in, 250 out
    long_context   8 requests, 30,000 tokens in, 256 out
    batch16        16 requests, 200 tokens in, 256 out; batch32 and batch64 have 32 and 64 requests
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from octavo.config import ModelConfig


class Workload(NamedTuple):
    prompts: list[list[int]]
    outputs: list[int]  # tokens of each reply
    counts_prompt: bool = False  # the throughput counts prompt tokens instead of output tokens
    shared: int = 0  # tokens that all prompts share at the start


def _random_ids(generator: random.Random, count: int, vocab_size: int = 10000) -> list[int]:
    return [generator.randint(0, vocab_size) for _ in range(count)]


def offline(count: int = 256, shortest: int = 100, longest: int = 1024) -> Workload:
    generator = random.Random(0)
    prompts = [_random_ids(generator, generator.randint(shortest, longest)) for _ in range(count)]
    return Workload(prompts, [generator.randint(shortest, longest) for _ in range(count)])


def uniform(
    count: int, prompt_tokens: int, output_tokens: int, counts_prompt: bool = False
) -> Workload:
    generator = random.Random(2)
    return Workload(
        [_random_ids(generator, prompt_tokens) for _ in range(count)],
        [output_tokens] * count,
        counts_prompt,
    )


def shared_prefix(
    count: int = 256, prefix_tokens: int = 2048, suffix_tokens: int = 64, output_tokens: int = 64
) -> Workload:
    generator = random.Random(1)
    shared_ids = _random_ids(generator, prefix_tokens)
    return Workload(
        [shared_ids + _random_ids(generator, suffix_tokens) for _ in range(count)],
        [output_tokens] * count,
        shared=prefix_tokens,
    )


WORKLOADS = {
    "offline": offline,
    "single": lambda: uniform(1, 128, 256),
    "four": lambda: uniform(4, 8, 32),
    "decode": lambda: uniform(256, 16, 512),
    "shared_prefix": shared_prefix,
    "prefill": lambda: uniform(64, 2000, 1, counts_prompt=True),
    "long_prompts": lambda: uniform(32, 3800, 250),
    "long_context": lambda: uniform(8, 30000, 256),
    "batch16": lambda: uniform(16, 200, 256),
    "batch32": lambda: uniform(32, 200, 256),
    "batch64": lambda: uniform(64, 200, 256),
}


def longest_request(names: Iterable[str]) -> int:
    """Return the most tokens, prompt and reply, of a request in these workloads."""
    return max(
        len(prompt) + output
        for workload in (WORKLOADS[name]() for name in names)
        for prompt, output in zip(workload.prompts, workload.outputs, strict=True)
    )


class HardwareRates(NamedTuple):
    """The measured bandwidth and arithmetic rate of the device, which determine the limits."""

    bytes_per_second: float
    flops_per_second: float


class Work(NamedTuple):
    """The least work that a workload needs, however it is computed."""

    flops: float
    read_bytes: float

    def seconds(self, machine: HardwareRates) -> float:
        """Return the shortest time in which the hardware can do this work."""
        return self.flops / machine.flops_per_second + self.read_bytes / machine.bytes_per_second


def limit_seconds(
    workload: Workload,
    model_config: ModelConfig,
    parameters: int,
    step_bytes: int,
    kv_per_token: int,
    machine: HardwareRates,
) -> float:
    """Return the shortest time in which the hardware can run the workload."""
    return least_work(workload, model_config, parameters, step_bytes, kv_per_token).seconds(machine)


def least_work(
    workload: Workload,
    model_config: ModelConfig,
    parameters: int,
    step_bytes: int,
    kv_per_token: int,
) -> Work:
    """Return the work of a workload.

    Each prompt token is computed once with all parameters except the embedding and the head. Each
    step then reads the weights (`step_bytes`) and the KV of each sequence once. A shared prefix is
    computed once and read once per step.
    """
    lengths = [len(prompt) - workload.shared for prompt in workload.prompts]
    prompt_tokens = workload.shared + sum(lengths)
    attention_pairs = workload.shared**2 / 2 + sum(
        length * workload.shared + length * length / 2 for length in lengths
    )
    embedding_parameters = model_config.vocab_size * model_config.hidden_size
    if not model_config.tied:
        embedding_parameters *= 2
    layer_parameters = parameters - embedding_parameters
    attention_width = model_config.num_layers * model_config.num_heads * model_config.head_dim
    flops = 2 * layer_parameters * prompt_tokens + 4 * attention_width * attention_pairs
    read_bytes = 0.0
    for step in range(1, max(workload.outputs)):
        live_lengths = [
            length + step
            for length, output in zip(lengths, workload.outputs, strict=True)
            if output > step
        ]
        read_bytes += step_bytes + (workload.shared + sum(live_lengths)) * kv_per_token
    return Work(flops, read_bytes)
