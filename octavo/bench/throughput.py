"""Throughput of whole workloads in tokens per second, with the hardware limit.

The limit is what the device's memory bandwidth and matrix units allow at best. Only token ids that
arrived are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from octavo.bench.measure_batching import bytes_per_step
from octavo.bench.workloads import WORKLOADS, Machine, Workload, limit_seconds
from octavo.errors import OctavoError
from octavo.llm import LLM
from octavo.memory import parameter_count
from octavo.model.layers import Linear
from octavo.params import SamplingParams


def measure(
    llm: LLM, names: list[str], repeat: int = 3, done: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """One record a workload. The first run of each warms up and does not count."""
    machine = measure_machine(llm)
    results = []
    for name in names:
        load = WORKLOADS[name]()
        run(llm, load)
        done()
        seconds = []
        before = _host_time(llm)
        for _ in range(repeat):
            seconds.append(run(llm, load))
            done()
        steps, *host = (b - a for a, b in zip(before, _host_time(llm), strict=True))
        counted = sum(map(len, load.prompts)) if load.counts_prompt else sum(load.outputs)
        parameters = parameter_count(llm.model)
        weights = bytes_per_step(llm)
        kv = llm.memory.kv_per_token
        limit = limit_seconds(load, llm.config, parameters, weights, kv, machine)
        results.append(
            {
                "workload": name,
                "requests": len(load.prompts),
                "unit": "prompt tok/s" if load.counts_prompt else "tok/s",
                "tok_s": counted / statistics.median(seconds),
                "runs": [counted / s for s in seconds],
                "limit_tok_s": counted / limit,
                "of_limit": limit / statistics.median(seconds),
                "steps": steps / repeat,
                "host_ms_a_step": dict(
                    zip(
                        ("plan", "launch", "wait", "commit"),
                        (1e3 * h / steps for h in host),
                        strict=True,
                    )
                ),
            }
        )
    return results


def run(llm: LLM, load: Workload) -> float:
    """Seconds for the workload, the prefix cache empty at the start."""
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False)
        for n in load.outputs
    ]
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(load.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    got = sum(len(o.outputs[0].token_ids) for o in outputs)
    if got != sum(load.outputs):
        error = next((o.error for o in outputs if o.error), "no error")
        raise OctavoError(f"{got} of {sum(load.outputs)} tokens arrived ({error}): not counted")
    return seconds


def measure_machine(llm: LLM) -> Machine:
    """A large copy, counting bytes both ways, and a large matrix product on random data: in the model's dtype, or by the engine's
    own kernel with one of the model's matrices where that is faster, as it is where numbers have 8 bits."""
    cuda = llm.device.type == "cuda"
    n, m = (2**29, 8192) if cuda else (2**26, 1024)
    a = torch.empty(n, dtype=torch.bfloat16, device=llm.device)
    b = torch.empty_like(a)
    x, y = (torch.randn(m, m, device=llm.device).to(llm.model_dtype) for _ in range(2))
    return Machine(
        2 * a.nbytes / _best(lambda: b.copy_(a), cuda),
        max(2 * m**3 / _best(lambda: x @ y, cuda), _own(llm, cuda)),
    )


@torch.inference_mode()
def _own(llm: LLM, cuda: bool, rows: int = 512) -> float:
    """Operations a second of the widest product inside the layers, alone."""
    linears = [m for m in llm.model.modules() if isinstance(m, Linear) and "lm_head" not in m.parts]
    if not linears:
        return 0.0
    widest = max(linears, key=lambda m: sum(m.parts.values()))
    x = torch.randn(rows, llm.config.hidden_size, device=llm.device).to(llm.model_dtype)
    return (
        2
        * rows
        * llm.config.hidden_size
        * sum(widest.parts.values())
        / _best(lambda: widest(x), cuda)
    )


def _best(work: Callable[[], Any], cuda: bool, repeat: int = 5) -> float:
    times = []
    for _ in range(repeat + 1):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _host_time(llm: LLM) -> tuple[float, ...]:
    t = llm.engine.host_time
    return t.steps, t.plan, t.launch, t.wait, t.commit
