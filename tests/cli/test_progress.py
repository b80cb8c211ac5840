"""Long work shows how far it is, on a terminal and elsewhere."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from octavo.cli import progress, status
from octavo.cli.progress import Steps


def shown(patch: pytest.MonkeyPatch, terminal: bool) -> str:
    out = io.StringIO()
    patch.setattr(progress, "Console", lambda stderr: Console(file=out, force_terminal=terminal))
    with Steps() as steps:
        task = steps.add_task("loading", total=None)
        steps.update(task, description="measuring", total=3)
        for _ in range(3):
            steps.advance(task)
    return out.getvalue()


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # no other was due
    assert shown(monkeypatch, terminal=False).splitlines() == [
        "   0 s  loading",
        "   0 s  measuring, 0 of 3 done",
    ]
    monkeypatch.setattr(progress, "REPEAT_SECONDS", 0.0)
    lines = shown(monkeypatch, terminal=False).splitlines()
    assert [f"   0 s  measuring, {i} of 3 done" for i in range(4)] == list(dict.fromkeys(lines))[1:]
    assert "measuring, 1 of 3" not in shown(monkeypatch, terminal=True)


def test_what_takes_long_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=out))
    monkeypatch.setattr(progress, "REPEAT_SECONDS", 0.02)
    with Steps() as steps:
        steps.add_task("measuring", total=2)
        time.sleep(0.3)
    count = out.getvalue().count("measuring, 0 of 2")
    time.sleep(0.1)
    assert count > 2 and out.getvalue().count("measuring") == count, "and no more when it is over"


def test_no_status_line_is_drawn_into_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", Screen())
    with Steps() as steps:
        steps.add_task("loading", total=None)
        status.begin("opening a model")
        assert not status.is_shown()
    status.begin("opening a model")
    assert status.is_shown()
    status.end()
