"""`octavo bench latency`: measures how long a client waits for tokens."""

from __future__ import annotations

from typing import Annotated

from octavo.cli.bench import ModelOrShape, app, finish, load_shape
from octavo.cli.options import Output, command, option, size, sizes
from octavo.cli.terminal import table
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions

LATENCY_OPTIONS = EngineOptions(max_model_len=4096, enable_prefix_caching=False)


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
    engine: EngineOptions = LATENCY_OPTIONS,
) -> None:
    """Measure time to first token and inter-token latency of concurrent requests."""
    from octavo.bench.latency import QUANTILES, measure
    from octavo.cli.progress import Steps

    request_counts = sizes(batches)
    with Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_shape(engine, model)
        llm.warm_up()
        progress.update(task, description="measuring", total=len(request_counts) * (1 + repeat))
        results = measure(
            llm, request_counts, prompt, tokens, repeat, lambda: progress.advance(task)
        )
    metric_columns = ["requests"]
    for metric in ("TTFT", "ITL"):
        metric_columns += [
            f"{metric} ms: p50",
            *(f"p{quantile}" for quantile in QUANTILES[1:]),
            "limit",
            "% of limit",
        ]
    rows = []
    for result in results:
        cells = []
        for metric in ("ttft", "itl"):
            cells += [f"{result[f'{metric}_p{quantile}_ms']:,.1f}" for quantile in QUANTILES]
            cells += [f"{result[f'{metric}_limit_ms']:,.2f}", f"{result[f'{metric}_of_limit']:.0%}"]
        rows.append((str(result["requests"]), *cells, f"{result['tok_s']:,.0f}"))
    table(None, (*metric_columns, "tok/s"), rows, left=())
    description = {
        "model": model or EMBEDDED,
        "device": llm.device.type,
        "dtype": str(llm.model_dtype).removeprefix("torch."),
        "prompt": prompt,
        "output": tokens,
    }
    finish({"bench": "latency", **description, "results": results}, output)
