"""Inputs that failed once, and those that fuzzing begins with, are handled without a failure."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("starlette")

from tests.fuzz.__main__ import target_names
from tests.fuzz.worker import LIMIT_SECONDS, load, stored_inputs


@pytest.mark.parametrize("name", target_names())
def test_known_inputs_pass(name: str) -> None:
    target = load(name)
    for data in [*target.SEEDS, *stored_inputs(name)]:
        begun = time.process_time()
        target.one_input(data)
        assert time.process_time() - begun < LIMIT_SECONDS, data[:200]
