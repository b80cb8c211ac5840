"""The environment of every test: one thread per worker, no downloads, no time limits that a busy
machine would break.

This file imports nothing but pytest, tests.parts and the standard library, because the GPU
reference machine has little more.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests import parts

DEVICE = os.environ.get("OCTAVO_TEST_DEVICE", "cpu")

# Read by libraries when they are first imported, hence set here and for the processes that tests
# start.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    # `make test` runs one worker per core, and more threads would only slow them down.
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton kernels run without a GPU, slowly

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # A deadline would test the machine; a fixed seed makes a failure appear for everybody or for
    # nobody.
    settings.register_profile("octavo", deadline=None, derandomize=True)
    settings.load_profile("octavo")


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device of this run: "cpu", or the value of OCTAVO_TEST_DEVICE."""
    return DEVICE


def pytest_addoption(parser: pytest.Parser) -> None:
    parts.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations"):
        config.pluginmanager.register(parts.Recorder())


@pytest.hookimpl(trylast=True)  # after -m and -k have deselected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts.keep_part(config, items)
    if DEVICE == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: run `make test-gpu`"))
