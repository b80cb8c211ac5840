"""What a recording and a viewer cost: less than two percent of the time that the engine computes."""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from octavo.core.event_recorder import EventRecorder
from octavo.core.event_stream import Sink
from octavo.events import EventBus
from octavo.llm import LLM
from octavo.params import SamplingParams
from octavo.serve.channel.messages import EventLines
from octavo.serve.channel.sockets import EngineLink
from octavo.types import Request

PAIRS = 10
TURNS = 20  # rounds of each kind in a pair
REQUESTS = 8  # of a round, all at once
TOKENS = 32  # of each reply
MOST = 0.02
# The mean of ten pairs deviates by more standard errors than this with a probability of five
# percent (Student's t-distribution with nine degrees of freedom).
STUDENT = 2.26
# Reads everything from the socket whose number it is given, like the API server.
READ_ALL = """
import socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
while connection.recv(2**18):
    pass
"""


@contextlib.contextmanager
def viewer() -> Iterator[Sink]:
    """A sink that sends lines to another process, as an engine process does for the live page."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", READ_ALL, str(theirs.fileno())]
    reader = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    link = EngineLink(ours)
    try:
        yield lambda lines, is_start: link.send(EventLines(lines, is_start))
        assert not link.has_unsent.is_set()
    finally:
        ours.close()
        reader.wait()


@contextlib.contextmanager
def muted(events: EventBus) -> Iterator[None]:
    """Call no listener within this block, as if there were none. EventBus.muted would begin a new
    stream afterwards."""
    listeners = events.listeners
    events.listeners = {}
    yield
    events.listeners = listeners


class Workload:
    """Rounds of equal requests on an engine of the embedded model with so many threads."""

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        torch.set_num_threads(num_threads)
        options = {"num_gpu_blocks_override": 256, "max_num_seqs": REQUESTS, "max_model_len": 512}
        self.llm = LLM("smollm2", speculative_config=None, **options)  # type: ignore[arg-type]
        self.number = 1000
        for _ in range(4):
            self.seconds(time.process_time)

    def seconds(self, clock: Callable[[], float]) -> float:
        """Serve a round. Returns how long it takes by a clock."""
        torch.set_num_threads(self.num_threads)
        engine = self.llm.engine
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
        requests = []
        for _ in range(REQUESTS):
            self.number += 1
            prompt = self.llm.get_tokenizer().encode(f"Tell me about the number {self.number}.")
            requests.append(Request(f"request {self.number}", prompt, params))
        begun = clock()
        for request in requests:
            engine.add(request)
        while not engine.idle:
            engine.step()
        return clock() - begun

    def added_seconds(self, is_muted_first: bool) -> float:
        """Serve two rounds, one of them without events. Returns by how much more processor time
        the engine's thread takes in the other one."""
        seconds = {}
        for is_muted in (is_muted_first, not is_muted_first):
            with muted(self.llm.engine.events) if is_muted else contextlib.nullcontext():
                seconds[is_muted] = self.seconds(time.thread_time)
        return seconds[False] - seconds[True]

    def least_seconds(self) -> float:
        """Serve a round. Returns a duration than which it was not faster: the processor time of all
        threads, divided by their number."""
        return self.seconds(time.process_time) / self.num_threads


@pytest.fixture
def num_threads() -> Iterator[int]:
    number = torch.get_num_threads()
    yield number
    torch.set_num_threads(number)


@pytest.mark.slow
def test_a_recording_and_a_viewer_cost_less_than_two_percent(
    num_threads: int, tmp_path: Path
) -> None:
    """Rounds with and without a recording and a viewer alternate in one process. The processor time
    of the engine's thread is compared, because the clock also counts the time that other programs
    have the processor. These rounds have one thread, so that none waits for another. What events
    add is compared with the duration of rounds with all threads, of which it is a larger share."""
    measured, usual = Workload(1), Workload(num_threads)
    stream = measured.llm.streams.stream_of(measured.llm.engine)
    file = tmp_path / "events.jsonl"
    stream.open(EventRecorder(file))
    costs = []
    durations = []
    with viewer() as send_to_viewer:
        stream.open(send_to_viewer)
        for _ in range(PAIRS):
            added = []
            least = []
            for turn in range(TURNS):
                added.append(measured.added_seconds(turn % 2 == 0))
                least.append(usual.least_seconds())
            # The rounds are equal. Those that were disturbed differ from the median.
            durations.append(statistics.median(least))
            costs.append(statistics.median(added) / durations[-1])
        stream.close(send_to_viewer)
    cost = statistics.mean(costs)
    margin = STUDENT * statistics.stdev(costs) / PAIRS**0.5
    size = file.stat().st_size
    print(
        f"{PAIRS} pairs of {TURNS} rounds: {cost:.2%} ± {margin:.2%} of a round of "
        f"{statistics.mean(durations):.3f} s (pairs: {min(costs):.2%} to {max(costs):.2%}); "
        f"{size:,} bytes were recorded"
    )
    assert size > 100_000
    assert cost + margin < MOST
