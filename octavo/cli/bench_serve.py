"""`octavo bench serve`: measures requests over HTTP with a strict client."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.bench import ModelOrShape, app
from octavo.cli.bench_session import Picture, bench_session
from octavo.cli.options import Output, bench_options, command, load_llm, option, size
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.bench.http_load import Load
    from octavo.bench.result_file import BenchRun

ServedModel = Annotated[
    str | None,
    option(
        "Name of the model that the server at --url has. Default: its only model.", None, "NAME"
    ),
]
ApiKey = Annotated[
    str | None,
    option("API key for the server at --url. Default: the variable OCTAVO_API_KEY.", None, "KEY"),
]
PROMPT = "The secret to building a high performance system is"
SERVE_OPTIONS = bench_options(max_num_seqs=64, max_model_len=1024)


@app.command("serve")
@command
def bench_serve(
    model: ModelOrShape = None,
    url: Annotated[
        str | None, option("Measure the server at this URL instead of starting one.", None, "URL")
    ] = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    cases: Annotated[
        str,
        option(
            "Load cases, separated by commas: same, long, distinct, stream, streams, one, burst.",
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
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = SERVE_OPTIONS,
) -> None:
    """Measure replies per second over HTTP, and the time that the server adds to first tokens.

    The exit code is 1 if a reply is wrong.
    """

    from octavo.bench.http_load import Load
    from octavo.bench.measure_serve import CASES, RunningServer, measure
    from octavo.bench.openai_endpoint import OpenAIEndpoint
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    case_names = cases.split(",")
    if unknown := sorted(set(case_names) - set(CASES)):
        raise InvalidRequest(f"unknown case {', '.join(unknown)}: use {', '.join(CASES)}", "cases")
    load = Load(0, clients=clients, requests=requests, tokens=tokens, prompt=prompt)
    run = BenchRun("serve", output, model=model or EMBEDDED, url=url, tokens=tokens)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("starting", total=len(case_names) * repeat)
        advance = lambda: progress.update(task, description="measuring", advance=1)  # noqa: E731
        if url:
            endpoint = OpenAIEndpoint.parse(url, model=served_model, api_key=api_key)
            running = RunningServer(endpoint.with_model())
            for row in measure(running, load, case_names, repeat, advance):
                run.add_row(**row)
        else:
            measure_new_server(run, model, engine, load, case_names, repeat, advance)
    if any(row["wrong"] for row in run.rows):
        raise typer.Exit(1)


def measure_new_server(
    run: BenchRun,
    model: str | None,
    engine: EngineOptions,
    load: Load,
    case_names: list[str],
    repeat: int,
    advance: Any,
) -> None:
    """Start a server for most cases and one that records its times, then run the engine alone."""
    from octavo.bench.measure_serve import CASES, TRACED_CASES, in_process, measure, server
    from octavo.bench.model_shapes import SHAPES, write_directory

    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as scratch:
        if model in SHAPES:
            write_directory(SHAPES[model], Path(scratch) / model)
            model = str(Path(scratch) / model)
            engine = replace(engine, load_format="dummy")
            load = replace(load, exact=True)
        for group, trace_name in (
            ([case_name for case_name in case_names if case_name not in TRACED_CASES], None),
            ([case_name for case_name in case_names if case_name in TRACED_CASES], "trace.jsonl"),
        ):
            if group:
                with server(
                    model, engine, Path(scratch) / trace_name if trace_name else None
                ) as running:
                    for row in measure(running, load, group, repeat, advance):
                        run.add_row(**row)
        counted_results = [row for row in run.rows if row["case"] not in TRACED_CASES]
        if counted_results:
            llm = load_llm(model, engine)
            llm.warm_up()
            # Streaming makes no difference to the engine, so it is not part of the key.
            engine_speeds: dict[tuple[int, bool], float] = {}
            for result in counted_results:
                case = CASES[result["case"]](load)
                load_kind = (case.requests, case.distinct)
                if load_kind not in engine_speeds:
                    engine_speeds[load_kind] = in_process(llm, case, repeat)
                result["device"] = llm.device.type
                result["in_process_tok_s"] = engine_speeds[load_kind]
                result["of_in_process"] = result["tok_s"] / result["in_process_tok_s"]
