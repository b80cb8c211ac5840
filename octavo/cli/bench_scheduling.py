"""`octavo bench batching-modes` and `octavo bench priority`: what scheduling is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from octavo.cli.bench import ModelOrShape, Output, app, finish, load_shape
from octavo.cli.options import command, option, size
from octavo.cli.terminal import say, table
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

SMALL = EngineOptions(max_num_seqs=16, max_model_len=1024, enable_prefix_caching=False)


@app.command("batching-modes")
@command
def batching_modes(
    model: ModelOrShape = None,
    modes: Annotated[
        str,
        option(
            "Batching modes to compare, separated by commas.", None, "NAME,...", show_default=True
        ),
    ] = "continuous,window,static,none",
    requests: Annotated[
        int, option("Number of requests.", None, "N", show_default=True, min=1)
    ] = 64,
    load: Annotated[
        float,
        option(
            "Arrival rate as a multiple of the capacity with continuous batching.",
            None,
            "X",
            show_default=True,
        ),
    ] = 1.5,
    longest: Annotated[
        int,
        option(
            "Tokens of the longest reply; the shortest reply has 16.",
            None,
            "N",
            parser=size,
            show_default=True,
        ),
    ] = 512,
    window_ms: Annotated[
        float,
        option(
            "Milliseconds to wait for a batch to fill in the mode window.",
            None,
            "X",
            show_default=True,
        ),
    ] = SMALL.window_ms,
    target_ms: Annotated[
        float,
        option(
            "Target inter-token latency in milliseconds in the mode adaptive.",
            None,
            "X",
            show_default=True,
        ),
    ] = SMALL.target_ms,
    output: Output = None,
    engine: EngineOptions = SMALL,
) -> None:
    """Compare continuous batching with batches that form and run to their end."""
    from octavo.bench.scheduling import modes as measure
    from octavo.cli.progress import Steps
    from octavo.core.batching import check_batching

    names = modes.split(",")
    check_batching(names, SMALL.max_batch, window_ms, target_ms)
    if engine.max_batch != SMALL.max_batch:
        raise InvalidRequest(
            "a batch has as many requests as run at once: use --max-num-seqs", "max_batch"
        )
    with Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_shape(engine, model)
        llm.warm_up()
        progress.update(task, description="measuring", total=1 + len(names))
        llm.schedule = replace(
            llm.schedule, batch_window=window_ms / 1e3, latency_target=target_ms / 1e3
        )
        r = measure(llm, names, requests, load, longest, lambda: progress.advance(task))
    columns = (
        *("batching", "tok/s", "of continuous"),
        *("TTFT p50", "p99 ms", "ITL p50", "p99 ms", "E2E p50", "p99 ms"),
    )
    rows = []
    for one in r["results"]:
        part = f"{1 / r['over_' + one['batching']]:.0%}" if f"over_{one['batching']}" in r else ""
        times = [
            f"{one[f'{name}_p{q}_ms']:,.0f}" for name in ("ttft", "itl", "e2e") for q in (50, 99)
        ]
        rows.append((one["batching"], f"{one['tok_s']:,.0f}", part, *times))
    say(
        f"{r['requests']} requests, {r['output_tokens']:,} tokens, "
        f"{r['requests_a_second']:.1f} a second, {r['batch_limit']} at once"
    )
    table(None, columns, rows)
    finish({"model": model or "smollm2", "device": llm.device.type, **r}, output)


BUSY = EngineOptions(max_num_seqs=16, max_model_len=2048, enable_prefix_caching=False)


@app.command()
@command
def priority(
    model: ModelOrShape = None,
    low: Annotated[
        int | None,
        option("Background requests. Default: as many as keep the engine busy.", None, "N", min=1),
    ] = None,
    high: Annotated[
        int,
        option(
            "Urgent requests sent while the engine is busy.", None, "N", show_default=True, min=1
        ),
    ] = 100,
    prompt: Annotated[
        int,
        option("Prompt tokens of an urgent request.", None, "N", parser=size, show_default=True),
    ] = 256,
    longest: Annotated[
        int,
        option(
            "Longest prompt of the background requests.", None, "N", parser=size, show_default=True
        ),
    ] = 1024,
    tokens: Annotated[
        int,
        option(
            "Longest reply of the background requests.", None, "N", parser=size, show_default=True
        ),
    ] = 128,
    output: Output = None,
    engine: EngineOptions = BUSY,
) -> None:
    """Measure the time to first token of urgent requests, on an idle and on a busy engine."""
    from octavo.bench.scheduling import LOADED
    from octavo.bench.scheduling import priority as measure
    from octavo.cli.progress import Steps

    with Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_shape(engine, model)
        llm.warm_up()
        progress.update(task, description="measuring", total=3)
        r = measure(
            llm,
            low,
            high,
            prompt,
            longest,
            tokens,
            engine.depth or 1,
            lambda: progress.advance(task),
        )
    columns = (
        *("urgent", "TTFT p50", "p99", "max ms", "others finished"),
        *("tok/s", "preempted", "recomputed", "paused"),
    )
    idle = (f"{r['idle'][f'ttft_p{q}_ms']:,.1f}" for q in (50, 99))
    rows = [("idle engine", *idle, *[""] * 6)]
    for name in ("fcfs", "priority"):
        one = r[name]
        rows.append(
            (
                f"full load, {name}",
                *(f"{one[f'ttft_{q}_ms']:,.1f}" for q in ("p50", "p99", "max")),
                f"{one['low_finished']} of {r['low']}",
                f"{one['low_tok_s']:,.0f}",
                f"{one['preemptions']}",
                f"{one['recomputed_tokens']:,}",
                f"{one['paused']:,}",
            )
        )
    say(
        f"{high} urgent requests of {prompt} tokens, every {r['every_ms']:,.0f} ms; {r['rows']} rows"
    )
    table(None, columns, rows)
    say(
        f"p99 under load is {r['ratio_of_p99']:.2f} times an idle engine's, and "
        f"{r['ratio_p99']:.2f} times its p50 (p50: {r['ratio_p50']:.2f}); "
        f"the others have {r['low_speed']:.0%} of their speed under fcfs"
    )
    if (loaded := r["priority"]["loaded"]) < LOADED:
        say(
            f"[bold yellow]not to be trusted[/bold yellow]: {loaded:.0%} came under full load; "
            "raise --low"
        )
    finish({"model": model or "smollm2", "device": llm.device.type, **r}, output)
