"""Attacks on a real server, each beside normal traffic: what must be true during and after each is in tests/attacks/target.py.

The full forms are marked slow. The worst run with the other tests too, in a small form.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

from tests.attacks import keys, structures
from tests.attacks.target import Target, target_server, withstands


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target_server(tmp_path_factory.mktemp("target")) as found:
        yield found


# ---- structured output --------------------------------------------------------------------------------


def test_a_schema_of_chained_references(target: Target) -> None:
    with withstands(target, left_mib=150):
        structures.send(target, structures.worst().items())


@pytest.mark.slow
def test_structures_that_cost_much(target: Target) -> None:
    with withstands(target, left_mib=300):
        structures.send(target, structures.all_cases().items())


@pytest.mark.slow
def test_structures_that_cost_much_again_and_again(target: Target) -> None:
    with withstands(target, left_mib=300):
        structures.send_repeatedly(target, rounds=8)


# ---- keys ---------------------------------------------------------------------------------------------


def test_right_keys_open_only_what_is_theirs(target: Target) -> None:
    keys.misuse(target)
