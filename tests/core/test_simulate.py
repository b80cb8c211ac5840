"""The simulator (the real scheduler on a virtual clock), traces, and the costs of steps."""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core import trace
from octavo.core.simulate import (
    EMBEDDED_CPU,
    FEATURES,
    Costs,
    features,
    percentile,
    requests_of,
    simulate,
)
from octavo.core.trace import BLOCK, Recorder, TraceEntry
from octavo.errors import InvalidRequest
from octavo.params import SamplingParams
from octavo.types import Item, Plan, Request, Sequence
from tests.workloads import make_engine

COSTS = Costs(step=0.010, prefill=0.001, sampled=0.002, kv=0.0, pairs=0.0)
CACHE = CacheConfig(16, 1000)


def play(
    entries: list[TraceEntry], cache: CacheConfig = CACHE, **schedule: object
) -> dict[str, float]:
    return simulate(entries, COSTS, cache, ScheduleConfig(8, 256, 2048, **schedule)).summary()  # type: ignore[arg-type]


# ---- time ----------------------------------------------------------------------------------------


def test_a_request_takes_what_its_steps_cost() -> None:
    report = play([TraceEntry(0.0, prompt=30, output=5)])
    assert report["ttft_p50_ms"] == pytest.approx(10 + 30 + 2)
    assert [report["itl_p50_ms"], report["itl_p99_ms"]] == pytest.approx([12, 12])
    assert report["e2e_p50_ms"] == pytest.approx(42 + 4 * 12)
    assert report["tok_s"] == pytest.approx(5 / 0.090)


def test_two_simultaneous_requests_share_the_steps() -> None:
    report = play([TraceEntry(0.0, 10, 5), TraceEntry(0.0, 10, 5)])
    assert report["ttft_p99_ms"] == pytest.approx(10 + 20 + 4) and report[
        "itl_p50_ms"
    ] == pytest.approx(14)


def test_time_passes_between_requests() -> None:
    report = play([TraceEntry(0.0, 10, 1), TraceEntry(100.0, 10, 1)])
    assert report["seconds"] == pytest.approx(100.022) and report["ttft_p99_ms"] == pytest.approx(
        22
    )


def test_steps_in_flight_hide_nothing_that_the_device_computes() -> None:
    one, two = (play([TraceEntry(0.0, 10, 50)], depth=depth)["seconds"] for depth in (1, 2))
    assert one == pytest.approx(two, rel=0.03)


def test_a_shared_prefix_is_computed_once() -> None:
    common = list(range(100, 110))
    entries = [TraceEntry(float(i), 10 * BLOCK + 8, 4, [*common, 1000 + i]) for i in range(4)]
    report = play(entries)
    assert report["cache_hits"] == pytest.approx(3 * 10 * BLOCK / (4 * (10 * BLOCK + 8)))
    assert play(entries, cache=CacheConfig(16, 1000, prefix_caching=False))["cache_hits"] == 0


def test_a_reply_that_comes_back_in_the_next_prompt_is_found_too() -> None:
    turns = [TraceEntry(0.0, 24, 24, [1, 2, 3]), TraceEntry(10.0, 56, 8, [1, 2, 3, 4])]
    assert play(turns)["cache_hits"] == pytest.approx(32 / 80), (
        "two of three blocks: the last token of a reply is never computed"
    )


def test_policies_and_modes_change_what_they_should() -> None:
    entries = trace.read("poisson:rate=20,n=80,prompt=20-60,output=20-60,urgent=0.2,seed=3")
    urgent = {
        p: play(entries, policy=p)["ttft_p99_ms_by_priority"]["-1"] for p in ("fcfs", "priority")
    }  # type: ignore[index]
    assert urgent["priority"] < urgent["fcfs"] / 3
    speed = {
        mode: play(entries, batching=mode)["tok_s"] for mode in ("continuous", "static", "none")
    }
    assert speed["continuous"] > speed["static"] > speed["none"]
    adaptive, continuous = (
        play(entries, batching=mode, latency_target=0.05)["itl_p99_ms"]
        for mode in ("adaptive", "continuous")
    )
    assert adaptive < 60 < continuous


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([3.0, 1.0, 2.0], q) for q in (0, 50, 99, 100)] == [1.0, 2.0, 3.0, 3.0]


