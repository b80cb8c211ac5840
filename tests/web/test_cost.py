"""What a recording and a viewer cost: less than two percent of the throughput."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from octavo.core.event_recorder import EventRecorder
from octavo.llm import LLM
from octavo.params import SamplingParams

PAIRS = 10
MOST = 0.02


def seconds_of(llm: LLM, prompts: list[str]) -> float:
    params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.0)
    llm.reset_prefix_cache()
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun


@pytest.mark.slow
def test_recording_and_viewing_cost_less_than_two_percent(tmp_path: Path) -> None:
    """The two sides of a pair run in turns in one process, so that the machine's own changes meet
    both of them."""
    llm = LLM("smollm2", num_gpu_blocks_override=256, max_num_seqs=8, max_model_len=512)
    prompts = [f"Tell me about the number {number}, and why." for number in range(16)]
    seconds_of(llm, prompts)
    viewed: list[bytes] = []
    losses = []
    for pair in range(PAIRS):
        stream = llm.streams.stream_of(llm.engine)
        recorder = EventRecorder(tmp_path / f"{pair}.jsonl")
        times = {}
        for is_watched in ((True, False), (False, True))[pair % 2]:
            if is_watched:
                stream.open(recorder)
                stream.open(lambda lines, is_start: viewed.append(lines))
            times[is_watched] = seconds_of(llm, prompts)
            if is_watched:
                for sink in list(stream.sinks):
                    stream.close(sink)
        losses.append(times[True] / times[False] - 1)
    loss = statistics.median(losses)
    print(f"recording and viewing: {loss:+.2%} of the time (median of {PAIRS} pairs)", losses)
    assert sum(map(len, viewed)) > 10_000
    assert loss < MOST
