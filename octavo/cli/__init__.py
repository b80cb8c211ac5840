"""The `octavo` command. Each subcommand is one module, and shared options are in options.py.

No module imports torch at the top, so `octavo --help` answers at once.
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
    bench_ablation,
    bench_compare,
    bench_eviction,
    bench_lab,
    bench_latency,
    bench_report,
    bench_scheduling,
    bench_serve,
    bench_speculation,
    bench_sweep,
    chat_command,
    complete,
    demo_command,
    doctor,
    plan,
    profile_command,
    quantize,
    replay_command,
    route_command,
    run_batch_command,
    serve_command,
    simulate_cluster,
    simulate_command,
    timeline_command,
    train_draft_command,
)  # fmt: skip
from octavo.cli.vllm_flags import VllmCommand

# These modules and bench.py add their commands to one group.
BENCHES = (
    bench_latency,
    bench_report,
    bench_scheduling,
    bench_eviction,
    bench_lab,
    bench_serve,
    bench_speculation,
    bench_sweep,
    bench_ablation,
    bench_compare,
)
app = typer.Typer(
    name="octavo",
    help="Octavo: an LLM inference engine small enough to read.",
    epilog="Without MODEL, commands except quantize use the embedded model. "
    "Set OCTAVO_DEBUG=1 to see tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel="Generate")(chat_command.chat)
app.command(rich_help_panel="Generate")(complete.complete)
app.command(rich_help_panel="Generate", cls=VllmCommand)(serve_command.serve)
app.command(rich_help_panel="Generate", cls=VllmCommand)(run_batch_command.run_batch)
app.command(rich_help_panel="Generate")(route_command.route)
app.command(rich_help_panel="Look")(plan.plan)
app.command(rich_help_panel="Look")(doctor.doctor)
app.command(rich_help_panel="Look")(profile_command.profile)
app.command(rich_help_panel="Learn")(demo_command.demo)
app.command(rich_help_panel="Learn")(replay_command.replay)
app.command(rich_help_panel="Convert")(quantize.quantize)
app.command(rich_help_panel="Convert")(train_draft_command.train_draft)
app.command(rich_help_panel="Measure")(simulate_command.simulate)
app.command(rich_help_panel="Measure")(simulate_cluster.simulate_cluster)
app.command(rich_help_panel="Measure")(timeline_command.timeline)
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
    """Formats a log record without its traceback, and with the message of the exception."""

    def formatException(self, info: object) -> str:
        return ""

    def format(self, record: logging.LogRecord) -> str:
        reason = f": {record.exc_info[1]}" if record.exc_info and record.exc_info[1] else ""
        return f"{record.levelname.lower()}: {record.getMessage()}{reason}"


def main() -> None:
    # Input may contain invalid bytes, and a terminal may lack some characters.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    handler = logging.StreamHandler()
    if not os.environ.get("OCTAVO_DEBUG"):
        handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    app()
