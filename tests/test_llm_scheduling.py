"""Policies and batching modes through the in-process API: the same tokens under each, and what each
promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.batching import MODES, MODES_OF_OPTION
from octavo.core.policy import POLICIES
from octavo.errors import InvalidRequest
from octavo.events import Admitted
from octavo.memory import default_piggyback_tokens
from octavo.types import Request
from tests.test_llm import GREEDY, ids_of, make, prompts


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    return ids_of(
        make().generate(prompts(6), SamplingParams(max_tokens=8, **GREEDY), use_tqdm=False)
    )


SMALL = {"max_batch": 2, "window_ms": 1.0}  # for the modes that use them
BATCHING = [
    {"batching": mode, **{name: SMALL[name] for name in SMALL if mode in MODES_OF_OPTION[name]}}
    for mode in MODES
]


@pytest.mark.parametrize(
    "options", [{"scheduling_policy": p} for p in POLICIES] + BATCHING, ids=str
)
def test_the_tokens_are_the_same_under_every_policy_and_mode(
    options: dict[str, Any], want: list[list[int]]
) -> None:
    llm = make(max_num_seqs=3, block_size=4, num_gpu_blocks_override=30, depth=2, **options)
    assert (
        ids_of(llm.generate(prompts(6), SamplingParams(max_tokens=8, **GREEDY), use_tqdm=False))
        == want
    )


def test_lower_priorities_are_served_first() -> None:
    llm = make(max_num_seqs=1, scheduling_policy="priority")
    outputs = llm.generate(
        [[i] * 8 for i in range(1, 5)],
        SamplingParams(max_tokens=3, **GREEDY),
        priority=[3, 1, 2, -5],
    )
    assert sorted(range(4), key=lambda i: outputs[i].metrics.first_token_time or 0) == [3, 1, 2, 0]


def test_an_urgent_stream_pauses_others() -> None:
    llm = make(max_num_seqs=1, scheduling_policy="priority")
    params = SamplingParams(max_tokens=30, **GREEDY)
    low = llm.loop.add(Request("low", [5] * 8, params, arrival=100.0, priority=1), None)
    for _ in range(4):
        llm.step()
    (urgent,) = llm.generate(
        [[6] * 8], SamplingParams(max_tokens=2, **GREEDY), use_tqdm=False, priority=[-100_000]
    )
    assert urgent.finished and not low.finished and llm.engine.scheduler.counters.preemptions == 1
    while not low.finished:
        llm.step()
    assert (
        low.completions[0].token_ids
        == ids_of(make().generate([[5] * 8], SamplingParams(max_tokens=30, **GREEDY)))[0]
    )


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        (
            {"scheduling_policy": "best"},
            "scheduling_policy",
            "unknown scheduling policy 'best': use fcfs",
        ),
        ({"batching": "magic"}, "batching", "unknown batching mode"),
        ({"max_batch": 0}, "max_batch", "at least 1"),
        ({"window_ms": -1}, "window_ms", "number in"),
        ({"target_ms": 0}, "target_ms", "number in"),
        ({"short_prompt_share": 1.5}, "short_prompt_share", "number in"),
        ({"piggyback_tokens": -1}, "piggyback_tokens", "at least 0"),
        ({"piggyback_tokens": 8, "batching": "static"}, "piggyback_tokens", "no effect here"),
        (
            {"piggyback_tokens": 8, "scheduling_policy": "priority"},
            "piggyback_tokens",
            "no effect here",
        ),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    options: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        LLM("/no/such/model", **options)
    assert caught.value.param == param


def test_priorities_need_the_policy_and_one_each() -> None:
    params = SamplingParams(max_tokens=1, **GREEDY)
    for policy in ("fcfs", "shortest", "deadline", "fair", "prefix"):
        with pytest.raises(InvalidRequest, match='scheduling_policy="priority"'):
            make(scheduling_policy=policy).generate([[1]], params, priority=[1])
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
    llm.generate(
        [[7] * 20, [7] * 18],
        SamplingParams(max_tokens=4, **GREEDY),
        use_tqdm=False,
        priority=[0, 2],
    )
    lines = [json.loads(line) for line in file.read_text().splitlines() if "prompt" in line]
    assert sorted((e["prompt"], e["output"], e["priority"]) for e in lines) == [
        (18, 4, 2),
        (20, 4, 0),
    ]
    assert lines[0]["blocks"] == lines[1]["blocks"] and len(lines[0]["blocks"]) == 1


# ---- lists ---------------------------------------------------------------------------------------


def piggybacking(**options: Any) -> LLM:
    """An LLM configured like one with a large model on a GPU."""
    return make(piggyback_tokens=12, **options)


def starts(llm: LLM) -> list[str]:
    """The ids of requests in the order in which they start from now on."""
    started: list[str] = []
    llm.engine.events.subscribe(lambda event: started.append(event.seq.request.id), Admitted)
    return started


def test_a_list_starts_with_the_longest_reply_and_nothing_else_is_different() -> None:
    params = [
        SamplingParams(max_tokens=n, temperature=1.0, ignore_eos=True) for n in (2, 9, 4, 9, 1)
    ]
    plain, llm = make(), piggybacking()
    for _ in range(2):  # ids and seeds continue from the first list to the second
        want, got = (each.generate(prompts(5), params, use_tqdm=False) for each in (plain, llm))
        assert ids_of(got) == ids_of(want)
        assert [o.request_id for o in got] == [o.request_id for o in want]
        assert [o.prompt_token_ids for o in got] == prompts(5)
    started = starts(llm)
    llm.generate(prompts(5), params, use_tqdm=False)
    assert [int(id) % 5 for id in started] == [1, 3, 2, 0, 4]
    two = SamplingParams(max_tokens=2, **GREEDY)
    stream = llm.stream(prompts(1)[0], two)
    assert stream._collector.request.id == "15" and len(list(stream)) == 2
    assert llm.generate(prompts(1), two, use_tqdm=False)[0].request_id == "16"


@pytest.mark.parametrize("options", [{"piggyback_tokens": 0}, {"batching": "static"}], ids=str)
def test_a_list_starts_in_its_own_order_without_piggybacking(options: dict[str, Any]) -> None:
    llm = make(**options)
    started = starts(llm)
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in (2, 5)]
    llm.generate([[1] * 3, [2] * 5], params, use_tqdm=False)
    assert started == ["0", "1"]


def test_a_list_of_which_one_is_refused_leaves_nothing_behind() -> None:
    llm = piggybacking()
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in (5, 2, 9)]
    for bad in ([[1], [10**9], [2]], [[1], [2], [10**9]]):
        with pytest.raises(InvalidRequest, match="token id"):
            llm.generate(bad, params, use_tqdm=False)
        assert not llm.loop.collectors and not llm.engine.scheduler.live
    assert len(llm.generate([[1], [2], [3]], params, use_tqdm=False)) == 3


def test_only_large_unquantised_models_piggyback() -> None:
    billion = 10**9
    assert default_piggyback_tokens("cuda", 8 * billion, 16 * billion) == 320
    assert default_piggyback_tokens("cuda", 8 * billion, 8 * billion) == 0  # codes
    assert default_piggyback_tokens("cuda", billion, 2 * billion) == 0
    assert default_piggyback_tokens("cpu", 8 * billion, 32 * billion) == 0
