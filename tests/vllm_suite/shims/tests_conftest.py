"""The conftest of the run: fixtures of vLLM's tests that matter here."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    return False


@pytest.fixture
def local_asset_server() -> None:
    """Only tests with images use it."""


@pytest.fixture(scope="session")
def hf_runner() -> None:
    pytest.skip("the reference model of this test cannot be loaded here")


def __getattr__(name: str) -> Any:
    if not name[:1].isupper():
        raise AttributeError(name)
    return object
