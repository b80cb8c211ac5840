"""Dummy runs: steps that compile kernels or test an engine. They change neither the hit rate of the
prefix cache nor the acceptance of drafts. Other counters, such as that of plans, include them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

from octavo.core.engine import Engine


@contextmanager
def dummy_run(engine: Engine) -> Iterator[None]:
    """Steps that run inside this context are a dummy run: they emit no events, and their cache
    lookups and drafts are not counted."""
    counters = engine.scheduler.counters
    queried_tokens = counters.queried_tokens
    cached_tokens = counters.cached_tokens
    speculation = engine.scheduler.speculation
    drafts = None if speculation is None else deepcopy(speculation.counters)
    try:
        with engine.events.muted():
            yield
    finally:
        counters.queried_tokens = queried_tokens
        counters.cached_tokens = cached_tokens
        if speculation is not None and drafts is not None:
            speculation.counters = drafts
