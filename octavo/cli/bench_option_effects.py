"""`octavo bench options`: measures what changing one engine option does to each figure."""

from __future__ import annotations

from typing import Annotated

from octavo.cli.bench import ModelOrShape, app
from octavo.cli.bench_session import Picture, Rounds, bench_session
from octavo.cli.options import Output, bench_options, command, option
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

DEFAULTS = bench_options()


@app.command("options")
@command
def option_effects(
    model: ModelOrShape = None,
    variations: Annotated[
        str | None,
        option(
            "Variations to measure, separated by commas, such as small-steps,int8-kv. "
            "Default: all.",
            None,
            "NAME,...",
        ),
    ] = None,
    repeat: Rounds = 3,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Change one engine option at a time under a mixed load: throughput, latency, KV memory."""
    from octavo.bench.option_effects import NAMES, run_options
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    names = variations.split(",") if variations else list(NAMES)
    if unknown := sorted(set(names) - set(NAMES)):
        raise InvalidRequest(
            f"unknown variation {', '.join(unknown)}: use {', '.join(NAMES)}", "variations"
        )
    run = BenchRun("options", output, model=model or EMBEDDED)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("loading", total=len(names))

        def advance(name: str) -> None:
            progress.update(task, description=name, advance=1)

        run_options(run, model, engine, names, repeat, advance)
