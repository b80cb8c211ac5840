"""`octavo bench serve`: requests over HTTP, counted strictly."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from octavo.cli.bench import ModelOrShape, Output, app, finish
from octavo.cli.options import command, load_llm, option, size
from octavo.cli.terminal import say, table
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest, OctavoError

if TYPE_CHECKING:
    from octavo.bench.http_load import Load

PROMPT = "The secret to building a high performance system is"
SERVED = EngineOptions(max_num_seqs=64, max_model_len=1024)


@app.command("serve")
@command
def bench_serve(
    model: ModelOrShape = None,
    url: Annotated[
        str | None, option("Measure the server at this URL instead of starting one.", None, "URL")
    ] = None,
    cases: Annotated[
        str,
        option(
            "Load cases, separated by commas: same, long, distinct, stream, one, burst.",
            None,
            "NAME,...",
            show_default=True,
        ),
    ] = "same",
    clients: Annotated[
        int, option("Number of concurrent clients.", None, "N", show_default=True, min=1)
    ] = 50,
    requests: Annotated[
        int,
        option(
            "Requests in total; the cases long, distinct and stream send ten times as many.",
            None,
            "N",
            show_default=True,
            min=1,
        ),
    ] = 500,
    tokens: Annotated[
        int, option("Tokens per reply, exactly.", None, "N", parser=size, show_default=True)
    ] = 30,
    prompt: Annotated[
        str, option("Prompt that every client sends.", None, "TEXT", show_default=True)
    ] = PROMPT,
    repeat: Annotated[
        int, option("Runs per case; the median is reported.", None, "N", show_default=True, min=1)
    ] = 3,
    output: Output = None,
    engine: EngineOptions = SERVED,
) -> None:
    """Measure replies per second over HTTP, and the time that the server adds to first tokens.

    The exit code is 1 if a reply is wrong."""

    from octavo.bench.http_load import Load
    from octavo.bench.measure_serve import CASES
    from octavo.cli.progress import Steps

    names = cases.split(",")
    if unknown := sorted(set(names) - set(CASES)):
        raise InvalidRequest(f"unknown case {', '.join(unknown)}: use {', '.join(CASES)}", "cases")
    load = Load(0, clients=clients, requests=requests, tokens=tokens, prompt=prompt)
    with Steps() as progress:
        task = progress.add_task("starting", total=len(names) * repeat)
        step = lambda: progress.update(task, description="measuring", advance=1)  # noqa: E731
        results = (
            ask_url(url, load, names, repeat, step)
            if url
            else ask_fresh(model, engine, load, names, repeat, step)
        )
    show(results, load)
    finish(
        {
            "bench": "serve",
            "model": model or "smollm2",
            "url": url,
            "tokens": tokens,
            "cases": results,
        },
        output,
    )
    if any(r["wrong"] for r in results):
        raise typer.Exit(1)


def ask_url(url: str, load: Load, names: list[str], repeat: int, step: Any) -> list[dict[str, Any]]:
    from octavo.bench.measure_serve import Running, measure

    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise InvalidRequest(f"{url} is not the address of a server: give http://HOST:PORT", "url")
    running = Running(parts.hostname, parts.port or 80)
    try:
        socket.create_connection((running.host, running.port), timeout=5).close()
    except OSError as error:
        raise OctavoError(
            f"no server answers at {url} ({error.strerror or error}): start one with `octavo serve`"
        ) from None
    return measure(running, load, names, repeat, step)


def ask_fresh(
    model: str | None, engine: EngineOptions, load: Load, names: list[str], repeat: int, step: Any
) -> list[dict[str, Any]]:
    """One server for what is counted, one whose engine notes its times, then the engine alone."""
    from octavo.bench.measure_serve import CASES, STAMPED, in_process, measure, server
    from octavo.bench.model_shapes import SHAPES, write_directory

    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as scratch:
        if model in SHAPES:
            write_directory(SHAPES[model], Path(scratch) / model)
            model = str(Path(scratch) / model)
            engine = replace(engine, load_format="dummy")
            load = replace(load, exact=True)
        results = []
        for some, trace in (
            ([n for n in names if n not in STAMPED], None),
            ([n for n in names if n in STAMPED], "trace.jsonl"),
        ):
            if some:
                with server(model, engine, Path(scratch) / trace if trace else None) as running:
                    results += measure(running, load, some, repeat, step)
        if counted := [r for r in results if r["case"] not in STAMPED]:
            llm = load_llm(model, engine)
            llm.warm_up()
            alone: dict[tuple[int, bool], float] = {}  # streamed or not is the same to the engine
            for r in counted:
                case = CASES[r["case"]](load)
                if (kind := (case.requests, case.distinct)) not in alone:
                    alone[kind] = in_process(llm, case, repeat)
                r["device"] = llm.device.type
                r["in_process_tok_s"] = alone[kind]
                r["of_in_process"] = r["tok_s"] / r["in_process_tok_s"]
    return results


def show(results: list[dict[str, Any]], load: Load) -> None:
    columns = (
        *("case", "requests", "a second", "tok/s", "in-process", "of it"),
        *("p50", "p95", "p99 ms", "TTFT p50", "p99 ms"),
    )
    rows = []
    for r in results:
        alone = (
            [f"{r['in_process_tok_s']:,.0f}", f"{r['of_in_process']:.0%}"]
            if "in_process_tok_s" in r
            else ["", ""]
        )
        latency = [f"{r['latency_ms'].get(q, 0):,.1f}" for q in ("p50", "p95", "p99")]
        first = [f"{r['ttft_ms'][q]:,.1f}" if r["ttft_ms"] else "" for q in ("p50", "p99")]
        speed = (f"{r['good']:,}", f"{r['requests_s']:,.1f}", f"{r['tok_s']:,.0f}")
        rows.append((r["case"], *speed, *alone, *latency, *first))
    say(f"{load.clients} clients, {load.tokens} tokens a reply")
    table(None, columns, rows)
    for r in results:
        cpu = ", ".join(f"{name} {us:,.0f}" for name, us in r["cpu_us_a_request"].items() if us)
        say(f"[dim]{r['case']}: us of CPU a request: {cpu}[/dim]")
    for r in (r for r in results if "added_ms" in r):
        way = ", ".join(
            f"{name} {r[f'{part}_ms']['p50']:.2f} ({r[f'{part}_ms']['p99']:.2f})"
            for part, name in WAY.items()
        )
        say(f"{r['case']}: ms to the first byte, p50 (p99): {way}")
    for r in results:
        for why, count in r["wrong"].items():
            say(
                f"[bold red]{r['case']}: {count} replies are wrong and not counted[/bold red]: {why}"
            )


WAY = {
    "in": "on the way in",
    "engine": "engine",
    "picked_up": "in the engine's queue",
    "out": "on the way out",
    "added": "added by the server",
}
