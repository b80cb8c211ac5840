"""`octavo bench ...`: measurements as tables.

The result as JSON is the last line on stdout if that is not a terminal; --json FILE writes it to a
file.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.bench_session import Picture, bench_session
from octavo.cli.options import (
    Model,
    Output,
    bench_options,
    command,
    engine_option,
    flag,
    load_llm,
    option,
    size,
    sizes,
)
from octavo.cli.plain_help import Application
from octavo.cli.terminal import in_bytes, print_result, say, short, table
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

app = Application(
    help="Measure speed: each bench prints a table, and JSON as its last line into a pipe.",
    no_args_is_help=True,
)


def finish(result: dict[str, Any], output: Path | None) -> None:
    """Print the result (print_result), then write it to the file of --json.

    Printing comes first: a file that cannot be written must not lose the measurement."""
    from octavo.bench.provenance import provenance

    line = json.dumps(result | {"partial": False, "provenance": provenance()})
    print_result(line)
    if output is not None:
        output.write_text(line + "\n")


BATCHING = bench_options(max_num_seqs=4, max_model_len=256, enable_prefix_caching=False)


@app.command()
@command
def batching(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model to measure. Default: random weights in the shape of TinyLlama-1.1B.",
        ),
    ] = None,
    repeat: Annotated[
        int, option("Interleaved measurements per side.", None, "N", show_default=True, min=1)
    ] = 3,
    max_tokens: Annotated[
        int, option("Tokens to generate per prompt.", None, "N", parser=size, show_default=True)
    ] = 32,
    output: Output = None,
    engine: EngineOptions = BATCHING,
) -> None:
    """Compare four requests in one batch with the same requests one after another."""
    from octavo.bench.measure_batching import measure
    from octavo.bench.model_shapes import TINYLLAMA_1B
    from octavo.cli.progress import Steps
    from octavo.memory import parameter_count

    with Steps() as progress:
        task = progress.add_task("loading", total=None)
        if model is None:
            dummy = replace(engine, load_format="dummy", skip_tokenizer_init=True)
            llm = load_llm(TINYLLAMA_1B, dummy)
        else:
            llm = load_llm(model, engine)
        progress.update(task, description="measuring", total=2 * (1 + repeat))
        result = measure(llm, max_tokens, repeat, lambda: progress.advance(task))
    parameters = parameter_count(llm.model)
    result = {
        "model": model or "TinyLlama-1.1B shape, random weights",
        "parameters": parameters,
        **result,
    }

    say(
        f"[bold]{result['model']}[/bold]: {short(parameters)} parameters, {result['dtype']} on "
        f"{result['device']}, {result['threads']} threads"
    )
    rows = []
    for name, key, unit in (
        ("one after another", "sequential", " tok/s"),
        ("batched", "batched", " tok/s"),
        ("ratio", "", "x"),
    ):
        speeds = result[f"{key}_tok_s"] if key else result["ratio"]
        limit = result[f"limit_{key}_tok_s"] if key else result["requests"]
        bounds = f"{speeds['min']:.2f} - {speeds['max']:.2f}"
        rows.append((name, f"{speeds['median']:.2f}{unit}", bounds, f"{limit:.2f}{unit}"))
    title = f"{result['requests']} requests x {max_tokens} tokens"
    table(None, (title, "median", "min - max", "limit"), rows)
    for reason in result["noise"]:
        say(f"[bold yellow]not reliable[/bold yellow]: {reason}")
    same = "the same" if result["same_tokens"] else "[bold red]different[/bold red]"
    say(f"Both ways gave {same} tokens.")
    step = in_bytes(result["step_bytes"])
    speed = in_bytes(result["bandwidth_bytes_s"])
    say(
        f"[dim]limit: a step reads {step} of weights; a copy runs at {speed}/s, "
        f"so a step takes at least {result['limit_step_s'] * 1e3:.0f} ms[/dim]"
    )
    finish(result, output)


ModelOrShape = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Model to measure, or random weights in the shape of qwen3-0.6b, qwen3-1.7b, "
        "llama-8b, tinyllama-1.1b or gpt2.",
    ),
]
THROUGHPUT = bench_options(max_model_len=4096)


@app.command()
@command
def throughput(
    model: ModelOrShape = None,
    workloads: Annotated[
        str,
        option(
            "Workloads to run, separated by commas; the command description lists all workloads.",
            None,
            "NAME,...",
            show_default=True,
        ),
    ] = "offline,single",
    repeat: Annotated[
        int,
        option("Runs per workload; the median is reported.", None, "N", show_default=True, min=1),
    ] = 3,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = THROUGHPUT,
) -> None:
    """Measure whole workloads: offline, single, four, decode, shared_prefix, prefill,
    long_prompts, long_context, batch16, batch32, batch64.

    A workload with longer requests raises --max-model-len."""
    from octavo.bench.model_shapes import load_shape
    from octavo.bench.result_file import BenchRun
    from octavo.bench.throughput import measure_rows
    from octavo.bench.workloads import WORKLOADS, longest_request
    from octavo.cli.progress import Steps

    names = workloads.split(",")
    if unknown := sorted(set(names) - set(WORKLOADS)):
        raise InvalidRequest(
            f"unknown workload {', '.join(unknown)}: use {', '.join(WORKLOADS)}", "workloads"
        )
    if engine.max_model_len is not None:
        longest = max(engine.max_model_len, longest_request(names))
        engine = replace(engine, max_model_len=longest)
    run = BenchRun("throughput", output, model=model)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_shape(engine, model)
        run.set_fact(device=llm.device.type, dtype=str(llm.model_dtype).removeprefix("torch."))
        progress.update(task, description="warming up")
        llm.warm_up()
        runs = throughput_runs(names, repeat)

        def advance() -> None:
            progress.advance(task)
            progress.update(task, description=next(next_runs))

        next_runs = iter([*runs[1:], "done"])
        progress.update(task, description=runs[0], total=len(runs))
        for row in measure_rows(llm, names, repeat, advance):
            run.add_row(**row)


def throughput_runs(names: list[str], repeat: int) -> list[str]:
    """Return the descriptions of the runs for the progress bar."""
    rounds = ["warm-up", *(f"run {number} of {repeat}" for number in range(1, 1 + repeat))]
    return [f"measuring {name}, {description}" for name in names for description in rounds]


@app.command()
@command
def startup(
    model: ModelOrShape = None,
    directory: Annotated[
        Path | None, option("Directory for random weights of a model shape.", None, "DIRECTORY")
    ] = None,
    repeat: Annotated[
        int, option("Number of processes to start.", None, "N", show_default=True, min=1)
    ] = 3,
    output: Output = None,
    engine: EngineOptions = THROUGHPUT,
) -> None:
    """Measure the time from the start of a process to its first token."""
    from octavo.bench.model_shapes import SHAPES
    from octavo.bench.startup import measure, write_checkpoint
    from octavo.cli.progress import Steps

    with Steps() as progress:
        task = progress.add_task("writing random weights", total=None)
        if model in SHAPES:
            directory = directory or Path(tempfile.gettempdir()) / f"octavo-{model}"
            if not (directory / "config.json").exists():
                write_checkpoint(SHAPES[model], directory)
        progress.update(task, description="starting", total=repeat)
        target = str(directory) if model in SHAPES else model
        options = replace(engine, tokenizer=None, skip_tokenizer_init=True)
        runs = measure(target, options, repeat, lambda: progress.advance(task))
    rows = [
        (str(number), *(f"{seconds:.1f} s" for seconds in run.values()))
        for number, run in enumerate(runs, 1)
    ]
    table(None, ("run", *runs[0]), rows)
    finish({"bench": "startup", "model": model, "runs": runs}, output)


TIERS = bench_options(max_num_seqs=4, swap_space=4.0)


@app.command()
@command
def tiers(
    model: ModelOrShape = None,
    tokens: Annotated[
        int, option("Number of tokens per prompt.", None, "N", parser=size, show_default=True)
    ] = 4000,
    repeat: Annotated[int, option("Prompts to measure.", None, "N", show_default=True, min=1)] = 3,
    output: Output = None,
    engine: EngineOptions = TIERS,
) -> None:
    """Measure the time to first token when KV is loaded from each tier, and when it is computed."""
    from octavo.bench.model_shapes import load_shape
    from octavo.bench.tiers import OUTPUT, measure
    from octavo.cli.progress import Steps
    from octavo.memory import BLOCK_SIZE

    bar = Steps()
    with tempfile.TemporaryDirectory(prefix="octavo-kv-") as scratch, bar as progress:
        block_size = engine.block_size or BLOCK_SIZE[_kind(engine.device)]
        blocks = -(-(tokens + OUTPUT) // block_size) + 2
        directory = engine.kv_disk_path or scratch
        engine = replace(
            engine,
            kv_disk_path=directory,
            max_model_len=tokens + OUTPUT,
            num_gpu_blocks_override=engine.num_gpu_blocks_override or blocks,
        )
        task = progress.add_task("measuring", total=4 * repeat)
        result = measure(
            lambda: load_shape(engine, model),
            Path(directory),
            tokens,
            repeat,
            lambda: progress.advance(task),
        )
    result = {"model": model or EMBEDDED, **result}
    show_tiers(result, tokens)
    finish(result, output)


TIER_NAMES = {
    "cold": "computed",
    "device": "device's cache",
    "host": "host memory",
    "disk": "disk, after a restart",
    "paged": "disk, in the system's cache",
}


def show_tiers(result: dict[str, Any], tokens: int) -> None:
    speeds = {
        "host": result["load_bytes_s"],
        "disk": result["disk_bytes_s"],
        "paged": result["paged_bytes_s"],
    }
    chosen = {key: "yes" if result[f"chooses_{key}"] else "no" for key in ("host", "disk")}
    rows = []
    for key, name in TIER_NAMES.items():
        ttft = result[f"{key}_ttft_s"]
        bounds = f"{ttft['min'] * 1e3:.1f} - {ttft['max'] * 1e3:.1f}"
        row = [name, f"{ttft['median'] * 1e3:.1f} ms", bounds]
        if key in speeds:
            speedup = f"{result[f'{key}_ratio']['median']:.1f}x"
            row += [speedup, f"{in_bytes(int(speeds[key]))}/s", chosen.get(key, "")]
        rows.append(row)
    title = f"{tokens:,} tokens, first token after"
    columns = (title, "median", "min - max", "speedup", "rate", "chosen by the engine")
    table(None, columns, rows)
    link = f"{result['of_link']:.0%} of the link's {in_bytes(int(result['link_bytes_s']))}/s"
    say(
        f"[dim]{in_bytes(result['load_bytes'])} loaded at {link}; "
        f"{result['disk_records']} records on disk[/dim]"
    )
    parts = ("until planned", "disk read", "until computed", "load", "compute", "the rest")
    rows = [
        [TIER_NAMES[key], *(f"{seconds * 1e3:.1f}" for seconds in seconds_by_part.values())]
        for key, seconds_by_part in result["parts_s"].items()
    ]
    table(None, ("parts of the time, in ms", *parts), rows)
    for key in ("disk", "paged"):
        loaded = result["loaded_while_reading"][key]
        busy = result["busy_readers"][key]
        say(
            f"[dim]{TIER_NAMES[key]}: {busy:.1f} reader threads busy on average, "
            f"{loaded} blocks loaded while others were read[/dim]"
        )
    alone = ", ".join(
        f"{threads}: {in_bytes(int(rate))}/s"
        for threads, rate in result["read_alone_bytes_s"].items()
    )
    say(f"[dim]records in the system's cache, by threads that only read and check: {alone}[/dim]")
    same = "the same" if result["same_tokens"] else "[bold red]different[/bold red]"
    say(f"All tiers gave {same} tokens.")


def _kind(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.partition(":")[0]


QUANT = bench_options(
    max_num_seqs=16, max_model_len=1024, num_gpu_blocks_override=256, enable_prefix_caching=False
)


@app.command()
@command
def quant(
    model: Model = None,
    formats: Annotated[
        str | None,
        option("Weight formats to measure, separated by commas. Default: all.", None, "A,B,..."),
    ] = None,
    repeat: Annotated[
        int, option("Measurements of speed.", None, "N", show_default=True, min=1)
    ] = 3,
    passages: Annotated[
        int, option("Pieces of text for the perplexity.", None, "N", show_default=True, min=1)
    ] = 8,
    length: Annotated[
        int, option("Tokens of each piece.", None, "N", parser=size, show_default=True)
    ] = 512,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = QUANT,
) -> None:
    """Compare weight formats: memory, load time, speed, and perplexity on Python's manual."""
    from octavo.bench import measure_quant as bench
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    chosen = tuple(formats.split(",")) if formats else bench.FORMATS

    def load(name: str) -> Any:
        return load_llm(model, engine, quantization=name)

    run = BenchRun("quant", output, model=model or EMBEDDED, passages=passages, length=length)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("measuring", total=len(chosen))
        for row in bench.measure(
            load, chosen, repeat, passages, length, lambda name: progress.advance(task)
        ):
            run.add_row(**row)


