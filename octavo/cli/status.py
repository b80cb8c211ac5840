"""Shows what a command does in one line on the terminal, before the command prints anything.

    octavo serve: loading the model, 45 % (3 s)

The line is written to stderr, only if that is a terminal, and erased before anything else is
printed. Must import nothing that takes long.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, TextIO

ERASE = "\r\x1b[K"
DIM = "\x1b[2m"
RESET = "\x1b[0m"
REDRAW_SECONDS = 0.5
MIN_SHOWN_SECONDS = 2.0  # A shorter elapsed time is not shown.

# The phases of an engine process -> their descriptions for users.
PHASES = {
    "starting": "starting the engine process",
    "importing": "importing PyTorch",
    "loading": "loading the model",
    "compiling": "compiling CPU kernels for the first start, which takes about a minute",
    "allocating": "allocating memory",
    "warming": "warming up",
    "ready": "starting the API server",
    "down": "the engine process has ended",
}


class StatusLine:
    def __init__(self, stream: TextIO, text: str):
        self._stream = stream
        self._text = text
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._draw()
        threading.Thread(target=self._redraw, daemon=True, name="status line").start()

    def show(self, text: str) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            if text.partition(",")[0] != self._text.partition(",")[0]:
                self._since = time.monotonic()  # a new phase
            self._text = text
            self._draw()

    def end(self) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self._stream.write(ERASE)
                self._stream.flush()

    def _draw(self) -> None:
        elapsed = time.monotonic() - self._since
        seconds = f" ({elapsed:.0f} s)" if elapsed >= MIN_SHOWN_SECONDS else ""
        self._stream.write(f"{ERASE}{DIM}{self._text}{seconds}{RESET}")
        self._stream.flush()

    def _redraw(self) -> None:
        while not self._ended.wait(REDRAW_SECONDS):
            with self._lock:
                if not self._ended.is_set():
                    self._draw()


class FirstWrite:
    """A stream that ends the status line before its first text."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        if text:
            end()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_line: StatusLine | None = None
# True while a progress bar is on the terminal. The status line is not shown then.
_has_bar = False
# The former values of sys.stdout and sys.stderr. print() holds no reference to sys.stdout while it
# writes to it (CPython 3.11), so a stream that its own write replaces must stay alive: otherwise
# the process ends with a segmentation fault.
_replaced: list[FirstWrite] = []


def begin(text: str) -> None:
    """Show the line, if stderr is a terminal and shows no progress bar."""
    global _line
    if _line is not None or _has_bar or not sys.stderr.isatty():
        return
    _line = StatusLine(sys.stderr, text)
    sys.stderr = FirstWrite(sys.stderr)
    if sys.stdout.isatty():
        sys.stdout = FirstWrite(sys.stdout)


def show(text: str) -> None:
    """Change the text of the line, if it is shown."""
    if _line is not None:
        _line.show(text)


def is_shown() -> bool:
    return _line is not None


def hide_for_progress_bar() -> None:
    """Erase the line for a progress bar. begin() does nothing until the bar ends."""
    global _has_bar
    end()
    _has_bar = True


def resume() -> None:
    """Allow the status line again, after the progress bar has ended."""
    global _has_bar
    _has_bar = False


def end() -> None:
    """Erase the line and show no further status."""
    global _line
    line, _line = _line, None
    if line is not None:
        line.end()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, FirstWrite):
                _replaced.append(stream)
                setattr(sys, name, stream._stream)
