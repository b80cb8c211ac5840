"""Decode steps of a CPU as one job: the same tokens and logprobs as the same steps op by op."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.ops.cpu.thread_pool import thread_pool
from octavo.runner.cpu_steps import CpuSteps
from tests import tiny

pytestmark = pytest.mark.skipif(thread_pool() is None, reason="the CPU kernels cannot run here")
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [40, 41, 42], list(range(60, 90)), [9]]
# With lanes of 16 numbers, the heads of the other tiny models are too small for the kernels.
ARCHITECTURES = ["qwen3", "gemma3"]


def make(architecture: str = "qwen3", **options: Any) -> LLM:
    settings: dict[str, Any] = {"quantization": "int8-g32", "max_model_len": 128, "max_num_seqs": 4}
    return LLM(tiny.model_dir(architecture), device="cpu", **(settings | options))


def run(llm: LLM, **sampling: Any) -> list[Any]:
    params = [
        SamplingParams(**{"seed": seed, "max_tokens": 10 + 3 * seed, "ignore_eos": True} | sampling)
        for seed in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def compare(
    options: dict[str, Any], *samplings: dict[str, Any], architecture: str = "qwen3"
) -> LLM:
    fused = make(architecture, **options)
    eager = make(architecture, enforce_eager=True, **options)
    assert isinstance(fused.runner.cpu_steps, CpuSteps)
    assert eager.runner.cpu_steps is None
    for sampling in samplings:
        assert run(fused, **sampling) == run(eager, **sampling), sampling
    return fused


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_way_to_sample_gives_the_same_tokens(architecture: str) -> None:
    compare(
        {},
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.7, "min_p": 0.01},
        {"temperature": 0.7, "logprobs": 3},
        {"temperature": 0.7, "repetition_penalty": 1.4, "min_tokens": 4},
        {"temperature": 0.7, "n": 2},
        architecture=architecture,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 3},
        {"num_gpu_blocks_override": 9, "block_size": 8},
        {"kv_cache_dtype": "int8"},
        {"max_num_batched_tokens": 6},
        {"kv_eviction": "sinks", "kv_budget": 32, "block_size": 8},
        {"swap_space": 1 / 1024, "num_gpu_blocks_override": 9, "block_size": 8},
    ],
    ids=str,
)
def test_every_option_gives_the_same_tokens(options: dict[str, Any]) -> None:
    compare(options, {"temperature": 0.0}, {"temperature": 0.9, "max_tokens": 40})


@pytest.mark.parametrize(
    "method", ["ngram,k=3,adaptive=no", "early_exit,layer=1,k=3,adaptive=no"], ids=str
)
def test_drafts_are_verified_in_the_same_way(method: str) -> None:
    fused = compare(
        {"speculative_config": method},
        {"temperature": 0.0, "max_tokens": 30},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.6, "logprobs": 2},
    )
    speculation = fused.engine.scheduler.speculation
    assert speculation is not None
    assert speculation.counters.drafted > 20


def test_drafts_of_a_long_text_have_the_logprobs_of_single_rows() -> None:
    """The rows of a sequence share its keys, over several segments of keys."""
    prompt = [5, 6, 7, 8] * 70 + [5, 6]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    results = []
    for speculative in ("off", "ngram,k=5,adaptive=no"):
        llm = make(max_model_len=512, speculative_config=speculative)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        results.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    assert speculation.counters.accepted > 3
    assert results[0] == results[1]


def test_a_row_without_a_finite_logit_ends_with_an_error() -> None:
    llm = make()
    llm.model.norm.fill_(float("nan"))
    outputs = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert "no finite logit" in str(outputs[0].error)
