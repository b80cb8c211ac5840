"""`octavo bench deterministic`: measures what batch-invariant kernels cost."""

from __future__ import annotations

from typing import Annotated

from octavo.cli.bench import ModelOrShape, app
from octavo.cli.bench_session import Picture, Rounds, bench_session
from octavo.cli.options import Output, bench_options, command, option
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

DETERMINISTIC = bench_options(max_model_len=4096)


@app.command()
@command
def deterministic(
    model: ModelOrShape = None,
    workloads: Annotated[
        str,
        option(
            "Workloads of octavo bench throughput to run, separated by commas.",
            None,
            "NAME,...",
            show_default=True,
        ),
    ] = "single,four",
    repeat: Rounds = 3,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = DETERMINISTIC,
) -> None:
    """Measure the speed with and without --deterministic, in alternating runs."""
    from octavo.bench.deterministic import run_deterministic
    from octavo.bench.result_file import BenchRun
    from octavo.bench.workloads import WORKLOADS
    from octavo.cli.progress import Steps

    names = workloads.split(",")
    if unknown := sorted(set(names) - set(WORKLOADS)):
        raise InvalidRequest(
            f"unknown workload {', '.join(unknown)}: use {', '.join(WORKLOADS)}", "workloads"
        )
    run = BenchRun("deterministic", output, model=model or EMBEDDED)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("loading", total=len(names))

        def advance(name: str) -> None:
            progress.update(task, description=name, advance=1)

        run_deterministic(run, model, engine, names, repeat, advance)
