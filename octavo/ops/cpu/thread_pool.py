"""The threads that run the CPU kernels, and their memory.

A process has one pool, which is made when it is first needed. It has as many threads as torch,
including the calling thread, so one setting (OMP_NUM_THREADS, torch.set_num_threads) applies to
both. The pool runs one job at a time, and its threads sleep in between.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.ops.cpu.cpu_features import cache_directory, instruction_set

log = logging.getLogger(__name__)

SECONDS_UNTIL_NOTICE = 3.0  # how long a process waits silently for the compilation of another
MAX_WAIT_SECONDS = 300.0  # then it compiles too: the other process may be suspended


def writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


@contextlib.contextmanager
def print_compilation() -> Iterator[None]:
    print("octavo: compiling CPU kernels, once ...", end="", file=sys.stderr, flush=True)
    started = time.monotonic()
    try:
        yield
    finally:
        print(f" {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


_compilation_report: Callable[[], AbstractContextManager[None]] = print_compilation


def report_compilation(report: Callable[[], AbstractContextManager[None]]) -> None:
    """Let this context surround a compilation, which takes about a minute. The default prints it.

    It must be called before a model is built.
    """
    global _compilation_report
    _compilation_report = report


def compiled_mark(directory: Path) -> Path:
    """Return the file that exists once all kernels are compiled.

    numba caches by the path of the source, so every installation has its own file.
    """
    installation = hashlib.sha256(str(Path(__file__).parent).encode()).hexdigest()[:16]
    return directory / f"compiled-{installation}"


@contextlib.contextmanager
def compilation_lock(mark: Path) -> Iterator[None]:
    """Hold the lock of this installation's compilation, so that only one process compiles.

    A process waits for the lock until the mark exists, which means that nothing is left to compile.
    The operating system releases the lock of a process that dies.
    """
    with mark.with_name(f"{mark.name}.lock").open("w") as file:
        started = time.monotonic()
        warned = False
        while not mark.exists():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
            except OSError:  # This file system has no locks.
                break
            if waited > MAX_WAIT_SECONDS:
                log.warning(
                    "another process still compiles the CPU kernels: this process compiles them too"
                )
                break
            if waited > SECONDS_UNTIL_NOTICE and not warned:
                log.warning(
                    "another process compiles the CPU kernels, and this process waits for it"
                )
                warned = True
            time.sleep(0.1)
        yield


@cache
def kernels() -> ModuleType | None:
    """Return the compiled kernels (octavo.ops.cpu.jit.run_jit).

    If this machine cannot run them, log a warning once and return None.
    """
    isa = instruction_set()
    if isinstance(isa, str):
        log.warning("CPU kernels cannot be used (%s): plain PyTorch is several times slower", isa)
        return None
    import numba

    config: Any = numba.config
    directory = cache_directory(isa)
    if not writable(directory):
        log.warning(
            "CPU kernels cannot be cached in %s, so they are compiled at every start "
            "(OCTAVO_CACHE sets another directory)",
            directory,
        )
        directory = Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    mark = compiled_mark(directory)
    # numba reads CACHE_DIR when a function is declared.
    previous_directory = config.CACHE_DIR
    config.CACHE_DIR = str(directory)
    try:
        lock = contextlib.nullcontext() if mark.exists() else compilation_lock(mark)
        with lock:
            report = contextlib.nullcontext() if mark.exists() else _compilation_report()
            with report:
                from octavo.ops.cpu.jit import run_jit

            mark.touch()
    finally:
        config.CACHE_DIR = previous_directory
    return run_jit


class ThreadPool:
    def __init__(self, entry_points: ModuleType, threads: int):
        """`entry_points` is the module that kernels() returns."""
        self.entry_points = entry_points
        self.kernels = entry_points.decoder_jit  # names the fields of jobs
        self.threads = threads
        self.lock = threading.Lock()
        barrier = self.kernels.thread_barrier
        self.state: NDArray[np.int64] = np.zeros(
            barrier.WORKERS + barrier.WORKER_SIZE * threads, dtype=np.int64
        )
        self.state[barrier.NUM_THREADS] = threads
        self.address = self.state.ctypes.data
        self._memory: dict[str, tuple[NDArray[np.uint8], int, int]] = {}
        self.generation = 0  # rises whenever memory moves
        self._zeros: NDArray[np.uint8] = np.zeros(1024, dtype=np.uint8)
        for index in range(1, threads):
            thread_arguments = (self.address, index)
            threading.Thread(
                target=entry_points.run_thread,
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
        self.entry_points.run_thread(self.address, 0)

    def memory(self, name: str, num_bytes: int) -> int:
        """Return the address of at least num_bytes bytes, 64-byte aligned.

        The memory is kept under this name until more bytes are requested.
        """
        _, address, size = self._memory.get(name, (None, 0, -1))
        if size < num_bytes:
            buffer = np.empty(num_bytes + 64, dtype=np.uint8)
            address = buffer.ctypes.data + -buffer.ctypes.data % 64
            self._memory[name] = (buffer, address, num_bytes)
            self.generation += 1
        return address

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
    entry_points = kernels()
    if entry_points is None:
        return None
    num_threads = num_threads or torch.get_num_threads()
    if num_threads not in _pools:
        _pools[num_threads] = ThreadPool(entry_points, num_threads)
    return _pools[num_threads]


os.register_at_fork(after_in_child=_pools.clear)  # a child process has no threads of its parent
