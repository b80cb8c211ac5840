"""Starts the ranks of tensor parallelism, which execute the same plans. Rank 0 uses this module.

    rank 0        this process: the scheduler, and a runner with a part of the model
    rank 1 ...    octavo/rank_process.py: a runner with another part of the model

A pipe carries each plan to each rank. Every rank computes the same logits and samples the same
tokens, because noise depends only on seed and position. So the ranks return only disk events.
These messages cross the pipe of a rank, as octavo/message_encoding.py encodes them:

    from rank 0    RankStart, RankJob, Resolved (octavo/assemble.py), and a Plan for each step
    to rank 0      RankStarted, DeviceFacts, TierFacts (octavo/assemble.py), and a RankReport for
                   each step if there is a disk tier. A RankFailed can replace any of these

The thread that starts a process waits for its end. If a rank ends, its collectives fail on the
other ranks, and the engine cannot continue: every later step raises RankLost.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, TypeVar

import torch

from octavo.errors import OctavoError, RankLost
from octavo.message_encoding import decode, encode
from octavo.ops.collectives import RankGroup
from octavo.runner.disk_agreement import DiskAgreement
from octavo.runner.runner import Runner, StepHandle
from octavo.types import DiskEvent, Plan, StepResult

log = logging.getLogger(__name__)
Message = TypeVar("Message")
PROGRAM = "octavo.rank_process"
COLLECTIVE_TIMEOUT = 600.0  # A collective waits this many seconds for the slowest rank.
END_SECONDS = 15.0  # A rank has this time to write KV to disk and to end.
LOSS_SECONDS = 2.0  # The end of a rank is detected within this time after a failed collective.


class RankStart(NamedTuple):
    """The first message to a rank."""

    rank: int
    size: int
    store_path: str
    device: str  # "cpu" or "cuda"


class RankStarted(NamedTuple):
    """The first message of a rank."""

    rank: int


class RankFailed(NamedTuple):
    """A rank's last message if it cannot serve the model."""

    message: str


class RankReport(NamedTuple):
    """The report of a rank after a step if there is a disk tier."""

    disk_events: list[DiskEvent]
    corrupt_host_blocks: set[int]