@app.command()
@command
def kv(
    model: Model = None,
    formats: Annotated[
        str | None,
        option(
            "KV data types to measure, separated by commas: auto, float16, int8, fp8. "
            "Default: all.",
            None,
            "A,B,...",
        ),
    ] = None,
    repeat: Annotated[
        int, option("Measurements of speed.", None, "N", show_default=True, min=1)
    ] = 3,
    passages: Annotated[
        int, option("Pieces of text for the perplexity.", None, "N", show_default=True, min=1)
    ] = 8,
    length: Annotated[
        int, option("Tokens of each piece.", None, "N", parser=size, show_default=True)
    ] = 512,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = QUANT,
) -> None:
    """Compare KV formats with --kv-cache-dtype auto: memory, speed and perplexity."""
    from octavo.bench.measure_quant import KV_FORMATS, measure
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    chosen = tuple(formats.split(",")) if formats else KV_FORMATS

    def load(name: str) -> Any:
        return load_llm(model, engine, kv_cache_dtype=name)

    run = BenchRun("kv", output, model=model or EMBEDDED, passages=passages, length=length)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("measuring", total=len(chosen))
        for row in measure(
            load,
            chosen,
            repeat,
            passages,
            length,
            lambda name: progress.advance(task),
            plain="auto",
        ):
            run.add_row(**row)


