"""`octavo bench ablation`: measures what each mechanism contributes."""

from __future__ import annotations

from typing import Annotated

from octavo.cli.bench import ModelOrShape, app
from octavo.cli.bench_session import Picture, Rounds, bench_session
from octavo.cli.options import Output, bench_options, command, option
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

ABLATION = bench_options(max_num_seqs=16)


@app.command()
@command
def ablation(
    model: ModelOrShape = None,
    mechanisms: Annotated[
        str | None,
        option(
            "Mechanisms to turn off, separated by commas, such as kv-cache,paging. Default: all.",
            None,
            "NAME,...",
        ),
    ] = None,
    repeat: Rounds = 3,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = ABLATION,
) -> None:
    """Turn off one mechanism at a time, and measure what each contributes."""
    from octavo.bench.ablation import MECHANISMS, run_ablation
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    names = mechanisms.split(",") if mechanisms else list(MECHANISMS)
    if unknown := sorted(set(names) - set(MECHANISMS)):
        raise InvalidRequest(
            f"unknown mechanism {', '.join(unknown)}: use {', '.join(MECHANISMS)}", "mechanisms"
        )
    run = BenchRun("ablation", output, model=model or EMBEDDED)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("loading", total=len(names))

        def advance(name: str) -> None:
            progress.update(task, description=name, advance=1)

        run_ablation(run, model, engine, names, repeat, advance)
