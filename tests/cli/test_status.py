"""The status line: it appears at once on a terminal, says what happens, and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.cli.terminal import speed_line

ROOT = Path(__file__).parents[2]


def on_a_terminal(*arguments: str, seconds: float = 120) -> tuple[str, float, float]:
    """What a command writes to a terminal, the CPU time until its first text, and its wall time."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", *arguments], cwd=ROOT, stdout=child, stderr=child
    )
    os.close(child)
    text = b""
    first = 0.0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if select.select([parent], [], [], 0.01)[0]:
            try:
                part = os.read(parent, 65536)
            except OSError:
                break
            if not text:
                ticks = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
                first = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
            text += part
    os.close(parent)
    process.wait(10)
    return text.decode(), first, time.monotonic() - began


def test_the_first_line_comes_before_anything_is_imported(tiny: str) -> None:
    """A busy machine makes every time longer, so the CPU time counts."""
    text, cpu_seconds, _ = on_a_terminal("complete", tiny, "-p", "hi", "--max-tokens", "4")
    assert text.startswith("\r\x1b[K\x1b[2moctavo complete: starting")
    assert cpu_seconds < 0.3
    assert "importing PyTorch" in text and "loading" in text and "allocating memory" in text
    last = text.replace("\r\n", "\n").rpartition("\r\x1b[K")[2]
    assert "importing" not in last, "the status line is erased before the text"
    assert "tokens" in last and last.endswith(")\x1b[0m\n"), "the speed comes last"


def test_nothing_of_it_is_in_a_pipe(tiny: str) -> None:
    command = [sys.executable, "-m", "octavo", "complete", tiny, "-p", "hi", "--max-tokens", "2"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "\x1b" not in found.stdout + found.stderr and "starting" not in found.stderr


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ((1, None), "(1 token)"),
        ((20, 41.7), "(20 tokens, 42 tokens/s)"),
        ((20, 41.7, 1000), "(20 tokens, 42 tokens/s, 1,000 prompt tokens from the cache)"),
    ],
)
def test_the_speed_of_a_reply(asked: tuple, line: str) -> None:
    assert speed_line(*asked) == line
