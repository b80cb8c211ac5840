"""Servers for clients whose requirements contradict those of Octavo: one with the embedded model,
and one whose model repeats what it was told.

The tests run in a virtual environment without Octavo, .venv-sdks, so a server is a process of
another one: OCTAVO_TEST_PYTHON, or .venv. `make test-clients` sets up both.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("OCTAVO_TEST_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
START_SECONDS = 400


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def free_port() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return str(unused.getsockname()[1])


@contextlib.contextmanager
def server(folder: Path, port: str, arguments: list[str]) -> Iterator[str]:
    """Run a server that listens on this port, and return its address when it is ready."""
    log = folder / "log.txt"
    with log.open("w") as stream:
        command = [PYTHON, "-m", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
    found = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while not is_ready(found):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        yield found
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(autouse=True)
def garbage_is_collected_between_tests() -> Iterator[None]:
    """litellm leaves streams open. If the garbage collector closes one while another request holds
    the lock of httpcore's connection pool, that thread waits for itself."""
    gc.disable()
    yield
    gc.collect()
    gc.enable()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    sizes = ["--max-model-len", "2048", "--num-blocks", "512", "--max-num-seqs", "16"]
    arguments = ["octavo", "serve", "smollm2", "--port", port, *sizes]
    with server(tmp_path_factory.mktemp("server"), port, arguments) as found:
        yield found


@pytest.fixture(scope="session")
def parrot_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The model is called "parrot" and says the text of the last user's message."""
    make_model = "from tests import tiny; print(tiny.model_dir())"
    model = subprocess.check_output([PYTHON, "-c", make_model], cwd=ROOT, text=True).strip()
    options = {
        "model": model,
        "served_model_name": ["parrot"],
        "program": "tests.serve.parrot_engine",
        "engine": {"max_model_len": 1024, "num_gpu_blocks_override": 512},
    }
    port = free_port()
    arguments = ["tests.serve.launch", port, json.dumps(options)]
    with server(tmp_path_factory.mktemp("parrot"), port, arguments) as found:
        yield found
