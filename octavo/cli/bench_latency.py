"""`octavo bench latency`: how long a caller waits."""

from __future__ import annotations

from typing import Annotated

from octavo.cli.bench import ModelOrShape, Output, app, finish, load_shape
from octavo.cli.options import EngineOptions, command, option, size, sizes

LATENCY = EngineOptions(max_model_len=4096, no_prefix_caching=True)


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
    """Time to first token and inter-token latency of concurrent requests, with the hardware limit."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from octavo.bench.latency import QUANTILES, measure
    from octavo.cli.progress import Steps

    counts = sizes(batches)
    with Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_shape(engine, model)
        llm.warm_up()
        progress.update(task, description="measuring", total=len(counts) * (1 + repeat))
        results = measure(llm, counts, prompt, tokens, repeat, lambda: progress.advance(task))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("ms: p50", *(f"p{q}" for q in QUANTILES[1:]), "limit", "of limit")
    for column in (
        "requests",
        *(f"TTFT {columns[0]}", *columns[1:]),
        *(f"ITL {columns[0]}", *columns[1:]),
        "tok/s",
    ):
        table.add_column(column, justify="right")
    for r in results:
        cells = []
        for name in ("ttft", "itl"):
            cells += [f"{r[f'{name}_p{q}_ms']:,.1f}" for q in QUANTILES]
            cells += [f"{r[f'{name}_limit_ms']:,.2f}", f"{r[f'{name}_of_limit']:.0%}"]
        table.add_row(str(r["requests"]), *cells, f"{r['tok_s']:,.0f}")
    console = Console(highlight=False)
    console.width = max(console.width, 110)
    console.print(table)
    name = str(llm.model_dtype).removeprefix("torch.")
    about = {
        "model": model or "smollm2",
        "device": llm.device.type,
        "dtype": name,
        "prompt": prompt,
        "output": tokens,
    }
    finish({"bench": "latency", **about, "results": results}, output)
