"""`octavo timeline`: turns a recorded trace into a file for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import command
from octavo.cli.terminal import say


@command
def timeline(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="File that --record-trace has written.", show_default=False
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="JSON file to write, for Perfetto.", show_default=False
        ),
    ],
) -> None:
    """Show a recorded trace in Perfetto: [bold]octavo timeline today.jsonl today.json[/bold]"""
    from octavo.bench.timeline import write_timeline

    counts = write_timeline(trace, target)
    say(
        f"{target} shows {counts['requests']} requests and {counts['steps']} steps: open it in "
        "ui.perfetto.dev or chrome://tracing"
    )
