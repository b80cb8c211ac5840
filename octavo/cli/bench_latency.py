"""`octavo bench latency`: how long a caller waits."""

from __future__ import annotations

from typing import Annotated

from octavo.cli.bench import ModelOrShape, Output, app, finish, load_shape
from octavo.cli.options import command, option, size, sizes
from octavo.cli.terminal import table
from octavo.engine_options import EngineOptions

LATENCY = EngineOptions(max_model_len=4096, enable_prefix_caching=False)


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
    output: Output = None,
    engine: EngineOptions = LATENCY,
) -> None:
    """Measure time to first token and inter-token latency of concurrent requests."""
    from octavo.bench.latency import QUANTILES, measure
    from octavo.cli.progress import Steps

    counts = sizes(batches)
    with Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_shape(engine, model)
        llm.warm_up()
        progress.update(task, description="measuring", total=len(counts) * (1 + repeat))
        results = measure(llm, counts, prompt, tokens, repeat, lambda: progress.advance(task))
    columns = ["requests"]
    for name in ("TTFT", "ITL"):
        columns += [f"{name} ms: p50", *(f"p{q}" for q in QUANTILES[1:]), "limit", "of limit"]
    rows = []
    for r in results:
        cells = []
        for name in ("ttft", "itl"):
            cells += [f"{r[f'{name}_p{q}_ms']:,.1f}" for q in QUANTILES]
            cells += [f"{r[f'{name}_limit_ms']:,.2f}", f"{r[f'{name}_of_limit']:.0%}"]
        rows.append((str(r["requests"]), *cells, f"{r['tok_s']:,.0f}"))
    table(None, (*columns, "tok/s"), rows, left=())
    name = str(llm.model_dtype).removeprefix("torch.")
    about = {
        "model": model or "smollm2",
        "device": llm.device.type,
        "dtype": name,
        "prompt": prompt,
        "output": tokens,
    }
    finish({"bench": "latency", **about, "results": results}, output)
