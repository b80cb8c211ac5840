"""`octavo bench speculation`: compares decoding with and without drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.bench import ModelOrShape, app, finish
from octavo.cli.options import Output, bench_options, command, fail, flag, option, size, sizes
from octavo.cli.terminal import say, table
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.bench.measure_speculation import Case, Method

# Warm-up measures decode steps of up to 64 rows, if there are as many batch slots.
SPECULATION = bench_options(max_num_seqs=64, max_model_len=1024)
DIFFERENT_TOKENS = (
    "speculation changed tokens (see the list above). With quantised weights on a CPU, this is a "
    "defect. With float weights, sums depend on the number of rows in their last digits, so it may "
    "be a tie between two tokens"
)


@app.command()
@command
def speculation(
    model: ModelOrShape = None,
    methods: Annotated[
        str,
        option(
            "Methods to compare, separated by semicolons; each is a value of --speculative, or "
            "synthetic,acceptance=X for drafts that are accepted with probability X.",
            None,
            "METHOD;...",
            show_default=True,
        ),
    ] = "ngram,k=4",
    workloads: Annotated[
        str,
        option("Workloads, separated by commas: chat, copy.", None, "NAME,...", show_default=True),
    ] = "chat,copy",
    streams: Annotated[
        str, option("Numbers of concurrent requests.", None, "N,...", show_default=True)
    ] = "1,16",
    temperatures: Annotated[
        str, option("Sampling temperatures to measure.", None, "X,...", show_default=True)
    ] = "0,0.7",
    repeat: Annotated[
        int, option("Measured rounds; medians are reported.", None, "N", show_default=True, min=1)
    ] = 3,
    max_tokens: Annotated[
        int, option("Maximum tokens per reply.", None, "N", parser=size, show_default=True)
    ] = 128,
    grid: Annotated[
        bool,
        flag(
            "--grid",
            "Measure early_exit with 2 and 4 drafts and two exit layers, on TinyLlama-1.1B's shape "
            "and on the embedded model.",
        ),
    ] = False,
    picture: Annotated[
        Path | None, option("Draw measured and predicted ratios in this SVG file.", None, "FILE")
    ] = None,
    output: Output = None,
    engine: EngineOptions = SPECULATION,
) -> None:
    """Compare decoding with and without speculation: speed, acceptance and equal tokens."""
    from octavo.bench.measure_speculation import GRID, grid_methods, panels, parse_method
    from octavo.bench.picture import draw
    from octavo.cli.progress import Steps

    if engine.speculation_is_requested:
        raise InvalidRequest("this bench compares methods: give them with --methods", "speculative")
    if grid and model is not None:
        raise InvalidRequest("--grid has its own models: leave out MODEL", "grid")
    chosen = {model: methods.split(";")}
    if grid:
        chosen = {name: grid_methods(exit_layers) for name, exit_layers in GRID.items()}
    cases = read_cases(workloads, streams, temperatures)
    parsed = {
        name: {text.strip(): parse_method("--methods", text.strip()) for text in texts}
        for name, texts in chosen.items()
    }
    results: list[dict[str, Any]] = []
    with Steps() as progress:
        task = progress.add_task("loading", total=len(parsed) * len(cases) * (1 + repeat))
        for name, configs in parsed.items():
            progress.update(task, description=f"measuring {name or EMBEDDED}")
            bench = Bench(engine, cases, max_tokens, repeat, lambda: progress.advance(task))
            results += bench.measure(name, configs)
    if picture is not None:
        draw(picture, *panels(results))
    show_results(results)
    same_tokens = not any(record["differences"] for record in results)
    finish(
        {
            "bench": "speculation",
            "max_tokens": max_tokens,
            "repeat": repeat,
            "same_tokens": same_tokens,
            "results": results,
        },
        output,
    )
    if not same_tokens:
        fail(DIFFERENT_TOKENS, code=1)


class Bench:
    """The settings that all models share."""

    def __init__(
        self,
        engine: EngineOptions,
        cases: list[Case],
        max_tokens: int,
        repeat: int,
        advance: Callable[[], None],
    ):
        self.engine = engine
        self.cases = cases
        self.max_tokens = max_tokens
        self.repeat = repeat
        self.advance = advance

    def measure(self, model: str | None, methods: dict[str, Method]) -> list[dict[str, Any]]:
        from octavo.bench.measure_speculation import measure
        from octavo.bench.model_shapes import load_shape

        llm = load_shape(self._with_pool(), model)
        records = measure(
            llm=llm,
            methods=methods,
            cases=self.cases,
            max_tokens=self.max_tokens,
            repeat=self.repeat,
            advance=self.advance,
        )
        facts = {
            "model": model or EMBEDDED,
            "layers": llm.config.num_layers,
            "random_weights": llm.options.load_format == "dummy",
            "device": llm.device.type,
            "dtype": str(llm.model_dtype).removeprefix("torch."),
        }
        return [facts | record for record in records]

    def _with_pool(self) -> EngineOptions:
        """Bound the KV pool, because each method has a separate pool."""
        if self.engine.num_gpu_blocks_override is not None:
            return self.engine
        max_streams = max(4, *(case.streams for case in self.cases))
        positions = max_streams * (self.engine.max_model_len or 1024)
        block_size = self.engine.block_size or 16
        return replace(
            self.engine,
            block_size=block_size,
            max_num_seqs=max(self.engine.max_num_seqs, max_streams),
            num_gpu_blocks_override=-(-positions // block_size),
        )


def read_cases(workloads: str, streams: str, temperatures: str) -> list[Case]:
    from octavo.bench.measure_speculation import WORKLOADS, Case

    names = workloads.split(",")
    if unknown := sorted(set(names) - set(WORKLOADS)):
        raise InvalidRequest(
            f"unknown workload {', '.join(unknown)}: use {', '.join(WORKLOADS)}", "workloads"
        )
    try:
        degrees = [float(text) for text in temperatures.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--temperatures {temperatures!r} must be numbers, separated by commas"
        ) from None
    return [Case(*values) for values in product(names, sizes(streams), degrees)]


def show_results(results: list[dict[str, Any]]) -> None:
    columns = (
        *("method", "workload", "streams", "temperature", "plain tok/s", "tok/s", "ratio"),
        *("min - max", "predicted", "drafted", "accepted", "rate", "tokens/step"),
    )
    for model in dict.fromkeys(record["model"] for record in results):
        records = [record for record in results if record["model"] == model]
        facts = records[0]
        say(
            f"[bold]{model}[/bold]: {facts['layers']} layers, {facts['dtype']} on {facts['device']}"
        )
        table(None, columns, [cells(record) for record in records], left=(0, 1))
        if facts["random_weights"]:
            say(
                "The weights are random, so the first layers know little of what the last layers "
                "decide. Expect an acceptance near 0: the ratio shows what drafts cost, and the "
                "acceptance says nothing about a trained model."
            )
    if any(record["predicted_ratio"] is not None for record in results):
        say(
            "[dim]predicted: (1 + a*K) / (1 + K*exit/L), with the measured acceptance a, K drafts "
            "and L layers[/dim]"
        )
    for record in results:
        show_problems(record)
    if not any(record["differences"] for record in results):
        say("All methods gave the same tokens as plain decoding.")


def cells(record: dict[str, Any]) -> tuple[str, ...]:
    ratio = record["ratio"]
    predicted = record["predicted_ratio"]
    acceptance = record["acceptance"]
    return (
        record["method"],
        record["workload"],
        str(record["streams"]),
        f"{record['temperature']:g}",
        f"{record['plain_tok_s']['median']:,.1f}",
        f"{record['tok_s']['median']:,.1f}",
        f"{ratio['median']:.2f}x",
        f"{ratio['min']:.2f} - {ratio['max']:.2f}",
        "" if predicted is None else f"{predicted:.2f}x",
        f"{record['drafted']:,}",
        f"{record['accepted']:,}",
        "" if acceptance is None else f"{acceptance:.0%}",
        f"{record['tokens_per_step']:.2f}",
    )


def show_problems(record: dict[str, Any]) -> None:
    case = (
        f"{record['model']}, {record['method']}, {record['workload']}, "
        f"{record['streams']} streams, temperature {record['temperature']:g}"
    )
    for difference in record["differences"]:
        say(
            f"[bold red]different tokens[/bold red]: {case}: the reply to prompt "
            f"{difference['prompt']} differs from its token {difference['token']} on"
        )
    if record["noise"]:
        say(f"[bold yellow]not reliable[/bold yellow]: {case}: the ratio varied between rounds")
