"""What a recording and a viewer cost: the time that the engine's thread spends on them is less than
two percent of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.core.event_recorder import EventRecorder
from octavo.llm import LLM
from octavo.params import SamplingParams

PAIRS = 10
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


def seconds_of(llm: LLM, prompts: list[str]) -> float:
    params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.0)
    llm.reset_prefix_cache()
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun


@pytest.mark.slow
def test_the_engine_spends_less_than_two_percent_on_a_recording_and_a_viewer(
    tmp_path: Path,
) -> None:
    """Runs with and without a stream alternate, and the test prints the shortest of each: on a
    machine that does nothing else, they differ by the same amount. Other programs change the time
    of a run by more than two percent, so the test itself adds up the time spent on the stream."""
    llm = LLM("smollm2", num_gpu_blocks_override=256, max_num_seqs=8, max_model_len=512)
    prompts = [f"Tell me about the number {number}, and why." for number in range(16)]
    seconds_of(llm, prompts)
    viewed: list[bytes] = []
    watch = Stopwatch()
    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(PAIRS):
        stream = llm.streams.stream_of(llm.engine)
        stream.on_event = watch.around(stream.on_event)  # type: ignore[method-assign]
        recorder = EventRecorder(tmp_path / f"{pair}.jsonl")
        for is_watched in ((True, False), (False, True))[pair % 2]:
            if is_watched:
                stream.open(recorder)
                stream.open(lambda lines, is_start: viewed.append(lines))
            times[is_watched].append(seconds_of(llm, prompts))
            if is_watched:
                for sink in list(stream.sinks):
                    stream.close(sink)
    share = watch.seconds / sum(times[True])
    difference = min(times[True]) / min(times[False]) - 1
    print(f"the stream takes {share:.2%} of a run; the shortest runs differ by {difference:+.2%}")
    assert sum(map(len, viewed)) > 10_000
    assert share < MOST
