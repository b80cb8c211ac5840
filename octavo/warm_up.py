"""Warm-up: compile and allocate before the first request, so that no request has to wait for it."""

from __future__ import annotations

import logging
import sys
from itertools import pairwise

from octavo.core.bounded_kv import max_kv_positions
from octavo.core.engine import Engine
from octavo.core.speculation import StepCosts
from octavo.params import SamplingParams
from octavo.types import Request

log = logging.getLogger(__name__)
# Prompt tokens of the warm-up steps, as far as they fit. Kernels may differ between these sizes.
WARM_UP_TOKENS = {"cuda": (64, 128, 768, 2048, sys.maxsize), "cpu": (64,)}

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # decode steps that speculative decoding measures
MEASURED_STEPS = 5


def warm_up(engine: Engine, kind: str) -> None:
    """Run prompts of several sizes on an idle engine of a "cuda" or "cpu" device."""
    scheduler = engine.scheduler
    cache = scheduler.cache
    schedule = scheduler.schedule
    positions = min(
        schedule.max_model_len, cache.num_blocks * cache.block_size, max_kv_positions(cache)
    )
    longest = max(1, min(positions - 2, schedule.max_num_batched_tokens))
    with engine.rehearsal():
        for tokens in sorted({min(size, longest) for size in WARM_UP_TOKENS[kind]}):
            run_prompt(engine, tokens)
            scheduler.clear_cache()
        if scheduler.speculation is not None:
            measure_rows(engine, scheduler.speculation.costs)
            scheduler.clear_cache()


def measure_rows(engine: Engine, costs: StepCosts) -> None:
    """Measure decode steps of several sizes, because the best number of drafts depends on them."""
    scheduler = engine.scheduler
    params = SamplingParams(max_tokens=MEASURED_STEPS + 2, ignore_eos=True, detokenize=False)
    for num_rows in ROWS:
        if num_rows > scheduler.schedule.max_num_seqs:
            return
        for index in range(num_rows):
            engine.add(Request(f"warm-up {num_rows}/{index}", [index] * 8, params))
        landings = []
        while not engine.idle:
            engine.step()
            if len(scheduler.decoding) == num_rows:
                landings.append(scheduler.clock())
        steps = sorted(later - earlier for earlier, later in pairwise(landings))
        if steps:
            costs.observe(num_rows, steps[len(steps) // 2])


def run_prompt(engine: Engine, tokens: int) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    engine.add(Request(f"warm-up {tokens}", [0] * tokens, params))
    while not engine.idle:
        for output in engine.step():
            if output.error:
                log.error("warm-up with %d tokens ended with an error: %s", tokens, output.error)
