"""Finds the source lines that give each reason in an event, such as the reason of a preemption.

The live page shows these lines when it explains a decision.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import ModuleType
from typing import NamedTuple

from octavo.core import reasons, scheduler, scheduler_reports

DECIDING_MODULES = (scheduler, scheduler_reports)
LINES_BEFORE = 7  # lines of code that are shown before the line that gives the reason
LINES_AFTER = 2


class SourceLine(NamedTuple):
    path: str
    line: int
    first: int  # number of the first line of `code`
    code: str


@cache
def decision_sources() -> dict[str, list[SourceLine]]:
    """Return the source lines that give each reason. The dictionary is empty if there is no source
    code."""
    sources: dict[str, list[SourceLine]] = {}
    for name, reason in vars(reasons).items():
        if name.isupper() and isinstance(reason, str):
            sources[reason] = [line for module in DECIDING_MODULES for line in _uses(module, name)]
    return sources


def _uses(module: ModuleType, name: str) -> list[SourceLine]:
    """Return the lines of a module that name a reason."""
    try:
        lines = inspect.getsource(module).splitlines()
    except (OSError, TypeError):
        return []
    path = f"{module.__name__.replace('.', '/')}.py"
    return lines_with(path, lines, re.compile(rf"\breasons\.{name}\b"))


def lines_with(path: str, lines: list[str], pattern: re.Pattern[str]) -> list[SourceLine]:
    """Return the lines of a file that match a pattern, each with the lines around it."""
    return [
        _source_line(path, lines, index) for index, line in enumerate(lines) if pattern.search(line)
    ]


def _source_line(path: str, lines: list[str], index: int) -> SourceLine:
    first = max(index - LINES_BEFORE, 0)
    shown = lines[first : index + LINES_AFTER + 1]
    while len(shown) > 1 and not shown[0].strip():
        shown.pop(0)
        first += 1
    return SourceLine(path, index + 1, first + 1, inspect.cleandoc("\n" + "\n".join(shown)))
