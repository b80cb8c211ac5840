"""Each option's and each metric's help text is understood alone: --help and Grafana show one at a
time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

# Words that point to a neighbouring line when no noun follows them.
POINTING = re.compile(r"\b(those|them|theirs)\b|\b(of|in|by|for|to) (it|that|this)$", re.IGNORECASE)
BEGINNINGS = re.compile(r"^(Of|That|Which\W|Whose|Those|These|It|Its|Their)\b")


def option_helps() -> Iterator[tuple[str, str]]:
    typer = pytest.importorskip("typer")
    from octavo.cli import app

    def walk(command: object, path: str) -> Iterator[tuple[str, str]]:
        for parameter in command.params:  # type: ignore[attr-defined]
            if parameter.name not in ("help", "version"):
                yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{path} {name}")

    yield from walk(typer.main.get_command(app), "octavo")


def metric_helps() -> Iterator[tuple[str, str]]:
    pytest.importorskip("prometheus_client")
    from octavo.serve.front import metrics

    source = re.findall(r'"([A-Z][^"\n]*\.)"', Path(metrics.__file__).read_text("utf-8"))
    yield from ((text, text) for text in source)


def faults(text: str) -> list[str]:
    problems = []
    if len(text.split()) < 3:
        problems.append("has fewer than three words")
    if POINTING.search(text.rstrip(".")) or BEGINNINGS.match(text):
        problems.append("points to a neighbouring line")
    return problems


def test_option_helps_stand_alone() -> None:
    helps = dict(option_helps())
    assert len(helps) > 100
    assert {name: (text, faults(text)) for name, text in helps.items() if faults(text)} == {}


def test_metric_helps_stand_alone() -> None:
    helps = dict(metric_helps())
    assert len(helps) > 40
    short = {"Tokens generated."}
    wrong = {text: faults(text) for text in helps if text not in short and faults(text)}
    assert wrong == {}


@pytest.mark.parametrize("text", ["Bytes of those.", "Of those, found.", "Time of that.", "Which."])
def test_a_text_that_needs_its_neighbour_is_reported(text: str) -> None:
    assert faults(text)