@app.command()
@command
def attention(
    device: Annotated[str, engine_option("device")] = EngineOptions.device,
    heads: Annotated[
        int, option("Number of query heads.", None, "N", show_default=True, min=1)
    ] = 16,
    kv_heads: Annotated[
        int, option("Number of key and value heads.", None, "N", show_default=True, min=1)
    ] = 8,
    dim: Annotated[int, option("Dimension of a head.", None, "N", show_default=True, min=4)] = 128,
    shapes: Annotated[
        str | None,
        option("Batch shapes as sequences x tokens, such as 256x800,64x8K.", None, "SxN,..."),
    ] = None,
    repeat: Annotated[
        int, option("Measurements per shape.", None, "N", show_default=True, min=1)
    ] = 5,
    output: Output = None,
) -> None:
    """Measure decode attention over plain, int8 and fp8 KV, in bytes of KV per second."""
    import torch

    from octavo.bench.attention import AttentionShape, measure
    from octavo.cli.progress import Steps

    if heads % kv_heads or dim % 4:
        raise InvalidRequest("heads must be a multiple of kv-heads, and dim of 4", "heads")
    if device not in ("auto", "cpu", "cuda") or (
        device == "cuda" and not torch.cuda.is_available()
    ):
        raise InvalidRequest(
            f"this machine has no device {device!r}: use auto, cpu or, with a GPU, cuda", "device"
        )
    torch_device = torch.device(_kind(device))
    chosen = (
        tuple(AttentionShape(*map(size, part.split("x"))) for part in shapes.split(","))
        if shapes
        else ()
    )
    with Steps() as progress:
        task = progress.add_task("measuring", total=None)
        result = measure(
            torch_device, heads, kv_heads, dim, chosen, repeat, lambda: progress.advance(task)
        )
    columns = (
        *("sequences", "tokens", "KV", "bytes read", "us"),
        *("min - max", "GB/s", "of a copy", "speedup"),
    )
    cells = [
        (
            f"{row['sequences']:,}",
            f"{row['tokens']:,}",
            row["kv"],
            in_bytes(row["kv_bytes"]),
            f"{row['seconds'] * 1e6:,.1f}",
            f"{row['min_s'] * 1e6:,.1f} - {row['max_s'] * 1e6:,.1f}",
            f"{row['bytes_s'] / 1e9:,.0f}",
            f"{row['of_copy']:.0%}",
            f"{row['speedup']:.2f}",
        )
        for row in result["rows"]
    ]
    table(None, columns, cells, left=())
    say(
        f"[dim]{torch_device.type}: {heads} query heads, {kv_heads} KV heads of {dim}; "
        f"a copy moves {result['copy_bytes_s'] / 1e9:,.0f} GB/s, both ways together[/dim]"
    )
    finish({"bench": "attention", **result}, output)


