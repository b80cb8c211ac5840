"""Warm-up: compile and allocate before the first request, so that no request has to wait for it."""

from __future__ import annotations

import logging
import sys

from octavo.core.bounded_kv import max_kv_positions
from octavo.core.engine import Engine
from octavo.params import SamplingParams
from octavo.types import Request

log = logging.getLogger(__name__)
# Prompt tokens of the warm-up steps, as far as they fit. Kernels may differ between these sizes.
WARM_UP_TOKENS = {"cuda": (64, 128, 768, 2048, sys.maxsize), "cpu": (64,)}


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


def run_prompt(engine: Engine, tokens: int) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    engine.add(Request(f"warm-up {tokens}", [0] * tokens, params))
    while not engine.idle:
        for output in engine.step():
            if output.error:
                log.error("warm-up with %d tokens ended with an error: %s", tokens, output.error)
