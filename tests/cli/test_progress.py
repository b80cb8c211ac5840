"""Long work shows how far it is, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from octavo.cli import progress
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
    assert shown(monkeypatch, terminal=False) == "loading\nmeasuring 0 of 3\n"  # the rest came sooner than a line is due
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert (
        shown(monkeypatch, terminal=False) == "loading\nmeasuring 0 of 3\nmeasuring 1 of 3\nmeasuring 2 of 3\nmeasuring 3 of 3\n"
    )
    assert "measuring 1 of 3" not in shown(monkeypatch, terminal=True)
