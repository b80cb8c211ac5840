"""Writes the tables of README.md and docs/ from the result files in results/.

    python tools/tables.py            rewrite every generated table
    python tools/tables.py --check    fail if a page does not match the result files

A pair of comments in a page marks a table. The lines between them are replaced:

    <!-- table: throughput results/throughput-llama-8b.json -->
    <!-- end table -->

A result file is what `octavo bench ... --json FILE` or tests/clients/measure_routers.py writes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<kind>\S+) (?P<files>[^>]*?) -->\n)(?P<body>.*?)"
    r"(?P<end><!-- end table -->)",
    re.DOTALL,
)
Result = dict[str, Any]


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def throughput(results: list[Result]) -> str:
    """Return the table of `octavo bench throughput`, with a row for each workload of each model."""
    rows = []
    for result in results:
        for line in result["results"]:
            rows.append(
                [
                    f"{result['model']} {line['workload']}",
                    f"{line['tok_s']:,.0f}",
                    f"{line['limit_tok_s']:,.0f}",
                    f"{line['of_limit']:.0%}",
                ]
            )
    columns = ["workload", "tokens/s", "hardware limit (tokens/s)", "% of hardware limit"]
    return markdown(columns, rows) + source(results)


def latency(results: list[Result]) -> str:
    """Return the table of `octavo bench latency`, with a row for each number of requests."""
    rows = []
    for result in results:
        for line in result["results"]:
            rows.append(
                [
                    f"{result['model']}, {line['requests']} at once",
                    f"{line['ttft_p50_ms']:.1f}",
                    f"{line['itl_p50_ms']:.1f}",
                ]
            )
    columns = ["requests", "time to first token, ms (p50)", "inter-token latency, ms (p50)"]
    return markdown(columns, rows) + source(results)


def router_latency(results: list[Result]) -> str:
    """Return the latency of tests/clients/measure_routers.py, with a row for each router."""
    rows = [
        [
            line["router"],
            f"{line['ratio']:.2f}",
            f"{line['median_ms']:.1f}",
            f"{line['p90_ms']:.1f}",
        ]
        for result in results
        for line in result["latency"]
    ]
    columns = ["router", "median, relative to no router", "median, ms", "p90, ms"]
    return markdown(columns, rows) + source(results)


def router_policies(results: list[Result]) -> str:
    """Return the hit rate and the balance of each router and policy."""
    rows = [
        [
            line["router"],
            f"`{line['policy']}`",
            f"{line['hit_rate']:.0%}",
            f"{line['busiest_share']:.0%}",
        ]
        for result in results
        for line in result["policies"]
    ]
    columns = [
        "router",
        "policy",
        "prompt tokens found in the cache",
        "requests of the busier worker",
    ]
    return markdown(columns, rows) + source(results)


def router_kill(results: list[Result]) -> str:
    """Return what clients see when one of two workers is killed, with a row for each router."""
    rows = [
        [
            line["router"],
            f"{line['failed']} of {line['requests']}",
            f"{line['last_failure_s']:.1f}" if line["failed"] else "none",
            f"{line['slowest_ms'] / line['median_before_ms']:.0f}",
        ]
        for result in results
        for line in result["kill"]
    ]
    columns = [
        "router",
        "requests that failed after the kill",
        "last failure, s after the kill",
        "slowest request, relative to the median before",
    ]
    return markdown(columns, rows) + source(results)


def source(results: list[Result]) -> str:
    """Return a line that says when, where and at which commit the results were measured."""
    origins = []
    for result in results:
        origin = result["provenance"]
        machine = origin["machine"].get("gpu") or origin["machine"]["cpu"]
        origins.append(f"{origin['date']}, commit {origin['commit'] or 'unknown'}, {machine}")
    return "\nMeasured " + "; ".join(dict.fromkeys(origins)) + ".\n"


KINDS: dict[str, Callable[[list[Result]], str]] = {
    "throughput": throughput,
    "latency": latency,
    "router-latency": router_latency,
    "router-policies": router_policies,
    "router-kill": router_kill,
}


def fill(text: str) -> str:
    """Return the text of a page with every generated table up to date."""

    def replace_table(marked: re.Match[str]) -> str:
        results = [json.loads((ROOT / name).read_text()) for name in marked["files"].split()]
        return marked["begin"] + KINDS[marked["kind"]](results) + marked["end"]

    return MARKED.sub(replace_table, text)


def main() -> int:
    stale_pages = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            stale_pages.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(filled, encoding="utf-8")
    if stale_pages:
        print("differs from results/: " + ", ".join(stale_pages))
    return int(bool(stale_pages) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
