"""Writes the tables and pictures of README.md and docs/ from the result files in results/.

    python tools/tables.py            rewrite every generated table and picture
    python tools/tables.py --check    fail if a page or a picture does not match the result files

A pair of comments in a page marks a table. The lines between them are replaced:

    <!-- table: throughput results/throughput-llama-8b.json -->
    <!-- end table -->

The first word is a function of this file, or `view` for the tables that the bench itself prints
(octavo/bench/views.py). PICTURES lists the pictures. A result file is what `octavo bench ... --json
FILE`, tests/clients/measure_routers.py or tests/vllm_suite writes.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.bench.claims import figures_text
from octavo.bench.picture import svg
from octavo.bench.views import ResultTable, markdown, source_line, view_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A picture, and the result file that it shows.
PICTURES: dict[str, str] = {
    "docs/pictures/ablation-smollm2-cpu.svg": "results/ablation-smollm2-cpu.json",
    "docs/pictures/compare-cpu.svg": "results/compare-cpu.json",
    "docs/pictures/options-smollm2-cpu.svg": "results/options-smollm2-cpu.json",
}
MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<kind>\S+) (?P<files>[^>]*?) -->\n)(?P<body>.*?)"
    r"(?P<end><!-- end table -->)",
    re.DOTALL,
)
Result = dict[str, Any]


def page_table(columns: list[str], rows: list[list[str]], results: list[Result]) -> str:
    """Return a table, and below it where its results were measured."""
    return markdown(ResultTable(columns, rows)) + f"\n{source_line(results)}\n"


def view(results: list[Result]) -> str:
    """Return the tables that the bench prints, and its notes."""
    parts = []
    for result in results:
        shown = view_of(result)
        parts += [markdown(table) for table in shown.tables(result)]
        parts += [f"{note}\n" for note in shown.notes(result)]
    return "\n".join([*parts, f"{source_line(results)}\n"])


def rows_of(result: Result) -> list[Result]:
    """Return the rows of a result. Older files call them results."""
    rows: list[Result] = result.get("rows") or result["results"]
    return rows


def throughput(results: list[Result]) -> str:
    """Return the table of `octavo bench throughput`, with a row for each workload of each model."""
    rows = []
    for result in results:
        for line in rows_of(result):
            rows.append(
                [
                    f"{result['model']} {line['workload']}",
                    f"{line['tok_s']:,.0f}",
                    f"{line['limit_tok_s']:,.0f}",
                    f"{line['of_limit']:.0%}",
                ]
            )
    columns = ["workload", "tokens/s", "hardware limit (tokens/s)", "% of hardware limit"]
    return page_table(columns, rows, results)


def latency(results: list[Result]) -> str:
    """Return the table of `octavo bench latency`, with a row for each number of requests."""
    rows = []
    for result in results:
        for line in rows_of(result):
            rows.append(
                [
                    f"{result['model']}, {line['requests']} at once",
                    f"{line['ttft_p50_ms']:.1f}",
                    f"{line['itl_p50_ms']:.1f}",
                ]
            )
    columns = ["requests", "time to first token, ms (p50)", "inter-token latency, ms (p50)"]
    return page_table(columns, rows, results)


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
    return page_table(columns, rows, results)


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
    return page_table(columns, rows, results)


def router_kill(results: list[Result]) -> str:
    """Return what clients see when one of two workers is killed, with a row for each router."""
    rows = [
        [
            line["router"],
            f"{line['failed']} of {line['requests']}",
            f"{line['last_failure_s']:.1f}" if line["failed"] else "none",
            f"{line['median_before_ms']:.0f}",
            f"{line['slowest_ms']:,.0f}",
        ]
        for result in results
        for line in result["kill"]
    ]
    columns = [
        "router",
        "requests that failed after the kill",
        "last failure, s after the kill",
        "median before the kill, ms",
        "slowest request after it, ms",
    ]
    return page_table(columns, rows, results)


def compare(results: list[Result]) -> str:
    """Return the medians of `octavo bench compare`, with a row for each system."""
    rows = []
    for result in results:
        for line in rows_of(result):
            name = line["name"].replace("octavo", "**Octavo**").replace("-drafts", " with drafts")
            rows.append(
                [
                    f"{name} {line['version']}",
                    str(line["weights"]),
                    *(f"{line[work]['median']:,.0f}" for work in ("decode", "prefill", "streams")),
                    f"{line['peak_rss_bytes'] / 2**20:,.0f}" if "peak_rss_bytes" in line else "",
                ]
            )
    columns = ["system", "weights", "decode, tok/s", "prefill, tok/s", "16 streams, tok/s"]
    return page_table([*columns, "memory, MiB"], rows, results)


def claims(results: list[Result]) -> str:
    """Return the claims of `octavo bench claims`, with a column for each machine."""
    machines = []
    by_claim: dict[str, Result] = {}
    for result in results:
        machine = result["provenance"]["machine"]
        machines.append(
            machine.get("gpu") or f"{machine['cores']} cores, {machine['instructions']}"
        )
        for line in rows_of(result):
            by_claim.setdefault(line["claim"], line)
    rows = []
    for claim, line in by_claim.items():
        figures = [
            next((figures_text(each) for each in rows_of(result) if each["claim"] == claim), "")
            for result in results
        ]
        rows.append([claim, line["really"], line["fair_run"], *figures])
    columns = ["claim", "what it really was", "the fair run", *machines]
    return page_table(columns, rows, results)


def vllm_examples(results: list[Result]) -> str:
    """Return which of vLLM's examples run, with a row for each reason why one does not."""
    rows = []
    for result in results:
        for kind in ("offline", "online"):
            lines = [line for line in rows_of(result) if line["kind"] == kind]
            if not lines:
                continue
            ran = [line for line in lines if line["runs"]]
            rows.append([f"{kind}: {len(ran)} of {len(lines)} run", example_names(ran)])
            reasons = dict.fromkeys(line["why"] for line in lines if not line["runs"])
            for reason in reasons:
                failed = [line for line in lines if line["why"] == reason]
                rows.append([f"{kind}: {reason}", example_names(failed)])
    return page_table(["result", "examples"], rows, results)


