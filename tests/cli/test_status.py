"""The status line of a command."""

from __future__ import annotations

import ctypes
import io
import os
import pty
import select
import subprocess
import sys
import time
import weakref

import pytest

from octavo.cli import interrupt_again, status
from octavo.cli.commands import COMMANDS

MOST_SECONDS = 0.3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_stream_that_a_first_print_replaces_stays_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """print() writes its newline to the stream that sys.stdout was when it began, and holds no
    reference to it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", Terminal())
    status.begin("octavo test: starting")
    wrapper = weakref.ref(sys.stdout)
    assert isinstance(wrapper(), status.FirstWrite)
    print("text")
    assert sys.stdout is terminal and wrapper() is not None
    assert terminal.getvalue() == "text\n"


def seconds_until_first_output(*arguments: str) -> float:
    """Run a command on a terminal. Returns how long the terminal stays empty."""
    terminal, end = pty.openpty()
    begun = time.monotonic()
    command = [sys.executable, "-m", "octavo", *arguments]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end)
    os.close(end)
    try:
        assert select.select([terminal], [], [], 30)[0], "the command prints nothing"
        seconds = time.monotonic() - begun
        assert f"octavo {arguments[0]}: starting" in os.read(terminal, 1000).decode()
        return seconds
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_shows_a_status_line_at_once(name: str) -> None:
    """Other programs can delay a command, so the fastest of several starts counts."""
    for _ in range(10):
        seconds = seconds_until_first_output(name, "--no-such-option")
        if seconds < MOST_SECONDS:
            return
    raise AssertionError(f"the first output appears after {seconds:.2f} s")


def test_ctrl_c_inside_a_callback_of_a_library_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python prints such an exception and goes on, for example while numba compiles kernels."""
    monkeypatch.setattr(sys, "unraisablehook", interrupt_again)

    @ctypes.CFUNCTYPE(None)
    def interrupted() -> None:
        raise KeyboardInterrupt

    @ctypes.CFUNCTYPE(None)
    def wrong() -> None:
        raise ValueError("shown")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
        time.sleep(10)
    assert capfd.readouterr().err == ""
    wrong()
    assert "ValueError: shown" in capfd.readouterr().err
