"""`octavo bench latency`: measures how long a client waits for tokens."""

from __future__ import annotations

from typing import Annotated

from octavo.cli.bench import ModelOrShape, app
from octavo.cli.bench_session import Picture, bench_session
from octavo.cli.options import Output, bench_options, command, option, size, sizes
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions

LATENCY_OPTIONS = bench_options(max_model_len=4096, enable_prefix_caching=False)


@app.command()
@command
def latency(
    model: ModelOrShape = None,
    batches: Annotated[
        str,
        option(
            "Numbers of concurrent requests, separated by commas.", None, "N,...", show_default=True
        ),
    ] = "1,4,16",
    prompt: Annotated[
        int, option("Number of tokens per prompt.", None, "N", parser=size, show_default=True)
    ] = 128,
    tokens: Annotated[
        int, option("Number of tokens per reply.", None, "N", parser=size, show_default=True)
    ] = 128,
    repeat: Annotated[
        int, option("Runs per number of concurrent requests.", None, "N", show_default=True, min=1)
    ] = 3,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = LATENCY_OPTIONS,
) -> None:
    """Measure time to first token and inter-token latency of concurrent requests."""
    from octavo.bench.latency import measure_rows
    from octavo.bench.model_shapes import load_shape
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    request_counts = sizes(batches)
    run = BenchRun("latency", output, model=model or EMBEDDED, prompt=prompt, output=tokens)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_shape(engine, model)
        run.set_fact(device=llm.device.type, dtype=str(llm.model_dtype).removeprefix("torch."))
        llm.warm_up()
        progress.update(task, description="measuring", total=len(request_counts) * (1 + repeat))
        rows = measure_rows(
            llm, request_counts, prompt, tokens, repeat, lambda: progress.advance(task)
        )
        for row in rows:
            run.add_row(**row)
