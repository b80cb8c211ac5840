"""`octavo bench ablation`: measures what each mechanism contributes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from octavo.cli.bench import ModelOrShape, app, load_shape
from octavo.cli.bench_session import Picture, Rounds, bench_session
from octavo.cli.options import Output, command, option
from octavo.config import EMBEDDED
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.llm import LLM

ABLATION = EngineOptions(max_num_seqs=16)
KV_TOKENS = {"cpu": 32 * 1024, "cuda": 512 * 1024}  # of each engine; two run beside each other


@app.command()
@command
def ablation(
    model: ModelOrShape = None,
    mechanisms: Annotated[
        str | None,
        option(
            "Mechanisms to turn off, separated by commas, such as kv-cache,paging. Default: all.",
            None,
            "NAME,...",
        ),
    ] = None,
    repeat: Rounds = 3,
    picture: Picture = None,
    output: Output = None,
    engine: EngineOptions = ABLATION,
) -> None:
    """Turn off one mechanism at a time, and measure what each contributes."""
    from octavo.bench.ablation import MECHANISMS, Ablation, why_not
    from octavo.bench.result_file import BenchRun
    from octavo.cli.progress import Steps

    names = mechanisms.split(",") if mechanisms else list(MECHANISMS)
    if unknown := sorted(set(names) - set(MECHANISMS)):
        raise InvalidRequest(
            f"unknown mechanism {', '.join(unknown)}: use {', '.join(MECHANISMS)}", "mechanisms"
        )
    run = BenchRun("ablation", output, model=model or EMBEDDED)

    def load(changes: dict[str, Any]) -> LLM:
        return load_shape(replace(sized(engine), **changes), model)

    with bench_session(run, picture), Steps() as progress:
        task = progress.add_task("loading", total=None)
        bench = Ablation(load, run, repeat, lambda: progress.advance(task))
        device = bench.base.device.type
        run.set_fact(device=device, dtype=str(bench.base.model_dtype).removeprefix("torch."))
        reasons = {name: why_not(name, bench.base) for name in names}
        chosen = [name for name, reason in reasons.items() if reason is None]
        run.set_fact(left_out={name: reason for name, reason in reasons.items() if reason})
        progress.update(task, total=2 * repeat * len(chosen))
        for name in chosen:
            progress.update(task, description=name)
            bench.measure(name)


def sized(engine: EngineOptions) -> EngineOptions:
    """Bound the KV pool, because two engines run beside each other."""
    from octavo.assemble import pick_device
    from octavo.memory import BLOCK_SIZE

    kind = pick_device(engine.device).type
    block_size = engine.block_size or BLOCK_SIZE[kind]
    return replace(
        engine,
        block_size=block_size,
        num_gpu_blocks_override=engine.num_gpu_blocks_override or KV_TOKENS[kind] // block_size,
    )
