"""Measures time to first token and inter-token latency of concurrent requests, with the limits.

All requests arrive together and share no prefix. A token counts when the engine returns it. The
limit for the median first token is the time to compute half of the prompts, or to read the weights
once. The limit for a step is the time to read the weights and the KV of each sequence, or to
compute the matrix products, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.bench.measure_batching import bytes_per_step
from octavo.bench.scheduling import play
from octavo.bench.throughput import measure_machine
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
    """Return one record for each number of requests.

    The first run of each is a warm-up and does not count.
    """
    if max(batches) > llm.schedule.max_num_seqs or min(batches) < 1:
        raise InvalidRequest(
            f"a batch must have 1 to {llm.schedule.max_num_seqs} requests (max_num_seqs), got "
            f"{batches}",
            "batches",
        )
    machine = measure_machine(llm)
    results = []
    for concurrency in batches:
        trace = [TraceEntry(0.0, prompt, output)] * concurrency
        first_tokens = list[float]()
        token_gaps = list[float]()
        run_seconds = list[float]()
        for round_index in range(1 + repeat):
            report = play(llm, trace, llm.schedule)
            if round_index:
                first_tokens += report.first_token.values()
                token_gaps += report.gaps
                run_seconds.append(report.seconds)
            advance()
        result: dict[str, Any] = {"requests": concurrency}
        ttft_limit, itl_limit = limits(llm, concurrency, prompt, output, machine)
        result |= summarize("ttft", first_tokens, ttft_limit)
        result |= summarize("itl", token_gaps, itl_limit)
        results.append(result | {"tok_s": concurrency * output * repeat / sum(run_seconds)})
    return results


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
