"""`octavo simulate`: compares policies and batching modes on a trace, with a cost model."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import Output, command, engine_option, option
from octavo.cli.terminal import print_result, say, table
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.bench.calibrate import MeasuredStep
    from octavo.config import CacheConfig, ScheduleConfig
    from octavo.core.simulate import Costs
    from octavo.core.trace import TraceEntry
    from octavo.llm import LLM

# Short prompts with long replies, long prompts with short replies, and both. With one kind of trace
# the number of sequences and the KV that they read would always rise together.
CALIBRATION_TRACES = (
    "poisson:rate=8,n=24,prompt=4-16,output=32-128,seed=1",
    "poisson:rate=2,n=16,prompt=300-800,output=8-64,seed=2",
    "poisson:rate=6,n=32,prompt=16-400,output=16-96,seed=3",
)
CHECK_TRACE = "poisson:rate=3,n=32,prompt=8-200,output=32-160,shared=64,groups=2,seed=4"
COLUMNS = (
    ("TTFT p50", "ttft_p50_ms"),
    ("p99 ms", "ttft_p99_ms"),
    ("ITL p50", "itl_p50_ms"),
    ("p99 ms", "itl_p99_ms"),
    ("E2E p50", "e2e_p50_ms"),
    ("p99 ms", "e2e_p99_ms"),
    ("tok/s", "tok_s"),
    ("preempted", "preemptions"),
    ("recomputed", "recomputed_tokens"),
    ("cache hits", "cache_hits"),
)
SIMULATED = EngineOptions(max_model_len=2048)


@command
def simulate(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="A file of --record-trace, or poisson:rate=4,n=100,prompt=32-512,output=16-256,"
            "shared=0,groups=1,skew=0,urgent=0,tenants=1,seed=0.",
            show_default=False,
        ),
    ] = None,
    scheduling_policy: Annotated[
        list[str] | None,
        option(
            "Scheduling policy to compare. May be given several times. Default: fcfs.",
            None,
            "NAME",
            "--policy",
        ),
    ] = None,
    batching: Annotated[
        list[str] | None,
        option(
            "Batching mode to compare. May be given several times. Default: continuous.",
            None,
            "NAME",
        ),
    ] = None,
    max_batch: Annotated[int, engine_option("max_batch")] = EngineOptions.max_batch,
    window_ms: Annotated[float, engine_option("window_ms")] = EngineOptions.window_ms,
    target_ms: Annotated[float, engine_option("target_ms")] = EngineOptions.target_ms,
    depth: Annotated[
        int, option("Number of steps in flight.", None, "N", show_default=True, min=1, max=3)
    ] = 1,
    costs: Annotated[
        Path | None,
        option(
            "File with step costs, written by --calibrate. Default: the embedded model on a CPU.",
            None,
            "FILE",
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        option(
            "Run the trace, or a built-in trace, on this model and fit the step costs to the "
            f"measured times. {EMBEDDED} is the embedded model.",
            None,
            "MODEL",
        ),
    ] = None,
    verify: Annotated[
        str | None, option("Also run the trace on this model and compare.", None, "MODEL")
    ] = None,
    out: Annotated[
        Path | None, option("File for the step costs that --calibrate measures.", None, "FILE")
    ] = None,
    picture: Annotated[
        Path | None, option("Draw predicted and measured steps in this SVG file.", None, "FILE")
    ] = None,
    output: Output = None,
    engine: EngineOptions = SIMULATED,
) -> None:
    """Compare policies without a model: [bold]octavo simulate poisson:rate=8[/bold]"""
    from octavo.config import ScheduleConfig
    from octavo.core.batching import MODES_OF_OPTION, check_batching
    from octavo.core.simulate import EMBEDDED_CPU
    from octavo.core.trace import read

    if calibrate is not None:
        traces = [read(spec) for spec in ([trace] if trace else CALIBRATION_TRACES)]
        llm = _load(replace(engine, depth=depth), calibrate)
        _finish(_calibrate(llm, traces, calibrate, out, picture), output)
        return
    if trace is None:
        raise InvalidRequest(
            "a TRACE is missing: give a file, or a description such as poisson:rate=4,n=100",
            "trace",
        )
    check_batching(batching or ["continuous"], max_batch, window_ms, target_ms)
    entries = read(trace)
    step_costs = EMBEDDED_CPU if costs is None else read_costs(costs)
    schedule = ScheduleConfig(
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=max(engine.max_num_batched_tokens or 2048, engine.max_num_seqs),
        max_model_len=engine.max_model_len or 2048,
        depth=depth,
        max_batch=max_batch,
        batch_window=window_ms / 1e3,
        latency_target=target_ms / 1e3,
        short_prompt_share=engine.short_prompt_share,
    )
    schedules = [
        replace(schedule, policy=policy, batching=mode)
        for policy in scheduling_policy or ["fcfs"]
        for mode in batching or ["continuous"]
    ]
    cache = _cache_config(engine)
    results = [_simulate(entries, step_costs, cache, candidate) for candidate in schedules]
    _print_table(results)
    result: dict[str, Any] = {"simulate": trace, "costs": asdict(step_costs), "results": results}
    if verify is not None:
        mode = schedules[0].batching
        batching_options = {"max_batch": max_batch, "window_ms": window_ms, "target_ms": target_ms}
        mode_options: dict[str, Any] = {
            name: value for name, value in batching_options.items() if mode in MODES_OF_OPTION[name]
        }
        engine = replace(
            engine,
            depth=depth,
            scheduling_policy=schedules[0].policy,
            batching=mode,
            **mode_options,
        )
        result["verify"] = _verify(_load(engine, verify), entries, step_costs, results[0], picture)
    _finish(result, output)


def _cache_config(engine: EngineOptions) -> CacheConfig:
    """Return a KV cache that holds twice the batch at full length, unless the user gives a size."""
    from octavo.config import CacheConfig

    block_size = engine.block_size or 16
    max_model_len = engine.max_model_len or 2048
    default_blocks = 2 * engine.max_num_seqs * -(-max_model_len // block_size)
    return CacheConfig(
        block_size=block_size,
        num_blocks=engine.num_gpu_blocks_override or default_blocks,
        prefix_caching=engine.reuses_prefixes,
        keeps_kv=engine.kv_cache,
        contiguous=engine.kv_allocation == "contiguous",
    )


def _simulate(
    trace: list[TraceEntry], costs: Costs, cache: CacheConfig, schedule: ScheduleConfig
) -> dict[str, Any]:
    from octavo.core.simulate import simulate

    start = time.perf_counter()
    summary = simulate(trace, costs, cache, schedule).summary()
    return {
        "policy": schedule.policy,
        "batching": schedule.batching,
        **summary,
        "simulated_in_s": time.perf_counter() - start,
    }


def _finish(result: dict[str, Any], output: Path | None) -> None:
    result_line = json.dumps(result)
    print_result(result_line)
    if output is not None:
        output.write_text(result_line + "\n")


def _load(engine: EngineOptions, model: str) -> LLM:
    from octavo.bench.model_shapes import load_shape

    llm = load_shape(engine, model)
    llm.warm_up()
    return llm


def read_costs(path: Path) -> Costs:
    from octavo.core.simulate import FEATURES, Costs

    try:
        values = json.loads(path.read_text())["costs"]
        return Costs(**{name: float(values[name]) for name in FEATURES})
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{path} was not written by `octavo simulate --calibrate` ({error!r}): write one with "
            "--calibrate MODEL --out FILE",
            "costs",
        ) from None


def _calibrate(
    llm: LLM,
    traces: list[list[TraceEntry]],
    model: str,
    out: Path | None,
    picture: Path | None,
) -> dict[str, Any]:
    from octavo.bench.calibrate import errors, fit, record
    from octavo.core.trace import read

    record(llm, traces[-1][:8])  # warm-up: compiles kernels, captures graphs, allocates memory
    # The traces run before and after CHECK_TRACE, so that slow drift of the machine cancels out.
    steps = [step for trace in traces for step in record(llm, trace)[0]]
    other_steps = record(llm, read(CHECK_TRACE))[0]
    steps += [step for trace in traces for step in record(llm, trace)[0]]
    costs = fit(steps)
    steps_by_trace = {"calibrated": steps, "another": other_steps}
    errors_by_trace = {name: errors(costs, steps) for name, steps in steps_by_trace.items()}
    result = {
        "model": model,
        "device": llm.device.type,
        "costs": asdict(costs),
        "errors": errors_by_trace,
    }
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    _print_errors(errors_by_trace)
    _draw(costs, steps_by_trace, picture)
    return result


def _verify(
    llm: LLM, trace: list[TraceEntry], costs: Costs, simulated: dict[str, Any], picture: Path | None
) -> dict[str, Any]:
    from octavo.bench.calibrate import errors, record

    record(llm, trace[:8])
    steps, report = record(llm, trace)
    measured = {
        "policy": simulated["policy"],
        "batching": simulated["batching"],
        **report.summary(),
    }
    print("The first configuration, run on the model:")
    _print_table([measured])
    step_errors = errors(costs, steps)
    _print_errors({"this trace": step_errors})
    _draw(costs, {"this trace": steps}, picture)
    return {"real": measured, "steps": step_errors}


def _print_table(results: list[dict[str, Any]]) -> None:
    levels = list(results[0].get("ttft_p99_ms_by_priority", {}))
    columns = (
        "policy",
        "batching",
        *(name for name, _ in COLUMNS),
        *(f"priority {level}" for level in levels),
    )
    rows = []
    for result in results:
        cells = [
            f"{result[key]:.0%}"
            if key == "cache_hits"
            else f"{result[key]:,.{_decimals(result[key])}f}"
            for _, key in COLUMNS
        ]
        cells += [f"{result['ttft_p99_ms_by_priority'][level]:,.0f}" for level in levels]
        rows.append((result["policy"], result["batching"], *cells))
    table(None, columns, rows, left=(0, 1))
    if levels:
        say("[dim]priority N: p99 of the TTFT of requests with this priority, in ms[/dim]")


def _decimals(value: float) -> int:
    return 1 if 0 < value < 100 and value != int(value) else 0


def _print_errors(errors_by_trace: dict[str, dict[str, Any]]) -> None:
    for name, step_errors in errors_by_trace.items():
        print(
            f"{name}: {step_errors['steps']} steps took {step_errors['real_s']:.2f} s, predicted "
            f"{step_errors['predicted_s']:.2f} s ({step_errors['total_error']:+.1%}); the error of "
            f"a step is {step_errors['median_step_error']:.1%} (median) and "
            f"{step_errors['p90_step_error']:.1%} (90th percentile)"
        )


def _draw(
    costs: Costs, steps_by_trace: dict[str, list[MeasuredStep]], picture: Path | None
) -> None:
    from octavo.bench.calibrate import panel
    from octavo.bench.picture import draw

    if picture is not None:
        draw(picture, panel(costs, steps_by_trace))
