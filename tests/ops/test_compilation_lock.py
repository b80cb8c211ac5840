"""Only one process at a time compiles CPU kernels, and others wait for it."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# The package has a function of the same name.
thread_pool = importlib.import_module("octavo.ops.cpu.thread_pool")

HOLDER = """
import sys, time
from pathlib import Path
from octavo.ops.cpu.thread_pool import compilation_lock
with compilation_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "compiled"


@pytest.fixture
def holder(mark: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock."""
    argv = [sys.executable, "-c", HOLDER, str(mark)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


class Waiter:
    """A thread that acquires the lock."""

    def __init__(self, mark: Path):
        self.mark = mark
        self.has_lock = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        with thread_pool.compilation_lock(self.mark):
            self.has_lock.set()


def test_a_process_waits_until_the_other_dies(
    mark: Path,
    holder: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(thread_pool, "SECONDS_UNTIL_NOTICE", 0.2)
    waiter = Waiter(mark)
    assert not waiter.has_lock.wait(1.0)
    assert [record.message for record in caplog.records] == [
        "another process compiles the CPU kernels, and this process waits for it"
    ]
    holder.kill()
    assert waiter.has_lock.wait(10.0)


def test_a_process_waits_until_everything_is_compiled(
    mark: Path, holder: subprocess.Popen[str]
) -> None:
    waiter = Waiter(mark)
    assert not waiter.has_lock.wait(0.5)
    mark.touch()
    assert waiter.has_lock.wait(10.0)
    assert holder.poll() is None


def test_a_process_does_not_wait_for_a_suspended_one_forever(
    mark: Path,
    holder: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(thread_pool, "MAX_WAIT_SECONDS", 0.5)
    assert Waiter(mark).has_lock.wait(10.0)
    assert "this process compiles them too" in caplog.text
    assert holder.poll() is None


def test_the_lock_is_released_at_the_end(mark: Path) -> None:
    started = time.monotonic()
    for _ in range(2):
        with thread_pool.compilation_lock(mark):
            assert not mark.exists()
    assert time.monotonic() - started < 1.0
