"""`octavo compile`: compiles kernels before the first start, for a machine image."""

from __future__ import annotations

from typing import Annotated

from octavo.cli.options import Model, command, option
from octavo.engine_options import EngineOptions


@command
def compile_kernels(
    model: Model = None,
    *,
    processes: Annotated[
        int | None,
        option(
            "Processes that compile at the same time on a GPU. Default: as many as fit into its "
            "memory, at most 8.",
            None,
            "N",
            min=1,
        ),
    ] = None,
    options: EngineOptions,
) -> None:
    """Compile the kernels now and cache them, so that later starts are fast."""
    from octavo.assemble import pick_device
    from octavo.cli.progress import Steps
    from octavo.compile_ahead import compile_cpu, compile_gpu

    device = pick_device(options.device)
    if device.type == "cpu":
        compilation = compile_cpu()
    else:
        count = processes or default_processes(model, options)
        with Steps() as progress:
            task = progress.add_task("compiling", total=count + 1)
            compilation = compile_gpu(
                model, options, count, lambda done, total: progress.update(task, completed=done)
            )
    if compilation.was_cached:
        print(f"{compilation.kernels} were compiled before: {compilation.directory}")
    else:
        compiled = f"compiled {compilation.kernels} in {compilation.seconds:.1f} s"
        print(f"{compiled}: {compilation.directory}")


def default_processes(model: str | None, options: EngineOptions) -> int:
    """Return how many processes fit into the memory of the GPU."""
    import torch

    from octavo.compile_ahead import count_processes
    from octavo.memory import available_memory
    from octavo.memory_planner import ModelOutline

    weights = ModelOutline.read(model, options).facts(options, "cuda").weights
    free, _ = available_memory(torch.device("cuda"))
    return count_processes(weights, free, options.tensor_parallel_size)