class Ranks:
    """All ranks except rank 0, and the group that connects them with it."""

    def __init__(self, size: int, device: str, job: Any, gpus: Sequence[str] = ()):
        """Start the processes and connect them.

        `job` is the second message to every rank. `gpus` has the name of each rank's GPU, as in
        CUDA_VISIBLE_DEVICES.
        """
        self.size = size
        # A thread calls this function with the reason when a rank is lost.
        self.on_loss: Callable[[str], None] | None = None
        self._lost = threading.Event()
        self._reason = ""
        self._closing = False
        self._lock = threading.Lock()
        self._directory = tempfile.TemporaryDirectory(prefix="octavo-ranks-")
        store_path = os.path.join(self._directory.name, "store")
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self.group: RankGroup | None = None
        self._num_threads = torch.get_num_threads()
        if device == "cpu":  # The ranks share the cores.
            torch.set_num_threads(max(1, self._num_threads // size))
        try:
            for rank in range(1, size):
                own_gpu = {"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {}
                own_threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
                self._start(rank, own_gpu | own_threads)
            for rank in self._connections:
                start = RankStart(rank, size, store_path, device)
                self._send_bytes(rank, encode(start))
            self.send(job)
            self.receive(RankStarted)
            self.group = RankGroup(store_path, 0, size, device, COLLECTIVE_TIMEOUT)
        except BaseException:
            self.close()
            raise
        finally:
            self._directory.cleanup()  # Only connecting needs it.

    def _start(self, rank: int, environment: Mapping[str, str]) -> None:
        own_end, rank_end = Pipe()
        self._connections[rank] = own_end
        started = threading.Event()
        thread = threading.Thread(
            target=self._run,
            args=(rank, environment, rank_end, started),
            daemon=True,
            name=f"rank-{rank}",
        )
        self._threads.append(thread)
        thread.start()
        started.wait()

    def _run(
        self,
        rank: int,
        environment: Mapping[str, str],
        rank_end: Connection,
        started: threading.Event,
    ) -> None:
        """Start a process and wait for its end, in a thread of its own.

        Linux kills the process when this thread ends (octavo/parent_process.py).
        """
        try:
            process = self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(rank_end.fileno())],
                pass_fds=[rank_end.fileno()],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # An interrupt from the terminal is for rank 0.
            )
        except OSError as error:
            self.lose(f"rank {rank} cannot be started: {error}")
            return
        finally:
            rank_end.close()
            started.set()
        code = process.wait()
        if not self._closing:
            self.lose(f"rank {rank} (process {process.pid}) has ended: {describe_end(code)}")

    # ---- messages --------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send a message to every rank. Raises RankLost if a rank has ended."""
        self.check()
        encoded = encode(message)
        for rank in self._connections:
            self._send_bytes(rank, encoded)

    def _send_bytes(self, rank: int, encoded: bytes) -> None:
        try:
            self._connections[rank].send_bytes(encoded)
        except OSError:
            raise self.loss(rank) from None

    def receive(self, message_class: type[Message]) -> list[Message]:
        """Return the next message of each rank, in order. It must belong to the class."""
        messages = []
        for rank, connection in self._connections.items():
            try:
                encoded = connection.recv_bytes()
            except (EOFError, OSError):
                raise self.loss(rank) from None
            message = decode(encoded, message_class, RankFailed)
            if isinstance(message, RankFailed):
                raise OctavoError(f"rank {rank} cannot serve the model: {message.message}")
            messages.append(message)
        return messages

    # ---- the end of a rank -----------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    def check(self) -> None:
        if self.is_lost:
            raise self.loss()

    def wait_for_loss(self) -> None:
        """Wait until the end of a rank is detected, shortly after a collective has failed."""
        self._lost.wait(LOSS_SECONDS)

    def loss(self, rank: int | None = None) -> RankLost:
        """Return the error that names the rank that has ended. `rank` has closed its pipe."""
        self.wait_for_loss()
        subject = "a rank" if rank is None else f"rank {rank}"
        reason = self._reason or f"{subject} of tensor parallelism does not answer"
        return RankLost(f"{reason}. The engine has stopped: make a new one")

    def lose(self, reason: str) -> None:
        """Stop all ranks, because one of them has ended or has not executed a plan."""
        with self._lock:
            if self.is_lost or self._closing:
                return
            self._reason = reason
            self._lost.set()
        if self.on_loss is not None:
            self.on_loss(reason)
        log.critical("%s: the engine stops", reason)
        self._kill()
        if self.group is not None:
            self.group.abort()

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()

    def close(self) -> None:
        """End all ranks.

        A rank whose pipe is closed writes the blocks that wait to be saved, and then ends.
        """
        with self._lock:
            self._closing = True
            if not self._reason:
                self._reason = "the ranks of tensor parallelism were closed"
            self._lost.set()
        for connection in self._connections.values():
            connection.close()
        for thread in self._threads:
            thread.join(END_SECONDS)
        self._kill()
        torch.set_num_threads(self._num_threads)


def describe_end(code: int) -> str:
    if code >= 0:
        return f"exit {code}, see its messages above"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


# ---- running plans ---------------------------------------------------------------------------


class RankedRunner:
    """Runs each plan on all ranks, with the interface of one runner."""

    def __init__(self, runner: Runner, ranks: Ranks, has_disk: bool):
        """Create the object. `runner` is the runner of rank 0.

        `has_disk` is true if there is a disk tier.
        """
        self.runner = runner
        self.ranks = ranks
        self.agreement = DiskAgreement(ranks.size) if has_disk else None

    def launch(self, plan: Plan) -> RankedHandle:
        """Launch a step on all ranks. Any failure is final: other ranks would wait for this one."""
        self.ranks.send(plan)
        try:
            return RankedHandle(self, self.runner.launch(plan))
        except BaseException as error:
            raise self.failure(error) from error

    def failure(self, error: BaseException) -> BaseException:
        """Stop all ranks after an error in a step. Return the error to raise."""
        if isinstance(error, RankLost):
            return error
        if isinstance(error, RuntimeError):
            self.ranks.wait_for_loss()
        self.ranks.lose(f"a step of rank 0 failed ({type(error).__name__}: {error})")
        return self.ranks.loss() if isinstance(error, Exception) else error


class RankedHandle:
    """A step that all ranks have launched."""

    def __init__(self, ranked_runner: RankedRunner, handle: StepHandle):
        self.ranked_runner = ranked_runner
        self.handle = handle

    def wait(self) -> StepResult:
        ranked_runner = self.ranked_runner
        try:
            result = self.handle.wait()
            if ranked_runner.agreement is not None:
                reports = ranked_runner.ranks.receive(RankReport)
                events = [result.disk_events, *(report.disk_events for report in reports)]
                result.disk_events = ranked_runner.agreement.combine(events)
                for report in reports:
                    result.corrupt_host_blocks |= report.corrupt_host_blocks
        except BaseException as error:
            raise ranked_runner.failure(error) from error
        return result
