"""Splits a run of tests into parts of about the same time: `--part 2/4` runs the second of four.

The tests of a function stay in one part, because they share compiled kernels. A function takes the
seconds that `--record-durations` wrote to durations.json, or CASE_SECONDS for each of its cases.
The part of a function depends on the collected tests and on this table alone, so every machine
splits the same tree in the same way.

Imports nothing but pytest and the standard library, like conftest.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("durations.json")
# With empty kernel caches on an H200, 476 cases of three files took longer than 470 s.
CASE_SECONDS = 1.0


def parse_part(text: str) -> tuple[int, int]:
    """Return the number of the part and the number of parts of a text such as 2/4."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part is N/M with N from 1 to M, such as 2/4, not {text!r}")
    return int(number), int(count)


def split(cases: Mapping[str, int], seconds: Mapping[str, float], count: int) -> list[set[str]]:
    """Divide functions, whose numbers of cases are given, into parts. The longest come first, and
    each goes to the part with the shortest time."""
    times = {name: seconds.get(name, CASE_SECONDS * cases[name]) for name in cases}
    parts: list[set[str]] = [set() for _ in range(count)]
    totals = [0.0] * count
    for name in sorted(times, key=lambda name: (-times[name], name)):
        index = totals.index(min(totals))
        parts[index].add(name)
        totals[index] += times[name]
    return parts


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


class Recorder:
    """Writes the seconds of each function: set-up, call and tear-down of all its cases."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[function_of(report.nodeid)] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        known = read_table() | {name: round(seconds, 1) for name, seconds in self.seconds.items()}
        TABLE.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")


def read_table() -> dict[str, float]:
    return json.loads(TABLE.read_text())


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="N/M", help="Run the N-th of M parts of equal time.")
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="Write the seconds of each test function to tests/durations.json, for --part.",
    )


def keep_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the other parts."""
    text = config.getoption("--part")
    if text is None:
        return
    number, count = parse_part(text)
    cases = Counter(function_of(item.nodeid) for item in items)
    chosen = split(cases, read_table(), count)[number - 1]
    dropped = [item for item in items if function_of(item.nodeid) not in chosen]
    items[:] = [item for item in items if function_of(item.nodeid) in chosen]
    config.hook.pytest_deselected(items=dropped)
