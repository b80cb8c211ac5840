"""The threads that run CPU kernels, and the memory they work in. One team a process, made when first needed.

As many threads as torch uses, the caller's among them, so one setting (OMP_NUM_THREADS, torch.set_num_threads) rules both. They
take work only from here, one job at a time, and sleep in between.
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
    """The compiled kernels (octavo.ops.cpu.jit.decoder_jit), or None where this machine cannot run them, which is then said once."""
    isa = instruction_set()
    if isinstance(isa, str):
        log.warning("CPU kernels are off (%s): plain PyTorch computes, several times slower", isa)
        return None
    import numba

    config: Any = numba.config
    directory = cache_directory(isa)
    first = not cache_directory(isa).exists()
    if not writable(directory):
        log.warning(
            "CPU kernels cannot be kept in %s (OCTAVO_CACHE names another place): they are compiled at every start",
            directory,
        )
        directory = Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
        first = True
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    started = time.monotonic()
    if first:
        print(
            f"octavo: compiling CPU kernels for {isa.name}, once ...",
            end="",
            file=sys.stderr,
            flush=True,
        )
    # read when a function is declared
    before = config.CACHE_DIR
    config.CACHE_DIR = str(directory)
    try:
        from octavo.ops.cpu.jit import decoder_jit
    finally:
        config.CACHE_DIR = before
        if first:
            print(f" {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return decoder_jit


class Workers:
    def __init__(self, step: ModuleType, threads: int):
        self.step = step
        self.threads = threads
        self.lock = threading.Lock()
        team = step.thread_barrier
        self.state: NDArray[np.int64] = np.zeros(
            team.MEMBER + team.MEMBER_SIZE * threads, dtype=np.int64
        )
        self.state[team.THREADS] = threads
        self.address = self.state.ctypes.data
        self._memory: dict[str, NDArray[np.uint8]] = {}
        self._zeros: NDArray[np.uint8] = np.zeros(1024, dtype=np.uint8)
        for number in range(1, threads):
            args = (self.address, number)
            threading.Thread(
                target=step.follow, args=args, daemon=True, name=f"octavo-cpu-{number}"
            ).start()

    def run(self, job: NDArray[np.int64], phases: int = 2) -> None:
        """All threads do the job; returns when it is done. The caller holds the lock, which guards the memory too."""
        team = self.step.thread_barrier
        self.state[team.JOB] = job.ctypes.data
        self.state[team.PHASES] = phases
        self.state[team.COUNTERS] = self.memory("counters", phases * team.COUNTER)
        self.step.lead(self.address)

    def memory(self, name: str, size: int) -> int:
        """The address of at least `size` bytes, 64-byte aligned, kept under this name until more are asked for."""
        found = self._memory.get(name)
        if found is None or len(found) < size + 64:
            found = self._memory[name] = np.empty(size + 64, dtype=np.uint8)
        return found.ctypes.data + -found.ctypes.data % 64

    def zeros(self, size: int) -> int:
        """The address of so many bytes of zeros."""
        if len(self._zeros) < size:
            self._zeros = np.zeros(size, dtype=np.uint8)
        return self._zeros.ctypes.data


_teams: dict[int, Workers] = {}


def workers(threads: int | None = None) -> Workers | None:
    """The process's team of so many threads; by default as many as torch has now."""
    step = kernels()
    if step is None:
        return None
    threads = threads or torch.get_num_threads()
    if threads not in _teams:
        _teams[threads] = Workers(step, threads)
    return _teams[threads]


os.register_at_fork(after_in_child=_teams.clear)  # a child has none of its parent's threads
