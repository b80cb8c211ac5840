"""`octavo bench batching-modes` and `octavo bench priority`: measure scheduling."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from octavo.cli.bench import ModelOrShape, app, finish
from octavo.cli.options import Output, bench_options, command, engine_option, option, size
from octavo.cli.terminal import say, table
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

MODES_OPTIONS = bench_options(max_num_seqs=16, max_model_len=1024, enable_prefix_caching=False)


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
    window_ms: Annotated[float, engine_option("window_ms")] = EngineOptions.window_ms,
    target_ms: Annotated[float, engine_option("target_ms")] = EngineOptions.target_ms,
    output: Output = None,
    engine: EngineOptions = MODES_OPTIONS,
) -> None:
    """Compare continuous batching with static batching and with other batching modes."""
    from octavo.bench.model_shapes import load_shape
    from octavo.bench.scheduling import modes as measure
    from octavo.cli.progress import Steps
    from octavo.core.batching import check_batching

    mode_names = modes.split(",")
    check_batching(mode_names, MODES_OPTIONS.max_batch, window_ms, target_ms)
    if engine.max_batch != MODES_OPTIONS.max_batch:
        raise InvalidRequest(
            "--max-batch has no effect here: use --max-num-seqs, which sets the size of a batch",
            "max_batch",
        )
    with Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_shape(engine, model)
        llm.warm_up()
        progress.update(task, description="measuring", total=1 + len(mode_names))
        llm.schedule = replace(
            llm.schedule, batch_window=window_ms / 1e3, latency_target=target_ms / 1e3
        )
        report = measure(llm, mode_names, requests, load, longest, lambda: progress.advance(task))
    columns = (
        *("batching", "tok/s", "% of continuous"),
        *("TTFT p50", "p99 ms", "ITL p50", "p99 ms", "E2E p50", "p99 ms"),
    )
    rows = []
    for mode_result in report["results"]:
        mode = mode_result["batching"]
        share = f"{1 / report[f'over_{mode}']:.0%}" if f"over_{mode}" in report else ""
        latencies = [
            f"{mode_result[f'{metric}_p{quantile}_ms']:,.0f}"
            for metric in ("ttft", "itl", "e2e")
            for quantile in (50, 99)
        ]
        rows.append((mode, f"{mode_result['tok_s']:,.0f}", share, *latencies))
    say(
        f"{report['requests']} requests with {report['output_tokens']:,} output tokens, "
        f"{report['requests_a_second']:.1f} requests/s, batch size {report['batch_limit']}"
    )
    table(None, columns, rows)
    finish({"model": model or EMBEDDED, "device": llm.device.type, **report}, output)


PRIORITY_OPTIONS = bench_options(max_num_seqs=16, max_model_len=2048, enable_prefix_caching=False)


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
    engine: EngineOptions = PRIORITY_OPTIONS,
) -> None:
    """Measure the time to first token of urgent requests, on an idle and on a busy engine."""
    from octavo.bench.model_shapes import load_shape
    from octavo.bench.scheduling import MIN_LOADED, PriorityLoad
    from octavo.bench.scheduling import priority as measure
    from octavo.cli.progress import Steps

    with Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_shape(engine, model)
        llm.warm_up()
        progress.update(task, description="measuring", total=3)
        load = PriorityLoad(low, high, prompt, longest, tokens)
        report = measure(llm, load, engine.depth or 1, lambda: progress.advance(task))
    column_names = (
        *("urgent", "TTFT p50", "p99", "max ms", "background finished"),
        *("tok/s", "preempted", "recomputed", "paused"),
    )
    idle = (f"{report['idle'][f'ttft_p{quantile}_ms']:,.1f}" for quantile in (50, 99))
    rows = [("idle engine", *idle, *[""] * 6)]
    for policy in ("fcfs", "priority"):
        policy_result = report[policy]
        rows.append(
            (
                f"full load, {policy}",
                *(
                    f"{policy_result[f'ttft_{quantile}_ms']:,.1f}"
                    for quantile in ("p50", "p99", "max")
                ),
                f"{policy_result['low_finished']} of {report['low']}",
                f"{policy_result['low_tok_s']:,.0f}",
                f"{policy_result['preemptions']}",
                f"{policy_result['recomputed_tokens']:,}",
                f"{policy_result['paused']:,}",
            )
        )
    say(
        f"{high} urgent requests of {prompt} tokens, one every {report['every_ms']:,.0f} ms; "
        f"{report['rows']} batch slots"
    )
    table(None, column_names, rows)
    say(
        f"the p99 under load is {report['ratio_of_p99']:.2f} times the p99 of an idle engine and "
        f"{report['ratio_p99']:.2f} times its p50 (p50: {report['ratio_p50']:.2f}); background "
        f"requests run at {report['low_speed']:.0%} of their speed with fcfs"
    )
    if (loaded_share := report["priority"]["loaded"]) < MIN_LOADED:
        say(
            f"[bold yellow]not reliable[/bold yellow]: only {loaded_share:.0%} of the urgent "
            "requests arrived under full load; raise --low"
        )
    finish({"model": model or EMBEDDED, "device": llm.device.type, **report}, output)
