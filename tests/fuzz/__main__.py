"""Fuzzes targets, each for so many seconds, and stores inputs that fail under tests/fuzz/seeds.

    python -m tests.fuzz --seconds 600                every target, one after another
    python -m tests.fuzz --seconds 60 regex lark      only these

An input fails when the target raises or crashes on it, when it takes more than a second of
processor time, or when the process needs more memory than its bound. The exit status is 1 if any
did.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo.serve.front.worker_pool import ENVIRONMENT
from tests.attacks.probe import waited_for_a_core
from tests.fuzz.worker import HEADER, LIMIT_SECONDS, SEEDS, SHARED_BYTES

TARGETS = Path(__file__).parent / "targets"
ROOT = Path(__file__).parents[2]
BLOCKED_SECONDS = 5.0  # for one input, while the process neither ends nor waits for a core
LOG_SECONDS = 10.0  # between two progress lines in a log file
MAX_ALIKE = 3  # inputs stored for failures that end with the same line
TICK = os.sysconf("SC_CLK_TCK")


def target_names() -> list[str]:
    return sorted(path.stem for path in TARGETS.glob("[a-z]*.py"))


@dataclass
class Result:
    name: str
    inputs: int = 0
    seconds: float = 0.0
    slowest_ms: float = 0.0
    grown_mb: float = 0.0
    stored: list[Path] = field(default_factory=list)
    shown: float = 0.0  # when the progress line was last written


class Watched:
    """A worker process, and what it shares with us."""

    def __init__(self, name: str, seed: int, seconds: float, folder: Path, left_out: Sequence[str]):
        path = folder / f"{name}-{seed}"
        path.write_bytes(bytes(SHARED_BYTES))
        with open(path, "r+b") as file:
            self.shared = mmap.mmap(file.fileno(), SHARED_BYTES)
        self.errors = folder / f"{name}-{seed}.err"
        argv = [sys.executable, "-m", "tests.fuzz.worker"]
        argv += [name, str(seed), str(seconds), str(path), *left_out]
        environment = {**os.environ, **ENVIRONMENT}  # memory is used as in a worker process
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._count = -1
        self._since = 0.0

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def hangs(self) -> bool:
        """Whether the current input has had more than its time."""
        count, begun, _ = HEADER.unpack(self.shared[: HEADER.size])
        try:
            now = time.monotonic() - waited_for_a_core(self.process.pid)
        except OSError:
            return False  # it has ended
        if count != self._count:
            self._count = count
            self._since = now
        busy = self._process_seconds() - begun > 2 * LIMIT_SECONDS
        return count > 0 and (busy or now - self._since > BLOCKED_SECONDS)

    def _process_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / TICK

    def current_input(self) -> bytes:
        _, _, length = HEADER.unpack(self.shared[: HEADER.size])
        return bytes(self.shared[HEADER.size : HEADER.size + length])

    def why(self) -> str:
        """The last lines that the process wrote to its standard error."""
        return self.errors.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGABRT)  # faulthandler writes where it is
        self.process.wait(10)
        self.shared.close()


def fuzz(name: str, seconds: float, seed: int, folder: Path) -> Result:
    """Run a target until its time is over. After a failure it begins again, with another seed."""
    result = Result(name)
    begun = time.monotonic()
    seen: dict[str, int] = {}
    while (left := seconds - (time.monotonic() - begun)) > 0.5:
        worker = Watched(name, seed, left, folder, [path.name for path in result.stored])
        before = result.inputs
        state: dict[str, float] = {}
        hung = False
        try:
            while worker.process.poll() is None and not hung:
                hung = worker.hangs()
                with contextlib.suppress(queue.Empty):
                    state = json.loads(worker.lines.get(timeout=0.2))
                    result.inputs = before + int(state["inputs"])
                    result.slowest_ms = max(result.slowest_ms, state["slowest_ms"])
                    result.grown_mb = max(result.grown_mb, state["grown_mb"])
                show(result, state, time.monotonic() - begun, seconds)
            if hung or worker.process.returncode != 0:
                data = worker.current_input()
                if worker.process.poll() is None:
                    worker.process.send_signal(signal.SIGABRT)
                    worker.process.wait(10)
                store(result, data, worker.why(), seen, hung)
        finally:
            worker.stop()
        seed += 1
    result.seconds = time.monotonic() - begun
    return result


def store(result: Result, data: bytes, why: str, seen: dict[str, int], hung: bool) -> None:
    """Keep the input that failed, unless there are several like it, and print what happened."""
    kind = "it took too long" if hung else (why.strip().splitlines() or ["it ended"])[-1]
    seen[kind] = seen.get(kind, 0) + 1
    if seen[kind] > MAX_ALIKE:
        return
    path = SEEDS / result.name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    result.stored.append(path)
    print(f"\n{result.name}: {kind}\n{why.strip()}\nstored in {path.relative_to(ROOT)}", flush=True)


def show(result: Result, state: dict[str, float], passed: float, seconds: float) -> None:
    """The progress line."""
    speed = result.inputs / max(passed, 0.1)
    text = (
        f"{result.name:16s} {passed:5.0f} of {seconds:.0f} s  {result.inputs:9,d} inputs  {speed:6,.0f}/s  "
        f"corpus {state.get('corpus', 0):4.0f}  lines {state.get('lines', 0):5.0f}  slowest {result.slowest_ms:4.0f} ms  "
        f"memory {result.grown_mb:+5.0f} MB  failures {len(result.stored)}"
    )
    if sys.stdout.isatty():
        print(f"\r{text}", end="", flush=True)
    elif passed - result.shown > LOG_SECONDS:
        result.shown = passed
        print(text, flush=True)


def main() -> int:
    known = target_names()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"any of {', '.join(known)}; all by default")
    parser.add_argument("--seconds", type=float, default=600, help="time for each target")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random changes")
    options = parser.parse_args()
    unknown = set(options.targets) - set(known)
    if unknown:
        parser.error(f"unknown target {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.targets or known:
            results.append(fuzz(name, options.seconds, options.seed, Path(folder)))
    failed = [result for result in results if result.stored]
    print(
        f"{sum(r.inputs for r in results):,d} inputs, {len(failed)} of {len(results)} targets failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
