"""How a result is shown: as tables and as charts. One declaration serves the terminal, the pages of
the documentation (tools/tables.py) and the report (octavo/bench/report.py).

The module of a bench has a VIEW. Its functions take a result, as result_file.py describes it, and
must accept a partial one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from octavo.bench.picture import Panel

Result = dict[str, Any]

# The module with the view of a result, by the name of the bench.
VIEWS = {
    "ablation": "octavo.bench.ablation",
    "compare": "octavo.bench.compare",
    "deterministic": "octavo.bench.deterministic",
    "sweep": "octavo.bench.sweep",
    "options": "octavo.bench.option_effects",
    "memory": "octavo.bench.memory_use",
    "decoding": "octavo.bench.decoding",
    "transports": "octavo.bench.transports",
    "serve": "octavo.bench.measure_serve",
    "claims": "octavo.bench.claims",
    "throughput": "octavo.bench.throughput",
    "latency": "octavo.bench.latency",
    "quant": "octavo.bench.measure_quant",
    "kv": "octavo.bench.measure_quant:KV_VIEW",
}


class ResultTable(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    left: Sequence[int] = (0,)  # columns of text, which are aligned to the left


def no_notes(result: Result) -> list[str]:
    return []


class ResultView(NamedTuple):
    tables: Callable[[Result], list[ResultTable]]
    panels: Callable[[Result], list[Panel]]
    notes: Callable[[Result], list[str]] = no_notes  # sentences below the tables


def view_of(result: Result) -> ResultView:
    """Return the view of a result."""
    module, _, name = VIEWS[result["bench"]].partition(":")
    view: ResultView = getattr(importlib.import_module(module), name or "VIEW")
    return view


def markdown(table: ResultTable) -> str:
    """Return a table for a page."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def source_line(results: Sequence[Result]) -> str:
    """Return a sentence that says when, where and at which commit results were measured."""
    origins = []
    for result in results:
        origin = result["provenance"]
        machine = origin["machine"]
        hardware = machine.get("gpu") or machine["cpu"]
        if "gpu" not in machine and machine.get("instructions"):
            hardware += f" ({machine['cores']} cores, {machine['instructions']})"
        partial = ", partial" if result.get("partial") else ""
        commit = origin["commit"] or "unknown"
        origins.append(f"{origin['date']}, commit {commit}, {hardware}{partial}")
    return "Measured " + "; ".join(dict.fromkeys(origins)) + "."


def spread_text(values: dict[str, float], decimals: int = 0) -> str:
    """Return the smallest and the largest of some values."""
    return f"{values['min']:,.{decimals}f} - {values['max']:,.{decimals}f}"
