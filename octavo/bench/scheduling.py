"""Measures scheduling on a model in real time: batching modes, and priority under full load.

Both run requests of random tokens at set times (octavo.core.simulate.replay) and count the tokens
that arrive.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import ScheduleConfig
from octavo.core.simulate import Report, percentile, replay, requests_of
from octavo.core.trace import TraceEntry
from octavo.errors import OctavoError
from octavo.llm import LLM

URGENT_PRIORITY = -100  # ranks a thousand seconds ahead of the background requests
URGENT_GAP = 3.0  # between urgent requests, as a multiple of the idle TTFT
MIN_LOADED = 0.95  # share of urgent requests that must arrive while all batch slots are in demand
# Background work, as a multiple of what suffices if urgent requests only take their own time.
SPARE_WORK = 1.3


def run_trace(llm: LLM, trace: list[TraceEntry], schedule: ScheduleConfig) -> Report:
    requests, _ = requests_of(trace, llm.config.vocab_size)
    report = replay(llm.new_engine(schedule), requests)
    expected_tokens = sum(entry.output for entry in trace)
    if report.errors or report.tokens != expected_tokens:
        raise OctavoError(
            f"{report.tokens} of {expected_tokens} tokens arrived with {report.errors} errors, so "
            "the run does not count"
        )
    return report


# ---- batching modes ------------------------------------------------------------------------------


def mixed_length_trace(
    count: int, shortest: int = 16, longest: int = 512, prompt: int = 32, seed: int = 0
) -> list[TraceEntry]:
    """Return requests whose reply lengths are uniform on a logarithmic scale.

    There are as many replies of 16 to 32 tokens as of 256 to 512.
    """
    generator = random.Random(seed)
    log_shortest = math.log(shortest)
    log_longest = math.log(longest)
    entries = []
    for _ in range(count):
        prompt_tokens = generator.randint(prompt // 2, prompt * 2)
        output_tokens = round(math.exp(generator.uniform(log_shortest, log_longest)))
        entries.append(TraceEntry(0.0, prompt_tokens, output_tokens))
    return entries


def with_arrivals(
    trace: list[TraceEntry], requests_per_second: float, seed: int = 0
) -> list[TraceEntry]:
    """Return the trace with random arrivals at this rate."""
    generator = random.Random(seed)
    arrival = 0.0
    timed_entries = []
    for entry in trace:
        timed_entries.append(replace(entry, arrival=arrival))
        arrival += generator.expovariate(requests_per_second)
    return timed_entries


def modes(
    llm: LLM,
    mode_names: Sequence[str],
    count: int,
    load: float = 1.5,
    longest: int = 512,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Play the same requests at the same times in each mode.

    The rate is `load` times the capacity of continuous batching.
    """
    trace = mixed_length_trace(count, longest=longest)
    schedule = replace(llm.schedule, batching="continuous", max_batch=llm.schedule.max_num_seqs)
    run_trace(llm, trace[: schedule.max_num_seqs], schedule)  # warm-up
    capacity = count / run_trace(llm, trace, schedule).seconds
    advance()
    timed_trace = with_arrivals(trace, load * capacity)
    results = []
    for mode in mode_names:
        # Two windows run side by side.
        batch_limit = max(schedule.max_batch // 2, 1) if mode == "window" else schedule.max_batch
        mode_schedule = replace(schedule, batching=mode, max_batch=batch_limit)
        report = run_trace(llm, timed_trace, mode_schedule)
        results.append({"batching": mode, **report.summary()})
        advance()
    tokens_per_second = {result["batching"]: result["tok_s"] for result in results}
    speedups = {
        f"over_{mode}": tokens_per_second["continuous"] / mode_speed
        for mode, mode_speed in tokens_per_second.items()
        if "continuous" in tokens_per_second and mode != "continuous"
    }
    return {
        "bench": "batching-modes",
        "requests": count,
        "output_tokens": sum(entry.output for entry in trace),
        "batch_limit": schedule.max_num_seqs,
        "requests_a_second": load * capacity,
        "results": results,
        **speedups,
    }


# ---- priority ------------------------------------------------------------------------------------


def background_trace(count: int, longest: int, output: int, seed: int = 0) -> list[TraceEntry]:
    """Return requests that are all present from the start.

    Prompt lengths are uniform on a logarithmic scale, from 32 tokens to the longest.
    """
    generator = random.Random(seed)
    log_shortest = math.log(min(32, longest))
    log_longest = math.log(longest)
    return [
        TraceEntry(
            0.0,
            round(math.exp(generator.uniform(log_shortest, log_longest))),
            generator.randint(max(output // 2, 1), output),
        )
        for _ in range(count)
    ]


@dataclass(frozen=True)
class PriorityLoad:
    """The load of the priority bench, in requests and tokens."""

    low: int | None  # background requests; None chooses enough for the whole run
    high: int  # urgent requests
    prompt: int  # tokens of an urgent prompt
    longest: int  # tokens of the longest background prompt
    output: int  # tokens of the longest background reply


def priority(
    llm: LLM,
    load: PriorityLoad,
    depth: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure the TTFT of urgent requests on an idle engine and under full load.

    The load is `low` background requests that want every batch slot at once. By default there are
    enough to last until the last urgent request has arrived. This number is estimated, and doubled
    if it was too low. An urgent request arrives some time after the first token of the previous
    one, so the bench measures how long background requests delay it.
    """
    fcfs = replace(llm.schedule, policy="fcfs", depth=depth)
    ranked = replace(fcfs, policy="priority")
    urgent = TraceEntry(0.0, load.prompt, 8, priority=URGENT_PRIORITY)
    warm_up = background_trace(llm.schedule.max_num_seqs, load.longest, 8)
    run_trace(llm, warm_up, ranked)
    idle_runs = [run_trace(llm, [urgent], fcfs) for _ in range(3 + min(load.high, 30))]
    idle = [report.first_token["0"] for report in idle_runs[3:]]
    advance()
    gap = URGENT_GAP * percentile(idle, 50)
    generator = random.Random(0)
    arrivals = [gap * (1 + index + generator.random() / 2) for index in range(load.high)]
    urgent_seconds = load.high * percentile(idle, 50)
    count = load.low or _background_count(llm, load, ranked, arrivals[-1] - urgent_seconds)
    while True:
        background = background_trace(count, load.longest, load.output)
        trace = background + [replace(urgent, arrival=arrival) for arrival in arrivals]
        ranked_summary = _urgent_summary(
            run_trace(llm, trace, ranked), background, arrivals, ranked
        )
        if load.low is not None or ranked_summary["loaded"] >= MIN_LOADED:
            break
        count *= 2
    advance()
    fcfs_summary = _urgent_summary(run_trace(llm, trace, fcfs), background, arrivals, fcfs)
    advance()
    idle_ms = {f"ttft_p{quantile}_ms": 1e3 * percentile(idle, quantile) for quantile in (50, 99)}
    return {
        "bench": "priority",
        "batching": ranked.batching,
        "depth": depth,
        "rows": ranked.max_num_seqs,
        "low": len(background),
        "high": load.high,
        "prompt": load.prompt,
        "low_tokens": sum(entry.output for entry in background),
        "every_ms": 1e3 * gap,
        "idle": idle_ms,
        "priority": ranked_summary,
        "fcfs": fcfs_summary,
        "ratio_p99": ranked_summary["ttft_p99_ms"] / idle_ms["ttft_p50_ms"],
        "ratio_of_p99": ranked_summary["ttft_p99_ms"] / idle_ms["ttft_p99_ms"],
        "ratio_p50": ranked_summary["ttft_p50_ms"] / idle_ms["ttft_p50_ms"],
        "low_speed": ranked_summary["low_tok_s"] / fcfs_summary["low_tok_s"],
    }


def _background_count(
    llm: LLM, load: PriorityLoad, schedule: ScheduleConfig, seconds: float
) -> int:
    """Estimate how many background requests keep all batch slots busy for this time."""
    batch_slots = schedule.max_num_seqs
    sample = background_trace(2 * batch_slots, load.longest, load.output)
    seconds_each = run_trace(llm, sample, schedule).seconds / len(sample)
    return batch_slots + math.ceil(SPARE_WORK * seconds / seconds_each)


def _urgent_summary(
    report: Report, background: list[TraceEntry], arrivals: list[float], schedule: ScheduleConfig
) -> dict[str, Any]:
    """Summarize the urgent requests, which came after the background requests in the trace."""
    low_count = len(background)
    first_tokens = [report.first_token[f"{low_count + index}"] for index in range(len(arrivals))]
    low_ids = [f"{index}" for index in range(low_count)]
    finish_times = [report.finished[low_id] for low_id in low_ids if low_id in report.finished]
    loaded_arrivals = 0
    for arrival in arrivals:
        unfinished = sum(finish_time > arrival for finish_time in finish_times)
        loaded_arrivals += unfinished >= schedule.max_num_seqs
    quantiles = {f"ttft_p{q}_ms": 1e3 * percentile(first_tokens, q) for q in (50, 99)}
    return {
        **quantiles,
        "ttft_max_ms": 1e3 * max(first_tokens),
        "low_finished": len(finish_times),
        "low_seconds": max(finish_times),
        "low_tok_s": sum(entry.output for entry in background) / max(finish_times),
        "loaded": loaded_arrivals / len(arrivals),
        "seconds": report.seconds,
        **report.counters,
    }
