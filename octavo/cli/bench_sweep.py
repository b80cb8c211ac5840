"""`octavo bench sweep`: throughput and latency against the number of clients."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from octavo.cli.bench import ModelOrShape, app
from octavo.cli.bench_serve import PROMPT, ApiKey, ServedModel
from octavo.cli.bench_session import Picture, bench_session
from octavo.cli.options import Output, bench_options, command, option, size
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions

if TYPE_CHECKING:
    from octavo.bench.sweep import SweepTarget

SWEEP = bench_options(max_num_seqs=64)
MAX_CLIENTS = {"cpu": 64, "cuda": 1024}


@app.command()
@command
def sweep(
    model: ModelOrShape = None,
    url: Annotated[
        str | None,
        option("Measure the server at this URL instead of an engine in-process.", None, "URL"),
    ] = None,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    clients: Annotated[
        int | None,
        option(
            "Maximum number of clients. Default: 64 on a CPU, 1,024 on a GPU.", None, "N", min=1
        ),
    ] = None,
    prompt: Annotated[
        int, option("Tokens per prompt.", None, "N", parser=size, show_default=True)
    ] = 128,
    tokens: Annotated[
        int, option("Tokens per reply.", None, "N", parser=size, show_default=True)
    ] = 64,
    ttft_ms: Annotated[
        float,
        option("Latency target: milliseconds to the first token.", None, "X", show_default=True),
    ] = 2000.0,
    itl_ms: Annotated[
        float,
        option("Latency target: milliseconds between tokens.", None, "X", show_default=True),
    ] = 100.0,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = SWEEP,
) -> None:
    """Measure throughput and latency against the number of concurrent clients."""
    from octavo.bench.model_shapes import load_shape
    from octavo.bench.openai_endpoint import OpenAIEndpoint
    from octavo.bench.result_file import BenchRun
    from octavo.bench.sweep import GoodputTarget, InProcess, OverHttp, Sweep
    from octavo.cli.progress import Steps

    run = BenchRun(
        "sweep",
        output,
        model=served_model if url else model or EMBEDDED,
        url=url,
        prompt=prompt,
        output=tokens,
        target={"ttft_ms": ttft_ms, "itl_ms": itl_ms},
    )
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("loading", total=None)
        target: SweepTarget
        if url:
            endpoint = OpenAIEndpoint.parse(url, model=served_model, api_key=api_key)
            target = OverHttp(endpoint, f"{PROMPT} " * max(prompt // 10, 1), tokens)
            max_clients = clients or MAX_CLIENTS["cpu"]
        else:
            slots = max(engine.max_num_seqs, clients or 0)
            length = engine.max_model_len or prompt + tokens
            llm = load_shape(replace(engine, max_num_seqs=slots, max_model_len=length), model)
            max_clients = clients or MAX_CLIENTS[llm.device.type]
            if max_clients > slots:
                llm = llm.with_options(
                    max_num_seqs=max_clients, num_gpu_blocks_override=llm.memory.num_blocks
                )
            llm.warm_up()
            run.set_fact(device=llm.device.type)
            target = InProcess(llm, prompt, tokens)

        def advance(number: int) -> None:
            progress.update(task, description=f"measuring {number:,} clients")

        Sweep(target, run, GoodputTarget(ttft_ms / 1e3, itl_ms / 1e3), advance).measure(max_clients)
