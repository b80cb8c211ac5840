"""The process that fuzzes one target: it changes known inputs at random and keeps those that reach
new lines of code.

A target is a module of tests/fuzz/targets with

    one_input(data: bytes) -> object    raises, or crashes, or takes too long, only if there is a defect; what it returns
                                        names the outcome (a status, an error code), and a new outcome counts as new code
    SEEDS: list[bytes]                  inputs to begin with, most of them valid
    WORDS: list[bytes]                  words of the language that inputs are written in
    MAX_BYTES, MEMORY_MB: int           optional bounds

The parent process (tests/fuzz/__main__.py) watches over it. The two share a page of memory that
holds the current input, so that the parent knows it even when this process ends without a word.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import logging
import mmap
import os
import random
import resource
import struct
import sys
import threading
import time
from collections.abc import Collection, Hashable
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from tests.fuzz.mutate import Mutator

PACKAGE = str(Path(__file__).parents[2] / "octavo")
SEEDS = Path(__file__).parent / "seeds"
MAX_BYTES = 16 * 2**10
MEMORY_MB = 256
LIMIT_SECONDS = 1.0  # of processor time for one input
MAX_CORPUS = 4000
# The number of the current input, from 1 on, the process time at its start, and its length. 0:
# none.
HEADER = struct.Struct("<QdQ")
SHARED_BYTES = HEADER.size + 2**20


class TooSlow(Exception):
    """An input took more than LIMIT_SECONDS."""


class TooLarge(Exception):
    """The process holds more memory than its bound."""


def load(name: str) -> ModuleType:
    return importlib.import_module(f"tests.fuzz.targets.{name}")


def stored_inputs(name: str, left_out: Collection[str] = ()) -> list[bytes]:
    """Inputs that failed once, but for files of these names."""
    paths = sorted((SEEDS / name).glob("*"))
    return [path.read_bytes() for path in paths if path.name not in left_out]


class Coverage:
    """The lines of octavo that have run, and the outcomes that were seen."""

    def __init__(self) -> None:
        self.seen: set[Hashable] = set()
        self._ours: dict[CodeType, bool] = {}
        self._lines: set[Hashable] = set()

    def run(self, target: ModuleType, data: bytes) -> bool:
        """Whether the input reached anything new."""
        self._lines = set()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            outcome = target.one_input(data)
        finally:
            sys.settrace(None)
            threading.settrace(None)
        self._lines.add(("outcome", outcome))
        new = not self._lines <= self.seen
        self.seen |= self._lines
        return new

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = code.co_filename.startswith(PACKAGE)
            self._ours[code] = ours
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._lines.add((frame.f_code, frame.f_lineno))
        return self._line


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def data_bytes() -> int:
    """The size that RLIMIT_DATA limits."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmData" in x)
    return int(line.split()[1]) * 1024


def clear_caches() -> None:
    """Empty every cache of a function of octavo."""
    for name, module in list(sys.modules.items()):
        if name.startswith("octavo"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class Fuzzer:
    def __init__(self, name: str, seed: int, shared: mmap.mmap, left_out: Collection[str]):
        """`left_out`: names of stored inputs that are known to fail."""
        self.target = load(name)
        self.shared = shared
        self.generator = random.Random(f"{name} {seed}")
        self.max_bytes: int = getattr(self.target, "MAX_BYTES", MAX_BYTES)
        self.memory_mb: int = getattr(self.target, "MEMORY_MB", MEMORY_MB)
        self.mutator = Mutator(self.generator, self.target.WORDS, self.max_bytes)
        self.coverage = Coverage()
        self.corpus = [*self.target.SEEDS, *stored_inputs(name, left_out)]
        self.count = 0
        self.slowest = 0.0
        self.base_mb = 0.0

    def run(self, seconds: float) -> None:
        for data in self.corpus:
            self.one(data)
        self.base_mb = resident_mb()
        limit = data_bytes() + self.memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        end = time.monotonic() + seconds
        reported = 0.0
        for turn in itertools.count():
            now = time.monotonic()
            if now > end:
                break
            if now - reported > 1:
                reported = now
                self.report()
            parent = self.generator.choice(self._recent() if turn % 2 else self.corpus)
            data = self.mutator.mutate(parent, self.generator.choice(self.corpus))
            if self.one(data) and len(self.corpus) < MAX_CORPUS:
                self.corpus.append(data)
        self.shared[: HEADER.size] = HEADER.pack(0, 0.0, 0)
        self.report()

    def _recent(self) -> list[bytes]:
        """What was found last leads to what is found next."""
        return self.corpus[-20:]

    def one(self, data: bytes) -> bool:
        begun = time.process_time()
        self.shared[: HEADER.size] = HEADER.pack(self.count + 1, begun, len(data))
        self.shared[HEADER.size : HEADER.size + len(data)] = data
        new = self.coverage.run(self.target, data)
        took = time.process_time() - begun
        if took > LIMIT_SECONDS:
            took = self._seconds_without_coverage(data)
        self.count += 1
        self.slowest = max(self.slowest, took)
        if took > LIMIT_SECONDS:
            raise TooSlow(f"one input took {took:.2f} s of processor time")
        if self.base_mb and self.count % 256 == 0 and self.grown_mb() > self.memory_mb:
            raise TooLarge(f"the process has grown by {self.grown_mb():.0f} MB")
        return new

    def _seconds_without_coverage(self, data: bytes) -> float:
        """Run an input again. Recording the lines that run takes several times as long as the lines
        themselves."""
        clear_caches()
        begun = time.process_time()
        self.shared[: HEADER.size] = HEADER.pack(self.count + 1, begun, len(data))
        self.target.one_input(data)
        return time.process_time() - begun

    def grown_mb(self) -> float:
        return resident_mb() - self.base_mb

    def report(self) -> None:
        found = {
            "inputs": self.count,
            "corpus": len(self.corpus),
            "lines": len(self.coverage.seen),
            "grown_mb": round(self.grown_mb(), 1),
            "slowest_ms": round(self.slowest * 1000),
        }
        print(json.dumps(found), flush=True)


def main(name: str, seed: str, seconds: str, shared_file: str, *left_out: str) -> None:
    faulthandler.enable()
    logging.disable()
    with open(shared_file, "r+b") as file:
        shared = mmap.mmap(file.fileno(), SHARED_BYTES)
    Fuzzer(name, int(seed), shared, left_out).run(float(seconds))
    sys.stdout.flush()
    # The interpreter's own end takes seconds with torch loaded, which would count as the last
    # input's.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
