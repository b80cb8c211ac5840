"""Compiles kernels before the first start, so that a machine image contains them.

A CPU has one module of kernels for all models. The kernels of a GPU depend on the model, its format
and the sizes of steps. Several processes compile them: each loads the model and runs its part of
the steps that a server runs before it is ready. A last process then starts as a server does, and
finds almost everything in the caches.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from octavo.engine_options import EngineOptions
from octavo.errors import OctavoError
from octavo.message_encoding import decode, encode

PROGRAM = "octavo.compile_ahead"
MAX_PROCESSES = 8
PROCESS_BYTES = 4 * 2**30  # GPU memory of a process beside the weights: KV, activations, libraries
GPU_SHARE = 0.85  # fraction of the free GPU memory that all processes may use


class CompileJob(NamedTuple):
    """The message to a process that compiles one part of the steps that a server runs."""

    model: str | None
    options: EngineOptions
    part: int
    num_parts: int


class Compiled(NamedTuple):
    """The kernels that were compiled."""

    kernels: str  # in words
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
    """Compile the GPU kernels of a model in `num_processes` processes.

    `on_progress` is called with the number of finished processes and of all of them.
    """
    from octavo.ops.cache_dir import cache_folder

    started = time.monotonic()
    total = num_processes + 1
    on_progress(0, total)
    share = options.gpu_memory_utilization / num_processes
    part_options = replace(options, gpu_memory_utilization=share)
    jobs = [CompileJob(model, part_options, part, num_processes) for part in range(num_processes)]
    run_jobs(jobs, lambda finished: on_progress(finished, total))
    run_jobs([CompileJob(model, options, 0, 1)], lambda finished: on_progress(total, total))
    elapsed = time.monotonic() - started
    return Compiled(
        f"GPU kernels for {model or 'the embedded model'}", elapsed, False, cache_folder("")
    )


def run_jobs(jobs: Sequence[CompileJob], on_finish: Callable[[int], None]) -> None:
    """Run each job in a process of its own. Raises OctavoError, and ends all, if one fails.

    `on_finish` is called with the number of finished jobs.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for job in jobs:
            process = subprocess.Popen([sys.executable, "-m", PROGRAM], stdin=subprocess.PIPE)
            processes.append(process)
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(encode(job))
        for finished, process in enumerate(processes, 1):
            if process.wait():
                raise OctavoError("kernels cannot be compiled: see the messages above")
            on_finish(finished)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compile_part(job: CompileJob) -> None:
    """Load a model and run one part of the steps that a server runs before it is ready."""
    from octavo.llm import LLM

    llm = LLM.from_options(job.model, job.options, progress=False)
    try:
        llm.compile_kernels(job.part, job.num_parts)
    finally:
        llm.close()


def main() -> int:
    """Run the job that is read from the standard input, in a process that run_jobs starts."""
    try:
        compile_part(decode(sys.stdin.buffer.read(), CompileJob))
    except OctavoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def count_processes(weight_bytes: int, free_bytes: int, num_gpus: int = 1) -> int:
    """Return how many processes have room for the model beside each other on one GPU."""
    if num_gpus > 1:
        return 1  # Every process would use all GPUs.
    room = int(GPU_SHARE * free_bytes) // (weight_bytes + PROCESS_BYTES)
    return max(1, min(room, MAX_PROCESSES, (os.cpu_count() or 2) // 2))


if __name__ == "__main__":
    sys.exit(main())
