"""Marks for parametrised tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter. `make test` runs the first `count` of them, and
    `make test-slow` runs the others."""
    values_with_marks = []
    for index, value in enumerate(values):
        values_with_marks.append(
            value if index < count else pytest.param(value, marks=pytest.mark.slow)
        )
    return values_with_marks