@app.command()
@command
def linear(
    shape: Annotated[
        str,
        typer.Argument(
            metavar="SHAPE", help="Model shape: qwen3-0.6b, llama-8b or tinyllama-1.1b."
        ),
    ] = "llama-8b",
    formats: Annotated[
        str | None,
        option("Weight formats to measure, separated by commas.", None, "A,B,...", "--quant"),
    ] = None,
    rows: Annotated[
        str | None, option("Batch sizes to measure, separated by commas.", None, "N,...")
    ] = None,
    tune: Annotated[
        bool,
        flag("--tune", "Try tile shapes for the GPU kernels and print the fastest."),
    ] = False,
    output: Output = None,
) -> None:
    """Measure each matrix product of a model in each weight format and with plain weights."""
    from octavo.bench import linear as bench
    from octavo.bench.model_shapes import SHAPES
    from octavo.cli.progress import Steps

    if shape not in SHAPES:
        raise InvalidRequest(f"unknown shape {shape}: use {', '.join(SHAPES)}", "shape")
    chosen = tuple(formats.split(",")) if formats else bench.FORMATS
    counts = tuple(sizes(rows)) if rows else None
    if tune:
        from octavo.bench import tune as tuning

        best = tuning.tune(SHAPES[shape], chosen, counts or tuning.ROWS, say)
        finish({"bench": "linear", "shape": shape, "best": best}, output)
        return
    counts = counts or bench.ROWS
    with Steps() as progress:
        total = len(bench.products(SHAPES[shape])) * (1 + len(chosen)) * len(counts)
        task = progress.add_task("measuring", total=total)
        records = bench.measure(SHAPES[shape], chosen, counts, lambda: progress.advance(task))
    columns = (
        *("product", "outputs", "inputs", "rows", "format"),
        *("us", "GB/s", "TFLOP/s", "speed"),
    )
    cells = [
        (
            record["product"],
            str(record["outputs"]),
            str(record["inputs"]),
            str(record["rows"]),
            record["format"],
            f"{record['us']:.1f}",
            f"{record['gb_s']:.0f}",
            f"{record['tflop_s']:.1f}",
            f"{record['ratio']:.2f}x",
        )
        for record in sorted(records, key=lambda record: (record["rows"], -record["times"]))
    ]
    table(None, columns, cells, left=(0, 4))
    steps = bench.step_ratios(records)
    totals = []
    for name in ("none", *chosen):
        step_results = (steps[name, count] for count in counts)
        totals.append((name, *(f"{us / 1e3:.2f} ({ratio:.2f}x)" for us, ratio in step_results)))
    title = "all products of a step, ms (times as fast as plain weights)"
    table(title, ("format", *map(str, counts)), totals)
    finish({"bench": "linear", "shape": shape, "records": records}, output)
