"""The status line of a command."""

from __future__ import annotations

import io
import sys
import weakref

import pytest

from octavo.cli import status


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
