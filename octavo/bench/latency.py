"""Time to first token and inter-token latency of concurrent requests, with the hardware limit.

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
from octavo.bench.workloads import Machine, limit_seconds, uniform
from octavo.core.simulate import percentile
from octavo.core.trace import TraceEntry
from octavo.errors import InvalidRequest
from octavo.llm import LLM
from octavo.memory import parameter_count

QUANTILES = (50, 90, 99)


def measure(
    llm: LLM,
    batches: Sequence[int],
    prompt: int = 128,
    output: int = 128,
    repeat: int = 3,
    done: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """One record for each number of requests. The first run of each warms up and does not count."""
    if max(batches) > llm.schedule.max_num_seqs or min(batches) < 1:
        raise InvalidRequest(
            f"batches are 1 to {llm.schedule.max_num_seqs} requests (max_num_seqs), not {batches}",
            "batches",
        )
    machine = measure_machine(llm)
    results = []
    for batch in batches:
        trace = [TraceEntry(0.0, prompt, output)] * batch
        first = list[float]()
        gaps = list[float]()
        seconds = list[float]()
        for run in range(1 + repeat):
            report = play(llm, trace, llm.schedule)
            if run:
                first += report.first_token.values()
                gaps += report.gaps
                seconds.append(report.seconds)
            done()
        found: dict[str, Any] = {"requests": batch}
        for name, times, limit in zip(
            ("ttft", "itl"), (first, gaps), limits(llm, batch, prompt, output, machine), strict=True
        ):
            found |= {f"{name}_p{q}_ms": 1e3 * percentile(times, q) for q in QUANTILES}
            found |= {
                f"{name}_limit_ms": 1e3 * limit,
                f"{name}_of_limit": limit / percentile(times, 50),
            }
        results.append(found | {"tok_s": batch * output * repeat / sum(seconds)})
    return results


def limits(llm: LLM, batch: int, prompt: int, output: int, machine: Machine) -> tuple[float, float]:
    """Seconds to the median request's first token, and from token to token half way through the replies."""
    parameters = parameter_count(llm.model)
    weights = bytes_per_step(llm)
    read = weights / machine.bytes_per_second
    products = limit_seconds(
        uniform(-(-batch // 2), prompt, 1), llm.config, parameters, weights, 0, machine
    )
    row = limit_seconds(uniform(batch, 1, 1), llm.config, parameters, weights, 0, machine)
    kv = batch * (prompt + output // 2) * llm.memory.kv_per_token / machine.bytes_per_second
    return max(products, read), max(row, read + kv)
