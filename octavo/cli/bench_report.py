"""`octavo bench claims` and `octavo bench report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.bench import app
from octavo.cli.bench_session import Picture, Rounds, bench_session
from octavo.cli.options import Output, bench_options, command, option
from octavo.cli.terminal import say
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

CLAIM_OPTIONS = bench_options()


@app.command("seeds", hidden=True)  # the name of the command before it was called claims
@app.command()
@command
def claims(
    claims: Annotated[
        str | None,
        option("Claims to repeat, separated by commas. Default: all.", None, "NAME,..."),
    ] = None,
    repeat: Rounds = 3,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = CLAIM_OPTIONS,
) -> None:
    """Repeat the headline claims of five small engines under fair conditions."""
    from octavo.bench.claims import CLAIMS, ClaimBench
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    names = claims.split(",") if claims else list(CLAIMS)
    if unknown := sorted(set(names) - set(CLAIMS)):
        raise InvalidRequest(
            f"unknown claim {', '.join(unknown)}: use {', '.join(CLAIMS)}", "claims"
        )
    run = BenchRun("claims", output)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("starting", total=len(names))

        def advance(name: str) -> None:
            progress.update(task, description=name, advance=1)

        ClaimBench(run, engine, repeat).measure(names, advance)


@app.command()
@command
def report(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT...", help="Result files, or directories of result files."),
    ],
    out: Annotated[
        Path, option("HTML file to write.", None, "FILE", "--out", show_default=True)
    ] = Path("report.html"),
) -> None:
    """Turn result files into one HTML page with tables and charts."""
    from octavo.bench.report import write_report

    count, left_out = write_report(results, out)
    for name, reason in left_out.items():
        say(f"[yellow]left out[/yellow]: {name}: {reason}")
    say(f"{out}: {count} results")
