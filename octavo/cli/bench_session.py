"""Prints, saves and draws the result of a bench, even if the bench fails or is interrupted.

    run = BenchRun("ablation", output, model=...)
    with bench_session(run, picture):
        run.add_row(...)

A bench that is interrupted, or fails, after its first row still shows its rows. They are marked as
partial.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from octavo.cli.options import option
from octavo.cli.terminal import print_result, say, table

if TYPE_CHECKING:
    from octavo.bench.result_file import BenchRun

Picture = Annotated[
    Path | None, option("Draw the result in this SVG file.", None, "FILE", "--picture")
]
Rounds = Annotated[
    int,
    option(
        "Rounds; each round measures every side once, and medians are reported.",
        None,
        "N",
        "--repeat",
        show_default=True,
        min=1,
    ),
]


@contextmanager
def bench_session(run: BenchRun, picture: Path | None = None) -> Iterator[None]:
    check_writable(run.path)
    try:
        with terminating_as_interrupt():
            yield
    except BaseException as error:
        run.stop(describe(error))
        if run.rows:
            present(run, picture)
        raise
    run.finish()
    present(run, picture)


def describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "the bench was interrupted"
    return f"{type(error).__name__}: {error}"


def check_writable(path: Path | None) -> None:
    """Raise OSError before anything is measured, if the result could not be written."""
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"--json {path}: there is no directory {path.parent}")


@contextmanager
def terminating_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that a bench that is terminated saves its result."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, as in some tests
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def plain_cell(text: str) -> str:
    """Return a cell without the marks of Markdown."""
    return text.replace("`", "").replace("**", "")


def present(run: BenchRun, picture: Path | None) -> None:
    """Print the tables, the notes and, for programs, the result."""
    from octavo.bench.picture import draw
    from octavo.bench.views import view_of

    result = run.result
    view = view_of(result)
    for result_table in view.tables(result):
        cells = [[plain_cell(cell) for cell in row] for row in result_table.rows]
        table(result_table.title, result_table.columns, cells, left=result_table.left)
    for note in view.notes(result):
        say(f"[yellow]note[/yellow]: {note}")
    for name, reason in result["skipped"].items():
        say(f"[bold yellow]not measured[/bold yellow]: {name}: {reason}")
    if result["partial"]:
        reason = result.get("stopped", "something was not measured")
        say(f"[bold yellow]partial result[/bold yellow]: {reason}")
    panels = view.panels(result) if picture is not None and result["rows"] else []
    if picture is not None and panels:
        draw(picture, *panels)
    print_result(run.line())
