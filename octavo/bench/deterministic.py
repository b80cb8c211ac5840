"""Measures what batch-invariant kernels cost.

Two engines with the same weights run the same workloads in turn. One of them has the option
`deterministic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from octavo.bench.ablation import bound_kv_pool
from octavo.bench.interleave import interleave, is_noisy, ratios, spread
from octavo.bench.model_shapes import load_shape
from octavo.bench.picture import Panel, bars
from octavo.bench.result_file import BenchRun
from octavo.bench.throughput import run as run_workload
from octavo.bench.views import Result, ResultTable, ResultView, spread_text
from octavo.bench.workloads import WORKLOADS, Workload
from octavo.engine_options import EngineOptions
from octavo.llm import LLM

# The number of tokens whose KV fits into the pool of each engine. The workload `offline` has up to
# 280,000 tokens at once, whose KV takes 36 GiB for Llama-8B in each of the two engines.
KV_TOKENS = {"cpu": 32 * 1024, "cuda": 288 * 1024}
SIDES = {"plain": False, "deterministic": True}


def run_deterministic(
    run: BenchRun,
    model: str | None,
    options: EngineOptions,
    names: Sequence[str],
    rounds: int = 3,
    advance: Callable[[str], None] = lambda name: None,
) -> None:
    """Measure workloads on a model, or on random weights if `model` names a shape."""
    options = bound_kv_pool(options, KV_TOKENS)
    engines: dict[str, LLM] = {}
    for side, deterministic in SIDES.items():
        engines[side] = load_shape(replace(options, deterministic=deterministic), model)
        engines[side].warm_up()
    plain = engines["plain"]
    run.set_fact(
        device=plain.device.type,
        dtype=str(plain.model_dtype).removeprefix("torch."),
    )
    for name in names:
        advance(name)
        run.add_row(**measure(engines, name, rounds))
    run.set_fact(library_rows=library_rows(engines["deterministic"]))


def measure(engines: dict[str, LLM], name: str, rounds: int) -> dict[str, Any]:
    """Return the row of a workload. The first run of each side is a warm-up and does not count."""
    workload = WORKLOADS[name]()
    counted = sum(workload.outputs)
    if workload.counts_prompt:
        counted = sum(map(len, workload.prompts))

    def runner(llm: LLM, workload: Workload) -> Callable[[], float]:
        return lambda: counted / run_workload(llm, workload)

    runners = {side: runner(llm, workload) for side, llm in engines.items()}
    for warm_up in runners.values():
        warm_up()
    figures = interleave(runners, rounds)
    speed = ratios(figures["deterministic"], figures["plain"])
    return {
        "workload": name,
        "unit": "prompt tok/s" if workload.counts_prompt else "tok/s",
        "plain": spread(figures["plain"]),
        "deterministic": spread(figures["deterministic"]),
        "speed": speed,
        "cost_percent": 100 * (1 - speed["median"]),
        "noisy": is_noisy(speed),
    }


def library_rows(llm: LLM) -> dict[str, list[int]]:
    """Return the numbers of rows for which a library computes the products on a GPU, by weight
    shape. The kernel computes all other products."""
    shapes = getattr(llm.model.ops, "library_shapes", None)
    if shapes is None:
        return {}
    return {
        "x".join(map(str, shape)): list(rows) for (shape, _), rows in shapes.rows_by_shape.items()
    }


# ---- view ----------------------------------------------------------------------------------------


def tables(result: Result) -> list[ResultTable]:
    columns = ("workload", "unit", "plain", "deterministic", "cost", "deterministic / plain")
    rows = [
        (
            row["workload"],
            row["unit"],
            f"{row['plain']['median']:,.0f}",
            f"{row['deterministic']['median']:,.0f}",
            f"{row['cost_percent']:.1f}%",
            spread_text(row["speed"], 2),
        )
        for row in result["rows"]
    ]
    return [ResultTable(columns, rows, left=(0, 1))]


def panels(result: Result) -> list[Panel]:
    rows = result["rows"]
    return [
        bars(
            "Throughput with deterministic kernels",
            [row["workload"] for row in rows],
            {"deterministic / plain": [100 * row["speed"]["median"] for row in rows]},
            "% of the plain throughput",
        )
    ]


def notes(result: Result) -> list[str]:
    lines = [
        f"{row['workload']}: the rounds differ by more than 25%, so the machine was busy or the "
        "figure is unstable."
        for row in result["rows"]
        if row["noisy"]
    ]
    slow = [shape for shape, rows in result.get("library_rows", {}).items() if not rows]
    if slow:
        lines.append(
            f"The library has other bits than the kernel for weights of {', '.join(slow)}, so the "
            "kernel computes these products for every number of rows."
        )
    return lines


VIEW = ResultView(tables, panels, notes)
