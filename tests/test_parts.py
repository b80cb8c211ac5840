"""The parts of `make test-gpu PART=N/M` together are all tests, each of them once."""

from __future__ import annotations

import pytest

from tests import parts

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from tests import parts

def pytest_addoption(parser):
    parts.add_options(parser)

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    parts.keep_part(config, items)
"""
TESTS = """
import pytest

@pytest.mark.parametrize("n", range(5))
def test_long(n): ...

@pytest.mark.parametrize("n", range(3))
def test_middle(n): ...

def test_short(): ...
def test_other(): ...
"""


def test_every_function_is_in_one_part_and_parts_are_balanced() -> None:
    cases = {f"test_{number}": 1 + number % 9 for number in range(100)}
    split = parts.split(cases, {}, 4)
    assert sorted(name for part in split for name in part) == sorted(cases)
    totals = [sum(cases[name] for name in part) for part in split]
    assert max(totals) - min(totals) <= 9
    assert split == parts.split(dict(reversed(cases.items())), {}, 4)


def test_recorded_times_count() -> None:
    cases = {"test_a": 1, "test_b": 10, "test_c": 10}
    first, second = parts.split(cases, {"test_a": 60.0}, 2)
    assert first == {"test_a"} and second == {"test_b", "test_c"}


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "a/b", "1/", "-1/2"])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--part is N/M"):
        parts.parse_part(text)


def test_a_run_of_each_part_is_a_run_of_all(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    for part, passed in (("1/2", 5), ("2/2", 5), ("1/1", 10)):
        result = pytester.runpytest("-p", "no:cacheprovider", "--part", part)
        result.assert_outcomes(passed=passed, deselected=10 - passed)
    assert pytester.runpytest("--part", "3/2").ret == pytest.ExitCode.USAGE_ERROR
