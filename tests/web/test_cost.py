"""What a recording and a viewer cost: the time that the engine's thread spends on them is less than
two percent of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.core.event_recorder import EventRecorder
from octavo.llm import LLM
from octavo.params import SamplingParams
from octavo.types import Request

PAIRS = 10
TURNS = 10  # in a pair, with and without a stream
STEPS = 20  # in a turn
MOST = 0.02


class Stopwatch:
    """Adds up the time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed


class Workload:
    """Eight requests that are always live, on the engine of an LLM."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.number = 0

    def seconds_of_steps(self, count: int) -> list[float]:
        """Take steps, and return the time of each."""
        engine = self.llm.engine
        seconds = []
        while len(seconds) < count:
            while len(engine.scheduler.live) < 8:
                self._add_request()
            begun = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begun)
        return seconds

    def _add_request(self) -> None:
        self.number += 1
        prompt = self.llm.get_tokenizer().encode(f"Tell me about the number {self.number}.")
        params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
        self.llm.engine.add(Request(f"request {self.number}", prompt, params))


def mean_without_bursts(seconds: list[float]) -> float:
    """Return the mean, for which a step counts at most twice the median: a longer one was
    interrupted by another program. The steps that pass lines on are not much longer than others."""
    most = 2 * statistics.median(seconds)
    return statistics.mean(min(each, most) for each in seconds)


@pytest.mark.slow
def test_the_engine_spends_less_than_two_percent_on_a_recording_and_a_viewer(
    tmp_path: Path,
) -> None:
    """Ten pairs of runs with and without a stream. The runs of a pair alternate every few steps, so
    that other programs disturb both alike. Where the pairs are still too noisy to tell, the time
    that the engine's thread spends on the stream decides."""
    options = {"num_gpu_blocks_override": 256, "max_num_seqs": 8, "max_model_len": 512}
    llm = LLM("smollm2", speculative_config=None, **options)  # type: ignore[arg-type]
    workload = Workload(llm)
    workload.seconds_of_steps(60)
    stream = llm.streams.stream_of(llm.engine)
    watch = Stopwatch()
    stream.on_event = watch.around(stream.on_event)  # type: ignore[method-assign]
    viewed: list[bytes] = []
    seconds_watched = 0.0
    ratios = []
    for pair in range(PAIRS):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        recorder = EventRecorder(tmp_path / f"{pair}.jsonl")
        for turn in range(2 * TURNS):
            is_watched = (turn + pair) % 2 == 0
            if is_watched:
                stream.open(recorder)
                stream.open(lambda lines, is_start: viewed.append(lines))
            seconds[is_watched] += workload.seconds_of_steps(STEPS)
            for sink in list(stream.sinks):
                stream.close(sink)
        seconds_watched += sum(seconds[True])
        ratios.append(mean_without_bursts(seconds[True]) / mean_without_bursts(seconds[False]) - 1)
    share = watch.seconds / seconds_watched
    error = statistics.stdev(ratios) / PAIRS**0.5
    print(
        f"{PAIRS} pairs: {statistics.mean(ratios):+.2%} ± {error:.2%} ({min(ratios):+.2%} to "
        f"{max(ratios):+.2%}); the engine's thread spends {share:.2%} on the stream"
    )
    assert sum(map(len, viewed)) > 10_000
    assert share < MOST
    assert statistics.mean(ratios) - 2 * error < MOST
