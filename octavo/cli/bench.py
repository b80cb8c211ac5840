"""`octavo bench ...`: measurements as tables. The last line on stdout is the result as JSON; --json FILE writes it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.options import EngineOptions, command, option, size
from octavo.cli.screen import in_bytes, short

app = typer.Typer(help="Measure speed: each bench prints a table, and JSON as its last line.", no_args_is_help=True)
Output = Annotated[Path | None, option("Write the result here as JSON.", None, "FILE", "--json")]


@app.callback()
def bench() -> None:
    """Keeps `batching` a subcommand while it is the only one."""


def finish(result: dict[str, Any], output: Path | None) -> None:
    line = json.dumps(result)
    print(line, flush=True)  # first: a file that cannot be written must not cost the measurement
    if output is not None:
        output.write_text(line + "\n")


BATCHING = EngineOptions(max_num_seqs=4, max_model_len=256, no_prefix_caching=True)


@app.command()
@command
def batching(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Default: random weights of TinyLlama-1.1B's shape.")
    ] = None,
    repeat: Annotated[int, option("Measurements of each side, interleaved.", None, "N", show_default=True, min=1)] = 3,
    max_tokens: Annotated[int, option("Tokens for each prompt.", None, "N", parser=size, show_default=True)] = 32,
    output: Output = None,
    engine: EngineOptions = BATCHING,
) -> None:
    """Four requests together against one after another, greedy, end-of-text ignored."""
    from rich import box
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from octavo.bench.batching import measure
    from octavo.bench.shapes import TINYLLAMA_1B
    from octavo.memory import parameter_count

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=None)
        if model is None:
            engine.load_format = "dummy"
        llm = engine.load(model or TINYLLAMA_1B, skip_tokenizer_init=model is None)
        progress.update(task, description="measuring", total=2 * (1 + repeat))
        r = measure(llm, max_tokens, repeat, lambda: progress.advance(task))
    parameters = parameter_count(llm.model)
    r = {"model": model or "TinyLlama-1.1B shape, random weights", "parameters": parameters, **r}

    console = Console(highlight=False)
    console.print(
        f"[bold]{r['model']}[/bold]: {short(parameters)} parameters, {r['dtype']} on {r['device']}, {r['threads']} threads"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (f"{r['requests']} requests x {max_tokens} tokens", "median", "min - max", "floor"):
        table.add_column(column, justify="left" if not table.columns else "right")
    for name, key, unit in (("one after another", "sequential", " tok/s"), ("batched", "batched", " tok/s"), ("ratio", "", "x")):
        found = r[f"{key}_tok_s"] if key else r["ratio"]
        floor = r[f"floor_{key}_tok_s"] if key else r["requests"]
        bounds = f"{found['min']:.2f} - {found['max']:.2f}"
        table.add_row(name, f"{found['median']:.2f}{unit}", bounds, f"{floor:.2f}{unit}")
    console.print(table)
    for reason in r["noise"]:
        console.print(f"[bold yellow]not to be trusted[/bold yellow]: {reason}")
    console.print(f"Both ways gave {'the same' if r['same_tokens'] else '[bold red]different[/bold red]'} tokens.")
    step, speed = in_bytes(r["step_bytes"]), in_bytes(r["bandwidth_bytes_s"])
    console.print(f"[dim]floor: {step} of weights a step, at a copy's {speed}/s: {r['floor_step_s'] * 1e3:.0f} ms[/dim]")
    finish(r, output)
