"""Measures time to first token and inter-token latency of concurrent requests, with the limits.

All requests arrive together and share no prefix. A token counts when the engine returns it. The
limit for the median first token is the time to compute half of the prompts, or to read the weights
once. The limit for a step is the time to read the weights and the KV of each sequence, or to
compute the matrix products, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from octavo.bench.measure_batching import bytes_per_step
from octavo.bench.picture import Axis, Panel, Series, points
from octavo.bench.scheduling import run_trace
from octavo.bench.throughput import measure_machine, peak_memory, rows_of
from octavo.bench.views import Result, ResultTable, ResultView
from octavo.bench.workloads import HardwareRates, limit_seconds, uniform
from octavo.core.simulate import percentile
from octavo.core.trace import TraceEntry
from octavo.errors import InvalidRequest
from octavo.llm import LLM
from octavo.memory import parameter_count

QUANTILES = (50, 90, 99)


def measure(
    llm: LLM,
    batches: Sequence[int],
    prompt: int,
    output: int,
    repeat: int,
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    return list(measure_rows(llm, batches, prompt, output, repeat, advance))


def measure_rows(
    llm: LLM,
    batches: Sequence[int],
    prompt: int,
    output: int,
    repeat: int,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Yield one row for each number of requests.

    The first run of each is a warm-up and does not count.
    """
    if max(batches) > llm.schedule.max_num_seqs or min(batches) < 1:
        raise InvalidRequest(
            f"a batch must have 1 to {llm.schedule.max_num_seqs} requests (max_num_seqs), got "
            f"{batches}",
            "batches",
        )
    machine = measure_machine(llm)
    for concurrency in batches:
        trace = [TraceEntry(0.0, prompt, output)] * concurrency
        first_tokens = list[float]()
        token_gaps = list[float]()
        run_seconds = list[float]()
        for round_index in range(1 + repeat):
            report = run_trace(llm, trace, llm.schedule)
            if round_index:
                first_tokens += report.first_token.values()
                token_gaps += report.gaps
                run_seconds.append(report.seconds)
            advance()
        result: dict[str, Any] = {"requests": concurrency}
        ttft_limit, itl_limit = limits(llm, concurrency, prompt, output, machine)
        result |= summarize("ttft", first_tokens, ttft_limit)
        result |= summarize("itl", token_gaps, itl_limit)
        result["tok_s"] = concurrency * output * repeat / sum(run_seconds)
        yield result | {"memory_bytes": peak_memory(llm)}


def summarize(name: str, times: list[float], limit: float) -> dict[str, float]:
    """Return the quantiles of some times in milliseconds, and the limit of the median."""
    quantiles = {f"{name}_p{q}_ms": 1e3 * percentile(times, q) for q in QUANTILES}
    return quantiles | {
        f"{name}_limit_ms": 1e3 * limit,
        f"{name}_of_limit": limit / percentile(times, 50),
    }


def limits(
    llm: LLM, concurrency: int, prompt: int, output: int, machine: HardwareRates
) -> tuple[float, float]:
    """Return the seconds to the median first token, and of a step halfway through the replies."""
    parameters = parameter_count(llm.model)
    step_bytes = bytes_per_step(llm)
    weight_seconds = step_bytes / machine.bytes_per_second
    prefill_seconds = limit_seconds(
        uniform(-(-concurrency // 2), prompt, 1), llm.config, parameters, step_bytes, 0, machine
    )
    decode_products = limit_seconds(
        uniform(concurrency, 1, 1), llm.config, parameters, step_bytes, 0, machine
    )
    kv_bytes = concurrency * (prompt + output // 2) * llm.memory.kv_per_token
    kv_seconds = kv_bytes / machine.bytes_per_second
    first_token = max(prefill_seconds, weight_seconds)
    step = max(decode_products, weight_seconds + kv_seconds)
    return first_token, step


# ---- view ----------------------------------------------------------------------------------------


def tables(result: Result) -> list[ResultTable]:
    columns = ["requests"]
    for metric in ("TTFT", "ITL"):
        columns += [f"{metric} ms: p50", *(f"p{q}" for q in QUANTILES[1:])]
        columns += ["hardware limit", "% of hardware limit"]
    rows = []
    for row in rows_of(result):
        cells = []
        for metric in ("ttft", "itl"):
            cells += [f"{row[f'{metric}_p{quantile}_ms']:,.1f}" for quantile in QUANTILES]
            cells += [f"{row[f'{metric}_limit_ms']:,.2f}", f"{row[f'{metric}_of_limit']:.0%}"]
        memory = f"{row['memory_bytes'] / 2**20:,.0f}" if "memory_bytes" in row else ""
        rows.append((str(row["requests"]), *cells, f"{row['tok_s']:,.0f}", memory))
    return [ResultTable((*columns, "tok/s", "memory, MiB"), rows, left=())]


def panels(result: Result) -> list[Panel]:
    rows = rows_of(result)
    return [
        points(
            f"{title} of {result['model']}",
            [
                Series(
                    f"{row['requests']} requests",
                    [(q, row[f"{metric}_p{q}_ms"]) for q in QUANTILES],
                )
                for row in rows
            ],
            Axis("percentile"),
            Axis("ms", starts_at_zero=True),
            connected=True,
        )
        for metric, title in (("ttft", "Time to first token"), ("itl", "Inter-token latency"))
    ]


VIEW = ResultView(tables, panels)
