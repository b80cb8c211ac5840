"""Measures the throughput of whole workloads in tokens per second, with the hardware limit.

The limit follows from the memory bandwidth and the arithmetic rate of the device. Only token ids
that arrived are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from octavo.bench.measure_batching import bytes_per_step
from octavo.bench.picture import Axis, Panel, Series, bars, points
from octavo.bench.views import Result, ResultTable, ResultView
from octavo.bench.workloads import WORKLOADS, HardwareRates, Workload, least_work
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.memory import parameter_count
from octavo.model.layers import Linear
from octavo.params import SamplingParams
from octavo.process_usage import rss_bytes


def measure(
    llm: LLM, workload_names: list[str], repeat: int = 3, advance: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    return list(measure_rows(llm, workload_names, repeat, advance))


def measure_rows(
    llm: LLM, workload_names: list[str], repeat: int = 3, advance: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any]]:
    """Yield one row for each workload.

    The first run of each is a warm-up and does not count.
    """
    machine = measure_machine(llm)
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
        work = least_work(workload, llm.config, parameters, step_bytes, kv_bytes)
        limit = work.seconds(machine)
        yield {
            "workload": workload_name,
            "requests": len(workload.prompts),
            "unit": "prompt tok/s" if workload.counts_prompt else "tok/s",
            "tok_s": counted_tokens / statistics.median(seconds),
            "runs": [counted_tokens / elapsed for elapsed in seconds],
            "limit_tok_s": counted_tokens / limit,
            "of_limit": limit / statistics.median(seconds),
            "steps": steps / repeat,
            "host_ms_a_step": host_ms,
            "memory_bytes": peak_memory(llm),
            "work": {**work._asdict(), "seconds": statistics.median(seconds)},
            "machine": machine._asdict(),
        }


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


def peak_memory(llm: LLM) -> int:
    """Return the bytes that the process has on the device: the peak on a GPU, else its memory."""
    return torch.cuda.max_memory_allocated() if llm.device.type == "cuda" else rss_bytes()


# ---- view ----------------------------------------------------------------------------------------


def tables(result: Result) -> list[ResultTable]:
    columns = (
        *("workload", "requests", "median", "min - max"),
        *("hardware limit", "% of hardware limit", "memory, MiB"),
        "host ms per step: plan, launch, wait for the device, commit",
    )
    rows = [
        (
            row["workload"],
            str(row["requests"]),
            f"{row['tok_s']:,.0f} {row['unit']}",
            f"{min(row['runs']):,.0f} - {max(row['runs']):,.0f}",
            f"{row['limit_tok_s']:,.0f}",
            f"{row['of_limit']:.0%}",
            f"{row['memory_bytes'] / 2**20:,.0f}" if "memory_bytes" in row else "",
            ", ".join(f"{value:.2f}" for value in row["host_ms_a_step"].values()),
        )
        for row in rows_of(result)
    ]
    return [ResultTable(columns, rows)]


def rows_of(result: Result) -> list[dict[str, Any]]:
    """Return the rows. Older files call them results."""
    rows: list[dict[str, Any]] = result.get("rows") or result["results"]
    return rows


def panels(result: Result) -> list[Panel]:
    rows = rows_of(result)
    charts = [
        bars(
            f"{result['model'] or 'the embedded model'}: throughput and limit",
            [row["workload"] for row in rows],
            {
                "measured": [row["tok_s"] for row in rows],
                "hardware limit": [row["limit_tok_s"] for row in rows],
            },
            "tok/s",
        )
    ]
    if all("work" in row for row in rows):
        charts.append(roofline(rows))
    return charts


def roofline(rows: list[dict[str, Any]]) -> Panel:
    """Draw how fast each workload computes, below what memory and arithmetic allow."""
    machine = rows[0]["machine"]
    bandwidth = machine["bytes_per_second"]
    peak = machine["flops_per_second"]
    measured = [
        (
            row["work"]["flops"] / max(row["work"]["read_bytes"], 1.0),
            row["work"]["flops"] / row["work"]["seconds"] / 1e9,
        )
        for row in rows
    ]
    # The corner of the roof, and two decades to each side, or as far as there are points.
    corner = peak / bandwidth
    left = min([corner / 100, *(intensity / 2 for intensity, _ in measured)])
    right = max([corner * 100, *(2 * intensity for intensity, _ in measured)])
    roof = [
        (left, left * bandwidth / 1e9),
        (corner, peak / 1e9),
        (right, peak / 1e9),
    ]
    return points(
        "Roofline",
        [
            Series("what the hardware allows", roof),
            *(
                Series(row["workload"], [position], [row["workload"]])
                for row, position in zip(rows, measured, strict=True)
            ),
        ],
        Axis("arithmetic per byte read, FLOP/byte", is_logarithmic=True),
        Axis("GFLOP/s", is_logarithmic=True),
        connected=True,
    )


VIEW = ResultView(tables, panels)
