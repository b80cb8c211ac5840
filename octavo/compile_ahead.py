"""Compiles kernels before the first start, so that a machine image contains them.

A CPU has one module of kernels for all models. The kernels of a GPU depend on the model, its format
and the sizes of steps. Several processes compile them: each loads the model and runs its part of
the steps that a server runs before it is ready. A last process then starts as a server does, and
finds almost everything in the caches.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from octavo.engine_options import EngineOptions
from octavo.errors import OctavoError

MAX_PROCESSES = 8
PROCESS_BYTES = 4 * 2**30  # GPU memory of a process beside the weights: KV, activations, libraries
GPU_SHARE = 0.85  # fraction of the free GPU memory that all processes may use


class Compiled(NamedTuple):
    """The kernels that were compiled."""

    what: str
    seconds: float
    was_cached: bool  # whether there was nothing to compile
    directory: Path


def compile_cpu() -> Compiled:
    """Compile the CPU kernels, or find them in the cache."""
    from octavo.ops.cpu.cpu_features import cache_directory, instruction_set
    from octavo.ops.cpu.thread_pool import compiled_mark, kernels, writable

    isa = instruction_set()
    if isinstance(isa, str):
        raise OctavoError(f"this machine has no CPU kernels to compile: {isa}")
    directory = cache_directory(isa)
    if not writable(directory):
        raise OctavoError(
            f"compiled kernels cannot be kept: {directory} is not writable. Set OCTAVO_CACHE to "
            "another directory"
        )
    was_cached = compiled_mark(directory).exists()
    started = time.monotonic()
    kernels()
    elapsed = time.monotonic() - started
    return Compiled(f"CPU kernels for {isa.name}", elapsed, was_cached, directory)


def compile_gpu(
    model: str | None,
    options: EngineOptions,
    num_processes: int,
    on_progress: Callable[[int, int], None] = lambda finished, total: None,
) -> Compiled:
    """Compile the GPU kernels of a model in so many processes.

    `on_progress` is called with the number of finished processes and of all of them.
    """
    from octavo.ops.cache_dir import cache_folder

    started = time.monotonic()
    total = num_processes + 1
    on_progress(0, total)
    share = options.gpu_memory_utilization / num_processes
    part_options = replace(options, gpu_memory_utilization=share)
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=spawning) as pool:
        parts = [
            pool.submit(compile_part, model, part_options, part, num_processes)
            for part in range(num_processes)
        ]
        for finished, future in enumerate(as_completed(parts), 1):
            future.result()
            on_progress(finished, total)
    with ProcessPoolExecutor(1, mp_context=spawning) as pool:
        pool.submit(compile_part, model, options, 0, 1).result()
    on_progress(total, total)
    elapsed = time.monotonic() - started
    return Compiled(
        f"GPU kernels for {model or 'the embedded model'}", elapsed, False, cache_folder("")
    )


def compile_part(model: str | None, options: EngineOptions, part: int, num_parts: int) -> None:
    """Load a model and run one part of the steps that a server runs before it is ready."""
    from octavo.llm import LLM

    llm = LLM.from_options(model, options, progress=False)
    try:
        llm.compile_kernels(part, num_parts)
    finally:
        llm.close()


def count_processes(weight_bytes: int, free_bytes: int, num_gpus: int = 1) -> int:
    """Return how many processes have room for the model beside each other on one GPU."""
    if num_gpus > 1:
        return 1  # Every process would use all GPUs.
    room = int(GPU_SHARE * free_bytes) // (weight_bytes + PROCESS_BYTES)
    return max(1, min(room, MAX_PROCESSES, (os.cpu_count() or 2) // 2))
