"""A server with the embedded model, for clients whose requirements contradict those of Octavo.

The tests run in a virtual environment without Octavo, .venv-sdks, so the server is a process of
another one: OCTAVO_TEST_PYTHON, or .venv. `make test-clients` sets up both.
"""

from __future__ import annotations

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
START_SECONDS = 180


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    sizes = ["--max-model-len", "2048", "--num-blocks", "512", "--max-num-seqs", "16"]
    command = [PYTHON, "-m", "octavo", "serve", "smollm2", "--port", str(port), *sizes]
    with log.open("w") as stream:
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
