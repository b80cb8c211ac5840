"""The `octavo` command. Each subcommand is one file. Shared options are in options.py.

Nothing here or at the top of those files imports torch, so that `octavo --help` is quick.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Annotated

import typer

from octavo import __version__
from octavo.cli import (
    bench_eviction,
    bench_latency,
    bench_scheduling,
    bench_serve,
    chat_command,
    complete,
    doctor,
    plan,
    quantize,
    serve_command,
    simulate_command,
)  # fmt: skip

# These modules add their commands to the group of bench.py.
BENCHES = (bench_latency, bench_scheduling, bench_eviction, bench_serve)
app = typer.Typer(
    name="octavo",
    help="Octavo: an LLM inference engine small enough to read.",
    epilog="Without a MODEL, commands use the embedded model (except quantize). OCTAVO_DEBUG=1 "
    "shows where an error arose.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel="Generate")(chat_command.chat)
app.command(rich_help_panel="Generate")(complete.complete)
app.command(rich_help_panel="Generate")(serve_command.serve)
app.command(rich_help_panel="Look")(plan.plan)
app.command(rich_help_panel="Look")(doctor.doctor)
app.command(rich_help_panel="Convert")(quantize.quantize)
app.command(rich_help_panel="Measure")(simulate_command.simulate)
app.add_typer(BENCHES[0].app, name="bench", rich_help_panel="Measure")


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    pass


class OneLine(logging.Formatter):
    """Formats a log record without its traceback: users need only the message of an exception."""

    def formatException(self, info: object) -> str:
        return ""

    def format(self, record: logging.LogRecord) -> str:
        what = f": {record.exc_info[1]}" if record.exc_info and record.exc_info[1] else ""
        return f"{record.levelname.lower()}: {record.getMessage()}{what}"


def main() -> None:
    # a byte that is no text, or a terminal without some character
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    handler = logging.StreamHandler()
    if not os.environ.get("OCTAVO_DEBUG"):
        handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    app()
