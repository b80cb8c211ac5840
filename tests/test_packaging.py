"""The wheel is complete, and it works in a virtual environment that has nothing else.

The test downloads PyTorch, so it takes minutes. OCTAVO_TEST_TORCH names another requirement than the
version that `make setup` installs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests.cli.conftest import write_model

ROOT = Path(__file__).parents[1]
TORCH = os.environ.get("OCTAVO_TEST_TORCH", "torch==2.13.0")

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path) -> str:
    """Run a command away from the source tree, so that it cannot find the package there."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return process.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the files that git tracks."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", folder, source),
        cwd=folder,
    )
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    tracked = set(run("git", "ls-files", "octavo", cwd=ROOT).splitlines())
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == tracked


def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "clean", cwd=tmp_path)
    binaries = tmp_path / "clean" / "bin"
    install = (binaries / "python", "-m", "pip", "install", "--quiet")
    run(*install, TORCH, cwd=tmp_path)
    run(*install, TORCH, f"{wheel}[serve]", cwd=tmp_path)
    octavo = binaries / "octavo"
    model = write_model(tmp_path / "tiny")
    assert run(octavo, "--version", cwd=tmp_path).startswith("octavo ")
    assert run(octavo, "complete", model, "-p", "abc", "--max-tokens", "4", cwd=tmp_path)
    check_server(octavo, model, tmp_path)


def check_server(octavo: Path, model: Path, folder: Path) -> None:
    """Serve the model, and fetch the list of models and the live page."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    log = folder / "log.txt"
    with log.open("w") as stream:
        command = [octavo, "serve", model, "--port", str(port)]
        process = subprocess.Popen(command, cwd=folder, stdout=stream, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 300
        while "ready:" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        for path, content in (("/v1/models", b'"tiny"'), ("/", b"<html")):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
                assert content in reply.read()
    finally:
        process.terminate()
        process.wait(30)
