"""Measures the throughput of whole workloads in tokens per second, with the hardware limit.

The limit follows from the memory bandwidth and the arithmetic rate of the device. Only token ids
that arrived are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from octavo.bench.measure_batching import bytes_per_step
from octavo.bench.workloads import WORKLOADS, HardwareRates, Workload, limit_seconds
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.memory import parameter_count
from octavo.model.layers import Linear
from octavo.params import SamplingParams


def measure(
    llm: LLM, workload_names: list[str], repeat: int = 3, advance: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Return one record for each workload.

    The first run of each is a warm-up and does not count.
    """
    machine = measure_machine(llm)
    results = []
    for workload_name in workload_names:
        workload = WORKLOADS[workload_name]()
        run(llm, workload)
        advance()
        seconds = []
        times_before = _host_time(llm)
        for _ in range(repeat):
            seconds.append(run(llm, workload))
            advance()
        steps, *phase_times = (
            later - earlier for earlier, later in zip(times_before, _host_time(llm), strict=True)
        )
        phases = ("plan", "launch", "wait", "commit")
        host_ms = {
            phase: 1e3 * phase_time / steps
            for phase, phase_time in zip(phases, phase_times, strict=True)
        }
        counted_tokens = sum(workload.outputs)
        if workload.counts_prompt:
            counted_tokens = sum(map(len, workload.prompts))
        parameters = parameter_count(llm.model)
        step_bytes = bytes_per_step(llm)
        kv_bytes = llm.memory.kv_per_token
        limit = limit_seconds(workload, llm.config, parameters, step_bytes, kv_bytes, machine)
        results.append(
            {
                "workload": workload_name,
                "requests": len(workload.prompts),
                "unit": "prompt tok/s" if workload.counts_prompt else "tok/s",
                "tok_s": counted_tokens / statistics.median(seconds),
                "runs": [counted_tokens / elapsed for elapsed in seconds],
                "limit_tok_s": counted_tokens / limit,
                "of_limit": limit / statistics.median(seconds),
                "steps": steps / repeat,
                "host_ms_a_step": host_ms,
            }
        )
    return results


def run(llm: LLM, workload: Workload) -> float:
    """Return the seconds of the workload. The prefix cache is empty at the start."""
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output_tokens, detokenize=False)
        for output_tokens in workload.outputs
    ]
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    arrived = sum(len(output.outputs[0].token_ids) for output in outputs)
    if arrived != sum(workload.outputs):
        error = next((output.error for output in outputs if output.error), "no error")
        raise OctavoError(
            f"{arrived} of {sum(workload.outputs)} tokens arrived ({error}), so the run does not "
            "count"
        )
    return seconds


def measure_machine(llm: LLM) -> HardwareRates:
    """Measure memory bandwidth and arithmetic rate of the device.

    The bandwidth is that of a large copy, with bytes read and written. The arithmetic rate is that
    of a large matrix product in the dtype of the model, or that of the engine's kernel with one of
    the model's matrices if it is faster, as it is with 8-bit numbers.
    """
    is_cuda = llm.device.type == "cuda"
    copy_elements = 2**29 if is_cuda else 2**26
    matrix_size = 8192 if is_cuda else 1024
    source = torch.empty(copy_elements, dtype=torch.bfloat16, device=llm.device)
    target = torch.empty_like(source)
    left, right = (
        torch.randn(matrix_size, matrix_size, device=llm.device).to(llm.model_dtype)
        for _ in range(2)
    )
    copy_seconds = _best_seconds(lambda: target.copy_(source), is_cuda)
    product_seconds = _best_seconds(lambda: left @ right, is_cuda)
    plain_flops = 2 * matrix_size**3 / product_seconds
    return HardwareRates(
        bytes_per_second=2 * source.nbytes / copy_seconds,
        flops_per_second=max(plain_flops, _kernel_flops_per_second(llm, is_cuda)),
    )


@torch.inference_mode()
def _kernel_flops_per_second(llm: LLM, is_cuda: bool, rows: int = 512) -> float:
    """Return the arithmetic rate of the engine's kernel with the widest matrix of a layer."""
    linears = [
        module
        for module in llm.model.modules()
        if isinstance(module, Linear) and "lm_head" not in module.parts
    ]
    if not linears:
        return 0.0
    widest_linear = max(linears, key=lambda module: sum(module.parts.values()))
    activations = torch.randn(rows, llm.config.hidden_size, device=llm.device).to(llm.model_dtype)
    outputs = sum(widest_linear.parts.values())
    flops = 2 * rows * llm.config.hidden_size * outputs
    return flops / _best_seconds(lambda: widest_linear(activations), is_cuda)


def _best_seconds(operation: Callable[[], Any], is_cuda: bool, repeat: int = 5) -> float:
    elapsed_times = []
    for _ in range(repeat + 1):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        operation()
        if is_cuda:
            torch.cuda.synchronize()
        elapsed_times.append(time.perf_counter() - start)
    return min(elapsed_times[1:])


def _host_time(llm: LLM) -> tuple[float, ...]:
    host_time = llm.engine.host_time
    return host_time.plans, host_time.plan, host_time.launch, host_time.wait, host_time.commit
