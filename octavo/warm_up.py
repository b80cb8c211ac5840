"""Warm-up: compile and allocate before the first request, so that no request has to wait for it."""

from __future__ import annotations

import logging
import sys
from itertools import pairwise

from octavo.core.bounded_kv import max_kv_positions
from octavo.core.dummy_run import dummy_run
from octavo.core.engine import Engine
from octavo.core.speculation import Passes, Speculation
from octavo.params import SamplingParams
from octavo.types import Request

log = logging.getLogger(__name__)
# Prompt tokens of the warm-up steps, as far as they fit. Kernels may differ between these sizes.
WARM_UP_TOKENS = {"cuda": (64, 128, 768, 2048, sys.maxsize), "cpu": (64,)}

# Decode steps that speculative decoding measures, by their number of rows, up to the first one that
# takes longer than LONGEST_STEP seconds.
ROWS = {
    "cuda": (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256),
    "cpu": (1, 2, 4, 8, 16, 32),
}
LONGEST_STEP = 0.05
DRAFTED = {"cuda": (1, 8, 32), "cpu": (1, 4)}  # sequences that a measured pass drafts for
MEASURED_STEPS = {"cuda": 5, "cpu": 3}
ROUNDS = 3  # how often each size is measured
# Drafts in a measured step. One pass is a small difference of two times, so many are measured.
MEASURED_DRAFTS = {"cuda": 2, "cpu": 6}


def warm_up(engine: Engine, kind: str, part: int = 0, num_parts: int = 1) -> None:
    """Run prompts of several sizes on an idle engine of a "cuda" or "cpu" device.

    Of several parts, which processes run at the same time, each runs some of the sizes.
    """
    scheduler = engine.scheduler
    cache = scheduler.cache
    schedule = scheduler.schedule
    positions = min(
        schedule.max_model_len, cache.num_blocks * cache.block_size, max_kv_positions(cache)
    )
    longest = max(1, min(positions - 2, schedule.max_num_batched_tokens))
    with dummy_run(engine):
        sizes = sorted({min(size, longest) for size in WARM_UP_TOKENS[kind]})
        for tokens in sizes[part::num_parts]:
            run_prompt(engine, tokens)
            scheduler.clear_cache()
        if scheduler.speculation is not None and num_parts == 1:
            measure_costs(engine, scheduler.speculation, kind)
            scheduler.clear_cache()


def measure_costs(engine: Engine, speculation: Speculation, kind: str) -> None:
    """Measure decode steps of several sizes and a pass of the device's drafter, because the best
    number of drafts depends on them."""
    max_sequences = engine.scheduler.schedule.max_num_seqs
    costs = speculation.costs
    with speculation.fixed(0):
        sizes = [num_rows for num_rows in ROWS[kind] if num_rows <= max_sequences]
        for num_rows, seconds in shortest_steps(engine, sizes, num_tokens=1, kind=kind).items():
            costs.record(num_rows, seconds)
    if speculation.drafts_on_device:
        num_drafts = min(MEASURED_DRAFTS[kind], speculation.max_drafts)
        num_tokens = 1 + num_drafts
        with speculation.fixed(num_drafts):
            sizes = [
                num_sequences for num_sequences in DRAFTED[kind] if num_sequences <= max_sequences
            ]
            steps = shortest_steps(engine, sizes, num_tokens=num_tokens, kind=kind)
        for num_sequences, seconds in steps.items():
            costs.record(num_tokens * num_sequences, seconds, Passes(num_drafts, num_sequences))


def shortest_steps(
    engine: Engine, sizes: list[int], num_tokens: int, kind: str
) -> dict[int, float]:
    """Return the shortest time of a decode step for each number of sequences. The sizes take turns,
    so that another program slows all of them down alike."""
    shortest: dict[int, float] = {}
    for _ in range(ROUNDS):
        for num_sequences in list(sizes):
            seconds = decode_seconds(engine, num_sequences, num_tokens, MEASURED_STEPS[kind])
            shortest[num_sequences] = min(seconds, shortest.get(num_sequences, seconds))
            if seconds > LONGEST_STEP:
                sizes = [size for size in sizes if size <= num_sequences]
                break
    return shortest


def decode_seconds(engine: Engine, num_sequences: int, num_tokens: int, num_steps: int) -> float:
    """Return the shortest time of `num_steps` steps that decode `num_sequences` sequences, with up
    to `num_tokens` tokens of each per step. It is 0 if there was no such step."""
    scheduler = engine.scheduler
    max_tokens = (num_steps + 2) * num_tokens
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for index in range(num_sequences):
        engine.add(Request(f"warm-up {num_sequences}/{index}", [index] * 8, params))
    landings = []
    while not engine.idle:
        engine.step()
        if len(scheduler.decoding) == num_sequences:
            landings.append(scheduler.clock())
    return min((later - earlier for earlier, later in pairwise(landings)), default=0.0)


def run_prompt(engine: Engine, tokens: int) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    engine.add(Request(f"warm-up {tokens}", [0] * tokens, params))
    while not engine.idle:
        for output in engine.step():
            if output.error:
                log.error("warm-up with %d tokens ended with an error: %s", tokens, output.error)
