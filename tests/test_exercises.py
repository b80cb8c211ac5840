"""Every exercise fails as it is, and its solution passes. Each lesson has an exercise."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.lessons.catalog import LESSONS

FOLDER = Path(__file__).parents[1] / "exercises"
NAMES = sorted(Path(lesson.exercise).stem for lesson in LESSONS.values())


def run_tests(exercise: ModuleType) -> None:
    """Run the tests of an exercise, with all their parameters."""
    for name, test in vars(exercise).items():
        if name.startswith("test_"):
            for arguments in parameters_of(test):
                test(**arguments)


def parameters_of(test: Callable[..., None]) -> list[dict[str, Any]]:
    """Return the arguments that the parametrize marks of a test give."""
    cases: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        several = not isinstance(names, str)
        added = [
            dict(zip(names, value, strict=True)) if several else {names: value} for value in values
        ]
        cases = [case | more for case in cases for more in added]
    return cases


def test_each_lesson_has_an_exercise_and_a_solution() -> None:
    solved = sorted(file.stem for file in (FOLDER / "solutions").glob("*.py"))
    assert [name for name in solved if name != "__init__"] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_fails_until_it_is_solved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exercise = importlib.import_module(f"exercises.{name}")
    with pytest.raises(NotImplementedError):
        run_tests(exercise)
    solution = importlib.import_module(f"exercises.solutions.{name}")
    for attribute, value in vars(solution).items():
        if getattr(value, "__module__", "") == solution.__name__:
            assert hasattr(exercise, attribute)
            monkeypatch.setattr(sys.modules[exercise.__name__], attribute, value)
    run_tests(exercise)
