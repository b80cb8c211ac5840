"""The table of subcommands, and the application that typer makes of it.

A module is imported when its command runs, because importing all modules takes half a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import typer

from octavo import __version__
from octavo.cli.plain_help import Application


class CommandEntry(NamedTuple):
    """The location of a command, and its panel in the help text."""

    module: str  # in octavo.cli
    function: str
    panel: str
    takes_vllm_flags: bool = False


COMMANDS = {
    "chat": CommandEntry("chat_command", "chat", "Generate and serve"),
    "complete": CommandEntry("complete", "complete", "Generate and serve"),
    "serve": CommandEntry("serve_command", "serve", "Generate and serve", takes_vllm_flags=True),
    "run-batch": CommandEntry(
        "run_batch_command", "run_batch", "Generate and serve", takes_vllm_flags=True
    ),
    "route": CommandEntry("route_command", "route", "Generate and serve"),
    "plan": CommandEntry("plan", "plan", "Inspect"),
    "doctor": CommandEntry("doctor", "doctor", "Inspect"),
    "profile": CommandEntry("profile_command", "profile", "Inspect"),
    "demo": CommandEntry("demo_command", "demo", "Learn"),
    "lesson": CommandEntry("lesson_command", "lesson", "Learn"),
    "replay": CommandEntry("replay_command", "replay", "Learn"),
    "compile": CommandEntry("compile_command", "compile_kernels", "Convert"),
    "quantize": CommandEntry("quantize", "quantize", "Convert"),
    "train-draft": CommandEntry("train_draft_command", "train_draft", "Convert"),
    "simulate": CommandEntry("simulate_command", "simulate", "Measure"),
    "simulate-cluster": CommandEntry("simulate_cluster", "simulate_cluster", "Measure"),
    "timeline": CommandEntry("timeline_command", "timeline", "Measure"),
    "bench": CommandEntry("", "", "Measure"),
}
# These modules and bench.py add their commands to one group.
BENCHES = (
    "bench_latency",
    "bench_report",
    "bench_scheduling",
    "bench_eviction",
    "bench_lab",
    "bench_serve",
    "bench_speculation",
    "bench_sweep",
    "bench_ablation",
    "bench_option_effects",
    "bench_deterministic",
    "bench_compare",
)


def application(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """Return the application with these commands."""
    app = Application(
        name="octavo",
        help="Octavo: an LLM inference engine small enough to read.",
        epilog="Without MODEL, commands except quantize use the embedded model. "
        "Set OCTAVO_DEBUG=1 to see tracebacks.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(octavo)
    for name in names:
        add_command(app, name, COMMANDS[name])
    return app


def add_command(app: typer.Typer, name: str, entry: CommandEntry) -> None:
    if name == "bench":
        modules = [importlib.import_module(f"octavo.cli.{module}") for module in BENCHES]
        app.add_typer(modules[0].app, name=name, rich_help_panel=entry.panel)
        return
    function = getattr(importlib.import_module(f"octavo.cli.{entry.module}"), entry.function)
    if entry.takes_vllm_flags:
        from octavo.cli.vllm_flags import VllmCommand

        app.command(name, cls=VllmCommand, rich_help_panel=entry.panel)(function)
    else:
        app.command(name, rich_help_panel=entry.panel)(function)


def show_version(is_set: bool) -> None:
    if is_set:
        print(f"octavo {__version__}")
        raise typer.Exit


def octavo(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    pass
