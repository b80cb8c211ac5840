"""Warm-up: compile and allocate before the first request, so that no request has to wait for it."""

from __future__ import annotations

import logging
import sys
from itertools import pairwise

from octavo.core.bounded_kv import max_kv_positions
from octavo.core.engine import Engine
from octavo.core.speculation import Speculation
from octavo.params import SamplingParams
from octavo.types import Request

log = logging.getLogger(__name__)
# Prompt tokens of the warm-up steps, as far as they fit. Kernels may differ between these sizes.
WARM_UP_TOKENS = {"cuda": (64, 128, 768, 2048, sys.maxsize), "cpu": (64,)}

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # decode steps that speculative decoding measures
MEASURED_STEPS = 5
MEASURED_DRAFTS = 2


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
            measure_costs(engine, scheduler.speculation)
            scheduler.clear_cache()


def measure_costs(engine: Engine, speculation: Speculation) -> None:
    """Measure decode steps of several sizes and a pass of the device's drafter, because the best
    number of drafts depends on them."""
    costs = speculation.costs
    with speculation.fixed(0):
        for num_rows in ROWS:
            if num_rows > engine.scheduler.schedule.max_num_seqs:
                break
            seconds = decode_seconds(engine, num_rows, num_tokens=1)
            costs.observe(num_rows, seconds)
    if not speculation.on_host:
        num_drafts = min(MEASURED_DRAFTS, speculation.max_drafts)
        with speculation.fixed(num_drafts):
            seconds = decode_seconds(engine, 1, num_tokens=1 + num_drafts)
            costs.observe(1 + num_drafts, seconds, num_passes=num_drafts)


def decode_seconds(engine: Engine, num_sequences: int, num_tokens: int) -> float:
    """Return the median time of a step that decodes so many sequences, and gives up to `num_tokens`
    tokens of each. It is 0 if there was no such step."""
    scheduler = engine.scheduler
    max_tokens = (MEASURED_STEPS + 2) * num_tokens
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for index in range(num_sequences):
        engine.add(Request(f"warm-up {num_sequences}/{index}", [index] * 8, params))
    landings = []
    while not engine.idle:
        engine.step()
        if len(scheduler.decoding) == num_sequences:
            landings.append(scheduler.clock())
    steps = sorted(later - earlier for earlier, later in pairwise(landings))
    return steps[len(steps) // 2] if steps else 0.0


def run_prompt(engine: Engine, tokens: int) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    engine.add(Request(f"warm-up {tokens}", [0] * tokens, params))
    while not engine.idle:
        for output in engine.step():
            if output.error:
                log.error("warm-up with %d tokens ended with an error: %s", tokens, output.error)
