"""`octavo bench memory`, `decoding` and `transports`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from octavo.cli.bench import ModelOrShape, app
from octavo.cli.bench_session import Picture, Rounds, bench_session
from octavo.cli.options import Model, Output, bench_options, command, load_llm, option, size
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.llm import LLM

MEMORY = bench_options(enable_prefix_caching=False)
DECODING = bench_options(max_num_seqs=64, max_model_len=1024)
TRANSPORTS = bench_options(max_num_seqs=16, max_model_len=1024)


@app.command()
@command
def memory(
    model: ModelOrShape = None,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = MEMORY,
) -> None:
    """Compare memory use with its plan, and the waste of paged KV with that of contiguous KV."""
    from octavo.assemble import pick_device
    from octavo.bench.ablation import SCALES, WORKLOADS
    from octavo.bench.memory_use import WORKLOAD, MemoryBench
    from octavo.bench.model_shapes import load_shape
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps
    from octavo.memory import BLOCK_SIZE

    kind = pick_device(engine.device).type
    block_size = engine.block_size or BLOCK_SIZE[kind]
    pool = WORKLOADS[WORKLOAD].options(SCALES[kind], block_size)
    if engine.num_gpu_blocks_override is not None:
        pool["num_gpu_blocks_override"] = engine.num_gpu_blocks_override
    run = BenchRun("memory", output, model=model or EMBEDDED, device=kind, block_size=block_size)

    def load(changes: dict[str, Any]) -> LLM:
        return load_shape(replace(engine, **pool, **changes), model)

    with bench_session(run, picture), Steps() as progress:
        progress.add_task("measuring", total=None)
        MemoryBench(load, run).measure()


@app.command()
@command
def decoding(
    model: Model = None,
    strategies: Annotated[
        str | None,
        option("Strategies to compare, separated by commas. Default: all.", None, "NAME,..."),
    ] = None,
    repeat: Rounds = 3,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = DECODING,
) -> None:
    """Compare greedy decoding, beam search, top-k, top-p and others: speed and quality."""
    from octavo.bench.decoding import STRATEGIES, DecodingBench
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    names = strategies.split(",") if strategies else list(STRATEGIES)
    if unknown := sorted(set(names) - set(STRATEGIES)):
        raise InvalidRequest(
            f"unknown strategy {', '.join(unknown)}: use {', '.join(STRATEGIES)}", "strategies"
        )
    run = BenchRun("decoding", output, model=model or EMBEDDED)
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("loading", total=None)
        llm = load_llm(model, engine)
        llm.warm_up()
        run.set_fact(device=llm.device.type)
        progress.update(task, description="measuring", total=len(names) * (2 * repeat + 1))
        DecodingBench(llm, run, repeat, lambda: progress.advance(task)).measure(names)


@app.command()
@command
def transports(
    model: Model = None,
    requests: Annotated[
        int,
        option(
            "Requests of one client in a round; 16 clients send four times as many.",
            None,
            "N",
            show_default=True,
            min=1,
        ),
    ] = 50,
    tokens: Annotated[
        int, option("Tokens per reply.", None, "N", parser=size, show_default=True)
    ] = 4,
    repeat: Rounds = 3,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = TRANSPORTS,
) -> None:
    """Compare HTTP, WebSocket and gRPC: latency, throughput and CPU time of the server."""
    from octavo.bench.measure_serve import free_port, server
    from octavo.bench.result_file import BenchRun
    from octavo.bench.transports import NEEDS, TransportBench
    from octavo.bench.transports import TRANSPORTS as NAMES
    from octavo.cli.progress import Steps

    run = BenchRun("transports", output, model=model or EMBEDDED, tokens=tokens)
    grpc_port = free_port()
    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("starting", total=None)
        missing = {name: need for name, need in NEEDS.items() if find_spec(need) is None}
        for name, package in missing.items():
            run.skip(name, f"the package {package} is not installed")
        names = [name for name in NAMES if name not in missing]
        with server(model, engine, grpc_port=grpc_port) as running:
            progress.update(task, description="measuring", total=2 * repeat * len(names))
            bench = TransportBench(running, grpc_port, run, requests, tokens)
            bench.measure(names, repeat, lambda: progress.advance(task))