def example_names(lines: list[Result]) -> str:
    return ", ".join(f"`{Path(line['example']).stem}`" for line in lines)


def vllm_tests(results: list[Result]) -> str:
    """Return how many of vLLM's server tests pass, with a row for each reason why one does not."""
    rows = []
    for result in results:
        lines = rows_of(result)
        applicable = [line for line in lines if line["outcome"] != "skipped"]
        passed = [line for line in applicable if line["outcome"] == "passed"]
        name = f"the tests that apply, of vLLM's commit `{result['vllm_commit']}`"
        rows.append([name, str(len(applicable)), ""])
        rows.append(["pass", str(len(passed)), ""])
        counts = Counter(line["reason"] for line in applicable if line["outcome"] != "passed")
        for reason, count in counts.most_common():
            named = [line for line in applicable if line.get("reason") == reason]
            files = dict.fromkeys(Path(line["file"]).stem for line in named)
            rows.append([reason, str(count), ", ".join(f"`{name}`" for name in files)])
    return page_table(["result", "tests", "files"], rows, results)


KINDS: dict[str, Callable[[list[Result]], str]] = {
    "view": view,
    "compare": compare,
    "claims": claims,
    "throughput": throughput,
    "latency": latency,
    "router-latency": router_latency,
    "router-policies": router_policies,
    "router-kill": router_kill,
    "vllm-examples": vllm_examples,
    "vllm-tests": vllm_tests,
}


def fill(text: str) -> str:
    """Return the text of a page with every generated table up to date."""

    def replace_table(marked: re.Match[str]) -> str:
        results = [json.loads((ROOT / name).read_text()) for name in marked["files"].split()]
        return marked["begin"] + KINDS[marked["kind"]](results) + marked["end"]

    return MARKED.sub(replace_table, text)


def draw(result_file: str) -> str:
    """Return the text of the picture that shows a result."""
    result = json.loads((ROOT / result_file).read_text())
    return svg(*view_of(result).panels(result))


def stale_files() -> dict[Path, str]:
    """Return what pages and pictures should contain, for those that differ from it."""
    expected = {page: fill(page.read_text(encoding="utf-8")) for page in PAGES}
    expected |= {ROOT / picture: draw(result_file) for picture, result_file in PICTURES.items()}
    return {
        path: text
        for path, text in expected.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    stale = stale_files()
    if "--check" not in sys.argv:
        for path, text in stale.items():
            path.write_text(text, encoding="utf-8")
    if stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"differs from results/: {names}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
