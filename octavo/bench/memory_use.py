"""Compares memory with its plan, records memory over time, and measures the gain of paging.

    planned    the memory that octavo/memory.py computes before the model is loaded
    measured   the memory that the process, or the GPU, uses after each stage
    over time  memory, allocated KV positions and used KV positions, at each step
    waste      the share of allocated KV positions that are unused, with paged and contiguous KV

The workload asks for many tokens and ends after few, as chats do (ablation.py, "uncertain").
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.bench.ablation import SCALES, WORKLOADS, release_memory
from octavo.bench.drive import DriveReport, drive
from octavo.bench.picture import Axis, Panel, Series, bars, points
from octavo.bench.result_file import BenchRun
from octavo.bench.views import Result, ResultTable, ResultView
from octavo.events import Event, StepLanded
from octavo.llm import LLM
from octavo.process_usage import anonymous_bytes, rss_bytes

WORKLOAD = "uncertain"
MAX_POINTS = 300  # points in the picture


def used_bytes(kind: str) -> int:
    """Return the memory that this process has allocated on a "cuda" or "cpu" device."""
    return torch.cuda.memory_allocated() if kind == "cuda" else anonymous_bytes()


def peak_bytes(kind: str) -> int:
    return torch.cuda.max_memory_allocated() if kind == "cuda" else rss_bytes()


@dataclass
class MemoryTrace:
    """Samples that are taken at the end of each step."""

    llm: LLM
    started: float = field(default_factory=time.perf_counter)
    rows: list[dict[str, float]] = field(default_factory=list)

    def sample(self, event: Event) -> None:
        scheduler = self.llm.engine.scheduler
        block_size = scheduler.pool.block_size
        running = scheduler.running
        allocated = sum(len(seq.block_table) for seq in running) * block_size
        self.rows.append(
            {
                "seconds": time.perf_counter() - self.started,
                "bytes": peak_bytes(self.llm.device.type),
                "running": len(running),
                "taken_positions": allocated,
                "used_positions": sum(seq.computed for seq in running),
            }
        )

    def waste(self) -> float:
        """Return the share of allocated positions that are unused, on average over the steps."""
        shares = [
            1 - row["used_positions"] / row["taken_positions"]
            for row in self.rows
            if row["taken_positions"]
        ]
        return statistics.mean(shares)

    def thinned_rows(self) -> list[dict[str, float]]:
        stride = max(len(self.rows) // MAX_POINTS, 1)
        return self.rows[::stride]


class MemoryBench:
    """`load` makes an LLM with some options changed."""

    def __init__(self, load: Callable[[dict[str, Any]], LLM], run: BenchRun):
        self.load = load
        self.run = run

    def measure(self) -> None:
        throwaway = self.load({})  # compiles kernels, and imports libraries that stay in memory
        kind = throwaway.device.type
        del throwaway
        release_memory()
        bytes_before = used_bytes(kind)
        llm = self.load({})
        after_loading = used_bytes(kind)
        kv_tensor = llm.runner.kv.tensor
        kv_bytes = kv_tensor.numel() * kv_tensor.element_size()
        # On a CPU, memory of the KV pool counts when it is first written to.
        resident_kv_bytes = kv_bytes if kind == "cuda" else 0
        llm.warm_up()
        after_warm_up = used_bytes(kind)
        self._add_stage(
            "weights and tokenizer",
            llm.memory.weights,
            after_loading - bytes_before - resident_kv_bytes,
        )
        self._add_stage("KV pool", llm.memory.kv, kv_bytes)
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._add_allocation(llm, "paged")
        activations = peak_bytes(kind) - after_warm_up
        if kind == "cuda":
            self._add_stage("activations and graphs", llm.memory.activations, activations)
        contiguous = llm.with_options(kv_allocation="contiguous")
        self._add_allocation(contiguous, "contiguous")
        del contiguous
        release_memory()

    def _add_stage(self, name: str, planned: int, measured: int) -> None:
        self.run.add_row(kind="stage", name=name, planned_bytes=planned, measured_bytes=measured)

    def _add_allocation(self, llm: LLM, name: str) -> None:
        scale = SCALES[llm.device.type]
        trace = MemoryTrace(llm)
        llm.engine.events.subscribe(trace.sample, StepLanded)
        report: DriveReport = drive(llm.engine, WORKLOADS[WORKLOAD].jobs(llm, scale))
        self.run.add_row(
            kind="allocation",
            name=name,
            waste=trace.waste(),
            most_running=report.most_running,
            seconds=report.seconds,
            tok_s=report.tokens_per_second,
            preemptions=llm.engine.scheduler.counters.preemptions,
            peak_bytes=max(row["bytes"] for row in trace.rows),
            over_time=trace.thinned_rows(),
        )


# ---- view ----------------------------------------------------------------------------------------


def rows_of(result: Result, kind: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["kind"] == kind]


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def tables(result: Result) -> list[ResultTable]:
    stages = [
        (row["name"], mebibytes(row["planned_bytes"]), mebibytes(row["measured_bytes"]))
        for row in rows_of(result, "stage")
    ]
    allocations = [
        (
            row["name"],
            f"{row['waste']:.0%}",
            str(row["most_running"]),
            f"{row['tok_s']:,.0f}",
            str(row["preemptions"]),
            mebibytes(row["peak_bytes"]),
        )
        for row in rows_of(result, "allocation")
    ]
    return [
        ResultTable(("memory", "planned, MiB", "measured, MiB"), stages),
        ResultTable(
            (
                *("KV allocation", "wasted positions", "most sequences at once", "tok/s"),
                *("preemptions", "peak memory, MiB"),
            ),
            allocations,
        ),
    ]


def panels(result: Result) -> list[Panel]:
    allocations = rows_of(result, "allocation")
    lines = []
    for row in allocations:
        for field_name, label in (("taken_positions", "taken"), ("used_positions", "used")):
            positions = [(sample["seconds"], sample[field_name]) for sample in row["over_time"]]
            lines.append(Series(f"{row['name']}: {label}", positions))
    memory = [
        Series(
            row["name"],
            [(sample["seconds"], sample["bytes"] / 2**20) for sample in row["over_time"]],
        )
        for row in allocations
    ]
    seconds = Axis("seconds", starts_at_zero=True)
    return [
        points(
            "KV positions over time",
            lines,
            seconds,
            Axis("positions", starts_at_zero=True),
            connected=True,
            mark_size=0,
        ),
        points(
            "Memory over time",
            memory,
            seconds,
            Axis("MiB"),
            connected=True,
            mark_size=0,
        ),
        bars(
            "Wasted KV positions",
            [row["name"] for row in allocations],
            {"waste": [100 * row["waste"] for row in allocations]},
            "% of those taken",
            width=420,
        ),
    ]


VIEW = ResultView(tables, panels)
