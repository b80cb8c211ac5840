"""Marks for parametrised tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter. `make test` runs the first `count` of them, and
    `make test-slow` runs the others."""
    found = []
    for index, value in enumerate(values):
        found.append(value if index < count else pytest.param(value, marks=pytest.mark.slow))
    return found
