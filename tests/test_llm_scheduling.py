"""Policies and batching modes through the in-process API: the same tokens under each, and what each promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.batching import MODES, USED
from octavo.core.policy import POLICIES
from octavo.errors import InvalidRequest
from tests.test_llm import GREEDY, ids_of, make, prompts


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    return ids_of(make().generate(prompts(6), SamplingParams(max_tokens=8, **GREEDY), use_tqdm=False))


SMALL = {"max_batch": 2, "window_ms": 1.0}  # where they are used
BATCHING = [{"batching": mode, **{name: SMALL[name] for name in SMALL if mode in USED[name]}} for mode in MODES]


@pytest.mark.parametrize("options", [{"scheduling_policy": p} for p in POLICIES] + BATCHING, ids=str)
def test_the_tokens_are_the_same_under_every_policy_and_mode(options: dict[str, Any], want: list[list[int]]) -> None:
    llm = make(max_num_seqs=3, block_size=4, num_gpu_blocks_override=30, depth=2, **options)
    assert ids_of(llm.generate(prompts(6), SamplingParams(max_tokens=8, **GREEDY), use_tqdm=False)) == want


def test_lower_priorities_are_served_first() -> None:
    llm = make(max_num_seqs=1, scheduling_policy="priority")
    outputs = llm.generate([[i] * 8 for i in range(1, 5)], SamplingParams(max_tokens=3, **GREEDY), priority=[3, 1, 2, -5])
    assert sorted(range(4), key=lambda i: outputs[i].metrics.first_token_time or 0) == [3, 1, 2, 0]


def test_an_urgent_stream_pauses_others() -> None:
    llm = make(max_num_seqs=1, scheduling_policy="priority")
    low = llm._submit((None, [5] * 8, ""), SamplingParams(max_tokens=30, **GREEDY), 100.0, number=99, priority=1)
    for _ in range(4):
        llm.step()
    (urgent,) = llm.generate([[6] * 8], SamplingParams(max_tokens=2, **GREEDY), use_tqdm=False, priority=[-100_000])
    assert urgent.finished and not low.finished and llm.engine.scheduler.count.preemptions == 1
    while not low.finished:
        llm.step()
    assert low.outputs[0].token_ids == ids_of(make().generate([[5] * 8], SamplingParams(max_tokens=30, **GREEDY)))[0]


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"scheduling_policy": "best"}, "scheduling_policy", "unknown scheduling policy 'best': use fcfs"),
        ({"batching": "magic"}, "batching", "unknown batching mode"),
        ({"max_batch": 0}, "max_batch", "at least 1"),
        ({"window_ms": -1}, "window_ms", "number in"),
        ({"target_ms": 0}, "target_ms", "number in"),
        ({"short_share": 1.5}, "short_share", "number in"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        LLM("/no/such/model", **options)
    assert caught.value.param == param


def test_priorities_need_the_policy_and_one_each() -> None:
    params = SamplingParams(max_tokens=1, **GREEDY)
    with pytest.raises(InvalidRequest, match='scheduling_policy="priority"'):
        make().generate([[1]], params, priority=[1])
    llm = make(scheduling_policy="priority")
    with pytest.raises(InvalidRequest, match="2 priorities for 1 prompts"):
        llm.generate([[1]], params, priority=[1, 2])
    with pytest.raises(InvalidRequest, match="priority must be an integer"):
        llm.generate([[1]], params, priority=[1.5])  # type: ignore[list-item]
    assert llm.engine.idle, "what was refused leaves nothing behind"


def test_a_trace_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a trace cannot be written to .*nowhere"):
        make(record_trace=tmp_path / "nowhere" / "trace.jsonl")


def test_a_run_is_recorded_without_the_warm_up(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    llm = make(record_trace=file, scheduling_policy="priority")
    llm.warm_up()
    llm.generate([[7] * 20, [7] * 18], SamplingParams(max_tokens=4, **GREEDY), use_tqdm=False, priority=[0, 2])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((e["prompt"], e["output"], e["priority"]) for e in lines) == [(18, 4, 2), (20, 4, 0)]
    assert lines[0]["blocks"] == lines[1]["blocks"] and len(lines[0]["blocks"]) == 1