def test_features_tell_prefill_from_decoding() -> None:
    plan = Plan(
        1,
        items=[
            Item(1, 0, 0, None, 1, True, 100),
            Item(2, 0, 1, 10, 5, False, 15),
            Item(3, 0, 2, 0, 4, True, 4),
        ],
    )
    assert dict(zip(FEATURES, features(plan), strict=True)) == {
        "step": 1,
        "prefill": 9,
        "sampled": 2,
        "kv": 100,
        "pairs": 62 + 8,
    }


# ---- traces --------------------------------------------------------------------------------------


def ended(request: Request, output: list[int]) -> Sequence:
    return Sequence(
        1,
        request,
        0,
        array("i", request.prompt + output),
        len(request.prompt),
        10**6,
        0,
        frozenset(),
    )


def test_a_trace_reveals_shared_prefixes_and_no_token(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    recorder = Recorder(file)
    common, params = list(range(500, 540)), SamplingParams()
    for i, (prompt, salt) in enumerate(
        [([*common, 1], ""), ([*common, 2], ""), ([*common, 3], "other")]
    ):
        request = Request(f"{i}", prompt, params, 100.0 + i, salt, priority=i, tenant="k")
        recorder.record(ended(request, [7] * 10), [], "length")
    recorder.record(ended(Request("canary", common, params), [7]), [], "length")
    recorder.record(ended(Request("aborted", common, params, 9.0), []), [], "abort")
    entries = trace.read(str(file))
    assert [(e.arrival, e.prompt, e.output, e.priority, e.tenant) for e in entries] == [
        (float(i), 41, 10, i, "k") for i in range(3)
    ]
    assert (
        entries[0].blocks[:2] == entries[1].blocks[:2]
        and entries[0].blocks[2] != entries[1].blocks[2]
    )
    assert not set(entries[0].blocks) & set(entries[2].blocks), (
        "requests that may not share blocks have different numbers"
    )
    request = Request("0", [*common, 1], params, 1.0)
    Recorder(tmp_path / "again").record(ended(request, [7] * 10), [], "length")
    assert json.loads((tmp_path / "again").read_text())["blocks"] != entries[0].blocks, (
        "numbers mean nothing outside of one run"
    )


def test_tokens_are_equal_where_the_trace_says_so() -> None:
    (a, b), _ = requests_of([TraceEntry(0.0, 40, 5, [1, 2]), TraceEntry(0.0, 40, 5, [1, 3])], 1000)
    assert (
        a.prompt[:16] == b.prompt[:16]
        and a.prompt[16:32] != b.prompt[16:32]
        and a.prompt[32:] != b.prompt[32:]
    )
    assert len(a.prompt) == 40 and max(a.prompt) < 1000


def test_a_generated_trace_follows_its_specification() -> None:
    entries = trace.read(
        "poisson:rate=10,n=500,prompt=5-9,output=3,shared=32,groups=2,urgent=0.5,tenants=4"
    )
    assert len(entries) == 500 and entries[0].arrival == 0 and 40 < entries[-1].arrival < 60
    assert {e.prompt for e in entries} == set(range(37, 42)) and {e.output for e in entries} == {3}
    assert len({tuple(e.blocks[:2]) for e in entries}) == 2
    assert len({e.tenant for e in entries}) == 4
    assert 200 < sum(e.priority == -1 for e in entries) < 300
    assert entries == trace.read(
        "poisson:rate=10,n=500,prompt=5-9,output=3,shared=32,groups=2,urgent=0.5,tenants=4"
    )


@pytest.mark.parametrize(
    "spec", ["poisson:rate=0", "poisson:wat=1", "poisson:n=x", "poisson:prompt=0"]
)
def test_a_bad_specification_of_a_trace_is_refused(spec: str) -> None:
    with pytest.raises(InvalidRequest):
        trace.read(spec)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"arrival": 0, "prompt": 0, "output": 1}',
        '{"arrival": NaN, "prompt": 1, "output": 1}',
        '"x"',
    ],
)
def test_the_refusal_names_a_line_that_is_no_request(tmp_path: Path, line: str) -> None:
    file = tmp_path / "t"
    file.write_text('{"arrival": 0, "prompt": 1, "output": 1}\n' + line + "\n")
    with pytest.raises(InvalidRequest, match="line 2"):
        trace.read(str(file))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("\n")
    with pytest.raises(InvalidRequest, match="no requests"):
        trace.read(str(tmp_path / "t"))


