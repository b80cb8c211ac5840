"""resolve(): every default and every size from the options and plain facts, without a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.assemble import DeviceFacts, ModelFacts, Resolved, require, resolve
from octavo.config import ModelConfig
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest, NotEnoughMemory
from octavo.memory import PIGGYBACK_TOKENS, STAGING

GIB = 2**30
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32_000,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    max_position=8192,
)
MODEL = ModelFacts(
    config=CONFIG,
    parameters=8 * 10**9,
    weights=16 * 10**9,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    kv_dtypes=("bfloat16", "int8", "fp8"),
    moves_keys=True,
)
GPU = DeviceFacts(kind="cuda", free=60 * GIB, total=80 * GIB, host_free=100 * GIB, graphs=True)
CPU = DeviceFacts(kind="cpu", free=60 * GIB, total=80 * GIB, host_free=60 * GIB)


def resolved(device: DeviceFacts = GPU, model: ModelFacts = MODEL, **options: Any) -> Resolved:
    return resolve(EngineOptions(**options), model, device)


def test_defaults_depend_on_the_device() -> None:
    gpu, cpu = resolved(GPU), resolved(CPU)
    assert (gpu.cache.block_size, cpu.cache.block_size) == (64, 16)
    assert (gpu.schedule.depth, cpu.schedule.depth) == (2, 1)
    assert gpu.schedule.piggyback_tokens == PIGGYBACK_TOKENS and cpu.schedule.piggyback_tokens == 0
    assert (gpu.schedule.max_num_batched_tokens, cpu.schedule.max_num_batched_tokens) == (
        8192,
        2048,
    )
    assert gpu.schedule.max_model_len == CONFIG.max_position


@pytest.mark.parametrize(("policy", "depth"), [("fair", 2), ("priority", 1), ("deadline", 1)])
def test_a_policy_that_preempts_has_one_step_in_flight(policy: str, depth: int) -> None:
    assert resolved(scheduling_policy=policy).schedule.depth == depth
    assert resolved(scheduling_policy=policy, depth=3).schedule.depth == 3


def test_the_pool_gets_the_memory_that_weights_activations_and_reserve_leave() -> None:
    plain = resolved(max_num_seqs=10_000)
    used = GPU.total - GPU.free
    available = int(0.9 * GPU.total) - used - plain.memory.activations
    assert 0 <= available - plain.memory.kv < plain.memory.block_bytes
    offloads = resolved(max_num_seqs=10_000, swap_space=8)
    staging = plain.memory.kv - offloads.memory.kv
    assert abs(staging - STAGING["cuda"]) < plain.memory.block_bytes
    assert offloads.memory.host == offloads.cache.host_blocks * offloads.cache.block_bytes


@pytest.mark.parametrize("option", ["enforce_eager", "kv_canary"])
def test_without_graphs_their_memory_is_not_reserved(option: str) -> None:
    with_graphs = require(EngineOptions(), MODEL, GPU)
    without = require(EngineOptions(**{option: True}), MODEL, GPU)
    assert with_graphs.graphs and not without.graphs
    assert without.activations < with_graphs.activations


def test_a_kv_dtype_that_the_kernels_do_not_read_is_refused() -> None:
    assert resolved(kv_cache_dtype="int8").requirements.kv_dtype == "int8"
    with pytest.raises(
        InvalidRequest, match="this device read bfloat16, int8, fp8. Use one of these"
    ):
        resolved(kv_cache_dtype="float16")


def test_bounded_kv_needs_keys_that_can_be_moved() -> None:
    assert resolved(kv_eviction="sinks").cache.kv_budget == 1024
    with pytest.raises(InvalidRequest, match="its positions are learned"):
        resolved(model=replace(MODEL, moves_keys=False), kv_eviction="sinks")
    with pytest.raises(InvalidRequest, match="compressed keys would lose"):
        resolved(kv_eviction="sinks", kv_cache_dtype="int8")


def test_on_a_cpu_the_pool_and_the_host_tier_share_the_memory() -> None:
    pool = resolved(CPU).memory.kv
    largest = (CPU.host_free - pool) / GIB
    assert resolved(CPU, swap_space=largest - 0.1).memory.host > 0
    with pytest.raises(NotEnoughMemory, match="GiB of memory that are left"):
        resolved(CPU, swap_space=largest + 0.1)
    with pytest.raises(NotEnoughMemory, match="--num-blocks"):
        resolved(CPU, num_gpu_blocks_override=10**8)
