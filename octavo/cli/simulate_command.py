"""`octavo simulate`: plays a trace under several policies and batching modes, with a cost model."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import EMBEDDED, command, option
from octavo.cli.terminal import say, table
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.bench.calibrate import MeasuredStep
    from octavo.core.simulate import Costs
    from octavo.core.trace import TraceEntry
    from octavo.llm import LLM

# Short prompts with long replies, long prompts with short replies, and both. Otherwise the number of
# sequences and the KV that they read would always grow together, and the fit could not tell them
# apart.
CALIBRATION = (
    "poisson:rate=8,n=24,prompt=4-16,output=32-128,seed=1",
    "poisson:rate=2,n=16,prompt=300-800,output=8-64,seed=2",
    "poisson:rate=6,n=32,prompt=16-400,output=16-96,seed=3",
)
OTHER = "poisson:rate=3,n=32,prompt=8-200,output=32-160,shared=64,groups=2,seed=4"
COLUMNS = (
    ("TTFT p50", "ttft_p50_ms"), ("p99 ms", "ttft_p99_ms"), ("ITL p50", "itl_p50_ms"), ("p99 ms", "itl_p99_ms"),
    ("E2E p50", "e2e_p50_ms"), ("p99 ms", "e2e_p99_ms"), ("tok/s", "tok_s"), ("preempted", "preemptions"),
    ("recomputed", "recomputed_tokens"), ("cache hits", "cache_hits"),
)  # fmt: skip
SIMULATED = EngineOptions(max_model_len=2048)


@command
def simulate(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="A file of --record-trace, or poisson:rate=4,n=100,prompt=32-512,output=16-256,"
            "shared=0,groups=1,urgent=0,tenants=1,seed=0.",
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
    max_batch: Annotated[
        int,
        option(
            "Maximum requests per batch in the modes window and static.",
            None,
            "N",
            show_default=True,
        ),
    ] = 8,
    window_ms: Annotated[
        float,
        option(
            "Milliseconds to wait for a batch to fill in the mode window.",
            None,
            "X",
            show_default=True,
        ),
    ] = 20.0,
    target_ms: Annotated[
        float,
        option(
            "Target inter-token latency in milliseconds in the mode adaptive.",
            None,
            "X",
            show_default=True,
        ),
    ] = 50.0,
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
            f"Run the trace, or a built-in one, on this model ({EMBEDDED}: the embedded one) and fit costs.",
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
    output: Annotated[
        Path | None, option("Write the result to this file as JSON.", None, "FILE", "--json")
    ] = None,
    engine: EngineOptions = SIMULATED,
) -> None:
    """Compare policies without a model: [bold]octavo simulate poisson:rate=8,n=200,urgent=0.1 --policy fcfs --policy priority[/bold]"""
    from octavo.config import CacheConfig, ScheduleConfig
    from octavo.core.batching import MODES_OF_OPTION, check_batching
    from octavo.core.simulate import EMBEDDED_CPU
    from octavo.core.simulate import simulate as run
    from octavo.core.trace import read

    if calibrate is not None:
        traces = [read(one) for one in ([trace] if trace else CALIBRATION)]
        llm = _load(replace(engine, depth=depth), calibrate)
        _finish(_calibrate(llm, traces, read(OTHER), calibrate, out, picture), output)
        return
    if trace is None:
        raise InvalidRequest("give a TRACE: a file, or poisson:rate=4,n=100", "trace")
    check_batching(batching or ["continuous"], max_batch, window_ms, target_ms)
    entries = read(trace)
    used = EMBEDDED_CPU if costs is None else _read_costs(costs)
    slots = engine.max_num_seqs
    block_size = engine.block_size or 16
    max_model_len = engine.max_model_len or 2048
    cache = CacheConfig(
        block_size=block_size,
        num_blocks=engine.num_gpu_blocks_override or 2 * slots * -(-max_model_len // block_size),
        prefix_caching=engine.enable_prefix_caching,
    )
    schedule = ScheduleConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=max(engine.max_num_batched_tokens or 2048, slots),
        max_model_len=max_model_len,
        depth=depth,
        max_batch=max_batch,
        batch_window=window_ms / 1e3,
        latency_target=target_ms / 1e3,
        short_prompt_share=engine.short_prompt_share,
    )
    results = []
    for name in scheduling_policy or ["fcfs"]:
        for mode in batching or ["continuous"]:
            start = time.perf_counter()
            found = run(
                entries, used, cache, replace(schedule, policy=name, batching=mode)
            ).summary()
            results.append(
                {
                    "policy": name,
                    "batching": mode,
                    **found,
                    "simulated_in_s": time.perf_counter() - start,
                }
            )
    _table(results)
    result: dict[str, Any] = {"simulate": trace, "costs": asdict(used), "results": results}
    if verify is not None:
        mode = results[0]["batching"]
        given = {"max_batch": max_batch, "window_ms": window_ms, "target_ms": target_ms}
        used_there: dict[str, Any] = {
            name: value for name, value in given.items() if mode in MODES_OF_OPTION[name]
        }
        engine = replace(
            engine,
            depth=depth,
            scheduling_policy=results[0]["policy"],
            batching=mode,
            **used_there,
        )
        result["verify"] = _verify(_load(engine, verify), entries, used, results[0], picture)
    _finish(result, output)


def _finish(result: dict[str, Any], output: Path | None) -> None:
    line = json.dumps(result)
    print(line, flush=True)
    if output is not None:
        output.write_text(line + "\n")


def _load(engine: EngineOptions, model: str) -> LLM:
    from octavo.cli.bench import load_shape

    llm = load_shape(engine, model)
    llm.warm_up()
    return llm


def _read_costs(path: Path) -> Costs:
    from octavo.core.simulate import FEATURES, Costs

    try:
        found = json.loads(path.read_text())["costs"]
        return Costs(**{name: float(found[name]) for name in FEATURES})
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{path} was not written by `octavo simulate --calibrate` ({error!r})", "costs"
        ) from None


def _calibrate(
    llm: LLM,
    traces: list[list[TraceEntry]],
    other: list[TraceEntry],
    model: str,
    out: Path | None,
    picture: Path | None,
) -> dict[str, Any]:
    from octavo.bench.calibrate import errors, fit, record

    record(llm, traces[-1][:8])  # First uses compile, capture and allocate.
    # The traces run twice, before and after the other one, so that a machine that becomes slower or
    # faster does not favour either.
    steps = [step for trace in traces for step in record(llm, trace)[0]]
    between = record(llm, other)[0]
    steps += [step for trace in traces for step in record(llm, trace)[0]]
    costs = fit(steps)
    played = {"calibrated": steps, "another": between}
    found = {name: errors(costs, steps) for name, steps in played.items()}
    result = {"model": model, "device": llm.device.type, "costs": asdict(costs), "errors": found}
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    _predictions(found)
    _draw(costs, played, picture)
    return result


def _verify(
    llm: LLM, trace: list[TraceEntry], costs: Costs, simulated: dict[str, Any], picture: Path | None
) -> dict[str, Any]:
    from octavo.bench.calibrate import errors, record

    record(llm, trace[:8])
    steps, report = record(llm, trace)
    real = {"policy": simulated["policy"], "batching": simulated["batching"], **report.summary()}
    print("The first of these, on the model:")
    _table([real])
    found = errors(costs, steps)
    _predictions({"this trace": found})
    _draw(costs, {"this trace": steps}, picture)
    return {"real": real, "steps": found}


def _table(results: list[dict[str, Any]]) -> None:
    levels = list(results[0].get("ttft_p99_ms_by_priority", {}))
    columns = (
        "policy",
        "batching",
        *(name for name, _ in COLUMNS),
        *(f"priority {level}" for level in levels),
    )
    rows = []
    for r in results:
        shown = [
            f"{r[key]:.0%}" if key == "cache_hits" else f"{r[key]:,.{_digits(r[key])}f}"
            for _, key in COLUMNS
        ]
        shown += [f"{r['ttft_p99_ms_by_priority'][level]:,.0f}" for level in levels]
        rows.append((r["policy"], r["batching"], *shown))
    table(None, columns, rows, left=(0, 1))
    if levels:
        say(
            "[dim]priority N: p99 of the time to the first token, ms, of requests of this "
            "priority[/dim]"
        )


def _digits(value: float) -> int:
    return 1 if 0 < value < 100 and value != int(value) else 0


def _predictions(found: dict[str, dict[str, Any]]) -> None:
    for name, e in found.items():
        print(
            f"{name}: {e['steps']} steps took {e['real_s']:.2f} s, predicted "
            f"{e['predicted_s']:.2f} s ({e['total_error']:+.1%}); a step's error is "
            f"{e['median_step_error']:.1%} in the median, {e['p90_step_error']:.1%} in the worst of ten"
        )


def _draw(costs: Costs, played: dict[str, list[MeasuredStep]], picture: Path | None) -> None:
    from octavo.bench.calibrate import panel
    from octavo.bench.picture import draw

    if picture is not None:
        draw(picture, panel(costs, played))
