"""The threads that run the CPU kernels, and their memory.

A process has one pool, which is made when it is first needed. It has as many threads as torch,
including the calling thread, so one setting (OMP_NUM_THREADS, torch.set_num_threads) applies to
both. The pool runs one job at a time, and its threads sleep in between.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.ops.cpu.cpu_features import cache_directory, instruction_set

log = logging.getLogger(__name__)


def writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


@cache
def kernels() -> ModuleType | None:
    """Return the compiled kernels (octavo.ops.cpu.jit.decoder_jit).

    If this machine cannot run them, log a warning once and return None.
    """
    isa = instruction_set()
    if isinstance(isa, str):
        log.warning("CPU kernels are off (%s): plain PyTorch computes, several times slower", isa)
        return None
    import numba

    config: Any = numba.config
    directory = cache_directory(isa)
    compiles = not cache_directory(isa).exists()
    if not writable(directory):
        log.warning(
            "CPU kernels cannot be cached in %s, so they are compiled at every start "
            "(OCTAVO_CACHE sets another directory)",
            directory,
        )
        directory = Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
        compiles = True
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    started = time.monotonic()
    if compiles:
        print(
            f"octavo: compiling CPU kernels for {isa.name}, once ...",
            end="",
            file=sys.stderr,
            flush=True,
        )
    # numba reads CACHE_DIR when a function is declared.
    before = config.CACHE_DIR
    config.CACHE_DIR = str(directory)
    try:
        from octavo.ops.cpu.jit import decoder_jit
    finally:
        config.CACHE_DIR = before
        if compiles:
            print(f" {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return decoder_jit


class ThreadPool:
    def __init__(self, kernels_module: ModuleType, threads: int):
        self.kernels = kernels_module
        self.threads = threads
        self.lock = threading.Lock()
        barrier = kernels_module.thread_barrier
        self.state: NDArray[np.int64] = np.zeros(
            barrier.WORKERS + barrier.WORKER_SIZE * threads, dtype=np.int64
        )
        self.state[barrier.NUM_THREADS] = threads
        self.address = self.state.ctypes.data
        self._memory: dict[str, NDArray[np.uint8]] = {}
        self._zeros: NDArray[np.uint8] = np.zeros(1024, dtype=np.uint8)
        for index in range(1, threads):
            thread_arguments = (self.address, index)
            threading.Thread(
                target=kernels_module.run_worker,
                args=thread_arguments,
                daemon=True,
                name=f"octavo-cpu-{index}",
            ).start()

    def run(self, job: NDArray[np.int64], phases: int = 2) -> None:
        """Run a job on all threads and return when it is done.

        The caller must hold the lock, which protects the memory too.
        """
        barrier = self.kernels.thread_barrier
        self.state[barrier.JOB] = job.ctypes.data
        self.state[barrier.PHASES] = phases
        self.state[barrier.COUNTERS] = self.memory("counters", phases * barrier.COUNTER_BYTES)
        self.kernels.run_leader(self.address)

    def memory(self, name: str, num_bytes: int) -> int:
        """Return the address of at least num_bytes bytes, 64-byte aligned.

        The memory is kept under this name until more bytes are requested.
        """
        buffer = self._memory.get(name)
        if buffer is None or len(buffer) < num_bytes + 64:
            buffer = self._memory[name] = np.empty(num_bytes + 64, dtype=np.uint8)
        return buffer.ctypes.data + -buffer.ctypes.data % 64

    def zeros(self, num_bytes: int) -> int:
        """Return the address of num_bytes zeros."""
        if len(self._zeros) < num_bytes:
            self._zeros = np.zeros(num_bytes, dtype=np.uint8)
        return self._zeros.ctypes.data


_pools: dict[int, ThreadPool] = {}


def thread_pool(num_threads: int | None = None) -> ThreadPool | None:
    """Return the process's pool of this many threads, by default as many as torch has now.

    Return None if this machine cannot run the kernels.
    """
    kernels_module = kernels()
    if kernels_module is None:
        return None
    num_threads = num_threads or torch.get_num_threads()
    if num_threads not in _pools:
        _pools[num_threads] = ThreadPool(kernels_module, num_threads)
    return _pools[num_threads]


os.register_at_fork(after_in_child=_pools.clear)  # a child process has no threads of its parent
