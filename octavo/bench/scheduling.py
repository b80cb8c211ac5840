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
from octavo.core.trace import TraceEntry
from octavo.errors import OctavoError
from octavo.llm import LLM

URGENT = -100  # a thousand seconds ahead of the rest
GAP = 3.0  # from one urgent request to the next, in times to the first token of an idle engine
LOADED = 0.95  # of the urgent requests must come while all rows are wanted
# times the work that would do if urgent requests cost the others nothing but their own time
SPARE = 1.3


def play(llm: LLM, trace: list[TraceEntry], schedule: ScheduleConfig) -> Report:
    asked, _ = requests_of(trace, llm.config.vocab_size)
    report = replay(llm.new_engine(schedule), asked)
    wanted = sum(entry.output for entry in trace)
    if report.errors or report.tokens != wanted:
        raise OctavoError(
            f"{report.tokens} of {wanted} tokens arrived, {report.errors} errors: not counted"
        )
    return report


# ---- batching modes -----------------------------------------------------------------------------------------


def ragged(
    n: int, shortest: int = 16, longest: int = 512, prompt: int = 32, seed: int = 0
) -> list[TraceEntry]:
    """Replies of all lengths, short ones more often: as many between 16 and 32 tokens as between 256 and 512."""
    g = random.Random(seed)
    low = math.log(shortest)
    high = math.log(longest)
    return [
        TraceEntry(0.0, g.randint(prompt // 2, prompt * 2), round(math.exp(g.uniform(low, high))))
        for _ in range(n)
    ]


def arrive(trace: list[TraceEntry], rate: float, seed: int = 0) -> list[TraceEntry]:
    """At random times, so many a second."""
    g = random.Random(seed)
    now = 0.0
    found = []
    for entry in trace:
        found.append(replace(entry, arrival=now))
        now += g.expovariate(rate)
    return found


def modes(
    llm: LLM,
    names: Sequence[str],
    n: int,
    load: float = 1.5,
    longest: int = 512,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The same requests at the same times in each mode, as many a second as `load` times what continuous batching can do."""
    trace = ragged(n, longest=longest)
    schedule = replace(llm.schedule, batching="continuous", max_batch=llm.schedule.max_num_seqs)
    play(llm, trace[: schedule.max_num_seqs], schedule)  # warm-up
    capacity = n / play(llm, trace, schedule).seconds
    done()
    timed = arrive(trace, load * capacity)
    results = []
    for name in names:
        # two of them side by side
        batch = max(schedule.max_batch // 2, 1) if name == "window" else schedule.max_batch
        results.append(
            {
                "batching": name,
                **play(llm, timed, replace(schedule, batching=name, max_batch=batch)).summary(),
            }
        )
        done()
    speed = {r["batching"]: r["tok_s"] for r in results}
    over = {
        f"over_{name}": speed["continuous"] / s
        for name, s in speed.items()
        if "continuous" in speed and name != "continuous"
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


def busy(n: int, longest: int, output: int, seed: int = 0) -> list[TraceEntry]:
    """Work without hurry, all there from the start: prompts from 32 tokens to the longest, short ones more often."""
    g = random.Random(seed)
    low = math.log(min(32, longest))
    high = math.log(longest)
    return [
        TraceEntry(
            0.0, round(math.exp(g.uniform(low, high))), g.randint(max(output // 2, 1), output)
        )
        for _ in range(n)
    ]


def priority(
    llm: LLM,
    low: int | None = None,
    high: int = 100,
    prompt: int = 256,
    longest: int = 1024,
    output: int = 128,
    depth: int = 1,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The time to the first token of urgent requests: on an idle engine, and among `low` others that want every row at once. By
    default there are as many as last until the last urgent one has come: a guess, doubled where it was too low. One comes when
    the one before it has had its first token for a while: what is measured is how long others keep it waiting."""
    fcfs = replace(llm.schedule, policy="fcfs", depth=depth)
    rows = llm.schedule.max_num_seqs
    ranked = replace(fcfs, policy="priority")
    urgent = TraceEntry(0.0, prompt, 8, priority=URGENT)
    g = random.Random(0)
    play(llm, busy(rows, longest, 8), ranked)  # a warm-up
    idle = [play(llm, [urgent], fcfs).first_token["0"] for _ in range(3 + min(high, 30))][3:]
    done()
    gap = GAP * percentile(idle, 50)
    times = [gap * (1 + i + g.random() / 2) for i in range(high)]
    wanted = low or 0
    if low is None:
        each = play(llm, busy(2 * rows, longest, output), ranked).seconds / (2 * rows)
        wanted = rows + math.ceil(SPARE * (times[-1] - high * percentile(idle, 50)) / each)
    while True:
        work = busy(wanted, longest, output)
        trace = work + [replace(urgent, arrival=at) for at in times]
        found = {"priority": _loaded(play(llm, trace, ranked), len(work), times, rows)}
        if low is not None or found["priority"]["loaded"] >= LOADED:
            break
        wanted *= 2
    done()
    found["fcfs"] = _loaded(play(llm, trace, fcfs), len(work), times, rows)
    done()
    tokens = sum(entry.output for entry in work)
    for one in found.values():
        one["low_tok_s"] = tokens / one["low_seconds"]
    idle_ms = {f"ttft_p{q}_ms": 1e3 * percentile(idle, q) for q in (50, 99)}
    return {
        "bench": "priority",
        "batching": ranked.batching,
        "depth": depth,
        "rows": rows,
        "low": len(work),
        "high": high,
        "prompt": prompt,
        "low_tokens": tokens,
        "every_ms": 1e3 * gap,
        "idle": idle_ms,
        **found,
        "ratio_p99": found["priority"]["ttft_p99_ms"] / idle_ms["ttft_p50_ms"],
        "ratio_of_p99": found["priority"]["ttft_p99_ms"] / idle_ms["ttft_p99_ms"],
        "ratio_p50": found["priority"]["ttft_p50_ms"] / idle_ms["ttft_p50_ms"],
        "low_speed": found["priority"]["low_tok_s"] / found["fcfs"]["low_tok_s"],
    }


def _loaded(report: Report, low: int, times: list[float], rows: int) -> dict[str, Any]:
    """How urgent requests that came at these times fared, and the `low` others before them."""
    first = [report.first_token[f"{low + i}"] for i in range(len(times))]
    ends = [report.finished[f"{i}"] for i in range(low) if f"{i}" in report.finished]
    return {
        **{f"ttft_p{q}_ms": 1e3 * percentile(first, q) for q in (50, 99)},
        "ttft_max_ms": 1e3 * max(first),
        "low_finished": len(ends),
        "low_seconds": max(ends),
        # came while all rows were wanted
        "loaded": sum(sum(end > at for end in ends) >= rows for at in times) / len(times),
        "seconds": report.seconds,
        **report.counters,
    }