# ---- urgent requests -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Graphs(Costs):
    """Each step replays the graph of the next larger number of tokens. Steps with more tokens than
    the largest graph launch their kernels one by one."""

    graphs: tuple[tuple[int, float], ...]
    eager: float

    def seconds(self, features: tuple[float, ...]) -> float:
        _, prefill, sampled, kv, _ = features
        tokens = prefill + sampled - (prefill > 0)  # a prompt's last token is sampled from
        eager = max(self.eager, self.prefill * tokens)
        return (
            next((seconds for size, seconds in self.graphs if tokens <= size), eager) + self.kv * kv
        )


def graphs(prefill: float, kv: float, eager: float, *ms: float) -> Graphs:
    sizes = zip((16, 32, 64, 128, 192, 256, 384, 512), (t / 1e3 for t in ms), strict=True)
    return Graphs(0.0, prefill, 0.0, kv, 0.0, tuple(sizes), eager)


# "8B on a GPU" and "0.6B on a GPU" were measured on one H200. In "all alike" all steps with
# prompts take the same time.
MACHINES = {
    "a CPU": EMBEDDED_CPU,
    "8B on a GPU": graphs(2.7e-5, 3e-8, 0.012, 4.7, 4.8, 4.9, 5.2, 6.5, 8.0, 11.0, 14.0),
    "0.6B on a GPU": graphs(4e-6, 1e-8, 0.010, 1.3, 1.6, 1.6, 1.7, 2.0, 2.4, 2.8, 3.2),
    "no graphs": Costs(step=4e-3, prefill=2.5e-5, sampled=1e-5, kv=3e-8, pairs=1e-9),
    "all alike": graphs(4e-6, 0.0, 0.008, 4, 8, 8, 8, 8, 8, 8, 8),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_an_urgent_request_has_its_first_token_within_twice_its_time(machine: str) -> None:
    """A hundred urgent requests of 256 tokens arrive among others with prompts of up to 1,024
    tokens, which would use every slot. There has been an urgent request before: until the first
    one, steps are not limited."""
    costs, cache, schedule = (
        MACHINES[machine],
        CacheConfig(16, 20_000, prefix_caching=False),
        ScheduleConfig(16, 2048, 2048),
    )
    idle = simulate([TraceEntry(0.0, 256, 8)], costs, cache, schedule).first_token["0"]
    g, n = random.Random(1), 160
    low = [TraceEntry(0.0, g.choice([32, 100, 300, 1024]), g.randint(32, 128)) for _ in range(n)]
    urgent = [
        TraceEntry(idle * (1 + 3 * i + g.random()), 256, 8, priority=-100) for i in range(100)
    ]
    earlier = [TraceEntry(0.0, 256, 8, priority=-100)]
    fcfs, ranked = (
        simulate(earlier + low + urgent, costs, cache, replace(schedule, policy=p))
        for p in ("fcfs", "priority")
    )
    first = [ranked.first_token[f"{1 + n + i}"] / idle for i in range(100)]
    assert percentile(first, 99) < (1.9 if machine != "all alike" else 2.0)
    assert sum(ranked.finished[f"{1 + i}"] > urgent[-1].arrival for i in range(n)) > 16, (
        "there were requests for every slot to the end"
    )
    ends = [max(report.finished[f"{1 + i}"] for i in range(n)) for report in (fcfs, ranked)]
    assert ends[1] < ends[0] / 0.55 and len(ranked.finished) == n + 101, (
        "the other requests finish, at more than half of their speed"
    )


def test_a_missing_trace_is_refused_with_the_possible_names() -> None:
    with pytest.raises(
        InvalidRequest,
        match=r"nowhere.jsonl cannot be read \(No such file or directory\): name a file",
    ):
        trace.read("nowhere.jsonl")


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(20, 4, 2, 16, 1)
    recorder = Recorder("/dev/full")
    recorder.listen_to(engine.events, engine.scheduler.clock, engine.host_time)
    for name in "ab":
        engine.add(
            Request(
                name, [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True, seed=1), arrival=1.0
            )
        )
    ended = []
    while not engine.idle:
        ended += [out.request_id for out in engine.step() if out.finish_reason == "length"]
    assert sorted(ended) == ["a", "b"] and caplog.text.count("recording stops") == 1


def test_a_trace_that_breaks_off_is_read_as_far_as_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = json.dumps({"arrival": 1.0, "prompt": 3, "output": 2})
    (tmp_path / "t").write_text(f"{line}\n{line[:20]}")
    assert (
        len(trace.read(str(tmp_path / "t"))) == 1 and "ends in the middle of line 2" in caplog.text
    )
