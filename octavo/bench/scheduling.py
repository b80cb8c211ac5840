"""What scheduling is worth, on a model in real time: batching modes against each other, and priority under full load.

Both play requests of made-up tokens at set times (octavo.core.simulate.replay) and count tokens that arrived.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from octavo.config import ScheduleConfig
from octavo.core.simulate import Report, percentile, replay, requests_of
from octavo.core.trace import Entry
from octavo.errors import OctavoError
from octavo.llm import LLM

URGENT = -100  # a thousand seconds ahead of the rest


def play(llm: LLM, trace: list[Entry], schedule: ScheduleConfig) -> Report:
    asked, _ = requests_of(trace, llm.config.vocab_size)
    report, wanted = replay(llm.new_engine(schedule), asked), sum(entry.output for entry in trace)
    if report.errors or report.tokens != wanted:
        raise OctavoError(f"{report.tokens} of {wanted} tokens arrived, {report.errors} errors: not counted")
    return report


# ---- batching modes -----------------------------------------------------------------------------------------


def ragged(n: int, shortest: int = 16, longest: int = 512, prompt: int = 32, seed: int = 0) -> list[Entry]:
    """Replies of all lengths, short ones more often: as many between 16 and 32 tokens as between 256 and 512."""
    g = random.Random(seed)
    low, high = math.log(shortest), math.log(longest)
    return [Entry(0.0, g.randint(prompt // 2, prompt * 2), round(math.exp(g.uniform(low, high)))) for _ in range(n)]


def arrive(trace: list[Entry], rate: float, seed: int = 0) -> list[Entry]:
    """At random times, so many a second."""
    g, now, found = random.Random(seed), 0.0, []
    for entry in trace:
        found.append(replace(entry, arrival=now))
        now += g.expovariate(rate)
    return found


def modes(
    llm: LLM, names: Sequence[str], n: int, load: float = 1.5, longest: int = 512, done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The same requests at the same times in each mode, as many a second as `load` times what continuous batching can do."""
    trace = ragged(n, longest=longest)
    schedule = replace(llm.schedule, batching="continuous", max_batch=llm.schedule.max_num_seqs)
    play(llm, trace[: schedule.max_num_seqs], schedule)  # warm-up
    capacity = n / play(llm, trace, schedule).seconds
    done()
    timed, results = arrive(trace, load * capacity), []
    for name in names:
        batch = max(schedule.max_batch // 2, 1) if name == "window" else schedule.max_batch  # two of them side by side
        results.append({"batching": name, **play(llm, timed, replace(schedule, batching=name, max_batch=batch)).summary()})
        done()
    speed = {r["batching"]: r["tok_s"] for r in results}
    over = {
        f"over_{name}": speed["continuous"] / s for name, s in speed.items() if "continuous" in speed and name != "continuous"
    }
    return {
        "bench": "batching-modes",
        "requests": n,
        "output_tokens": sum(entry.output for entry in trace),
        "batch_limit": schedule.max_num_seqs,
        "requests_a_second": load * capacity,
        "results": results,
        **over,
    }


# ---- priority -----------------------------------------------------------------------------------------------


def priority(
    llm: LLM, low: int, high: int = 20, output: int = 128, prompt: int = 32, done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The time to the first token of urgent requests: on an idle engine, and among `low` others that want every row at once."""
    schedule = llm.schedule
    urgent = Entry(0.0, prompt, 8, priority=URGENT)
    g = random.Random(0)
    work = [Entry(0.0, g.randint(prompt, 4 * prompt), g.randint(output // 2, output)) for _ in range(low)]
    play(llm, work[: schedule.max_num_seqs], replace(schedule, policy="fcfs"))  # warm-up
    alone = [play(llm, [urgent], replace(schedule, policy="priority")).first["0"] for _ in range(high)]
    done()
    seconds = play(llm, work, replace(schedule, policy="fcfs")).seconds
    done()
    trace = work + [replace(urgent, arrival=seconds * (0.1 + 0.7 * i / high)) for i in range(high)]
    found: dict[str, Any] = {"bench": "priority", "batching": schedule.batching, "low": low, "high": high}
    found["rows"] = schedule.max_num_seqs
    found["unloaded_ttft_ms"] = {f"p{q}": 1e3 * percentile(alone, q) for q in (50, 99)}
    for name in ("fcfs", "priority"):
        report = play(llm, trace, replace(schedule, policy=name))
        first = [report.first[f"{low + i}"] for i in range(high)]
        found[name] = {
            **{f"ttft_p{q}_ms": 1e3 * percentile(first, q) for q in (50, 99)},
            "low_finished": sum(int(request) < low for request in report.last),
            "seconds": report.seconds,
            **report.counters,
        }
        done()
    found["ratio_p99"] = found["priority"]["ttft_p99_ms"] / found["unloaded_ttft_ms"]["p99"]
    found["ratio_p50"] = found["priority"]["ttft_p50_ms"] / found["unloaded_ttft_ms"]["p50"]
    return found
