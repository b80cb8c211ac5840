"""The requests of one process: adds them to an engine, steps it and collects their outputs.

An interrupt (Ctrl-C) or a fault may leave the engine's state half-written. The loop then ends the
requests in progress and replaces the engine by a new one with an empty cache. The loop is not
thread-safe.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from octavo.collect import Collector
from octavo.core.engine import Engine
from octavo.errors import InvalidRequest, OctavoError
from octavo.outputs import RequestOutput
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output, Request

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def recovers(
    method: Callable[Concatenate[RequestLoop, P], T],
) -> Callable[Concatenate[RequestLoop, P], T]:
    """Wrap a method that calls the engine, so that the loop can be used after the method raised."""

    @functools.wraps(method)
    def run(loop: RequestLoop, *args: P.args, **options: P.kwargs) -> T:
        loop.engine.handled_interrupt = None
        try:
            return method(loop, *args, **options)
        except OctavoError:  # Errors of Octavo leave the engine unchanged.
            raise
        except BaseException as error:
            if loop.engine.handled_interrupt is not error:
                loop._replace_engine()
                loop.engine.handled_interrupt = error
            raise

    return run


class RequestLoop:
    def __init__(self, new_engine: Callable[[], Engine], tokenizer: Tokenizer | None):
        self.new_engine = new_engine
        self.engine = new_engine()
        self.tokenizer = tokenizer
        self.collectors: dict[str, Collector] = {}  # requests in progress, by id
        self.dropped: list[str] = []  # requests whose caller is gone: the next step aborts them

    @recovers
    def add(self, request: Request, text: str | None) -> Collector:
        """Queue a request. `text` is the text of its prompt, if the prompt was text."""
        self.engine.add(request)
        collector = Collector(request, text, self.tokenizer)
        self.collectors[request.id] = collector
        return collector

    @recovers
    def step(self) -> list[RequestOutput]:
        """Run one step of the engine. Returns the requests that ended in it."""
        while self.dropped:
            self.abort(self.dropped.pop())
        return self._collect(self.engine.step())

    @recovers
    def abort(self, request_id: str) -> None:
        self._collect(self.engine.abort(request_id))

    @recovers
    def clear_cache(self) -> None:
        self.engine.scheduler.clear_cache()

    @recovers
    def run_alone(self, function: Callable[[Engine], None]) -> None:
        """Call a function that runs requests of its own on the engine, which must be idle."""
        while not self.engine.idle and not self.collectors:  # Only steps in flight are left.
            self.step()
        if not self.engine.idle:
            raise InvalidRequest(
                f"the engine is busy with open requests ({len(self.collectors)}): finish or close "
                "them first"
            )
        function(self.engine)

    def _collect(self, outputs: list[Output]) -> list[RequestOutput]:
        ended = []
        for output in outputs:
            collector = self.collectors.get(output.request_id)
            if collector is None:
                continue
            if collector.add(output):
                self.engine.stop(output.request_id, output.index)
            if collector.finished:
                del self.collectors[output.request_id]
                ended.append(collector.output())
        return ended

    def _replace_engine(self) -> None:
        log.warning(
            "the engine was interrupted while its state may have been half-written: a new engine "
            "with an empty prefix cache replaces it"
        )
        old_scheduler = self.engine.scheduler
        self.engine = self.new_engine()
        self.engine.scheduler.arrivals = old_scheduler.arrivals
        for request_id, collector in self.collectors.items():
            pieces = collector.pieces or []
            ended = {piece.index for piece in pieces if piece.finish_reason is not None}
            for index, completion in enumerate(collector.completions):
                if completion.finish_reason is None and index not in ended:
                    failed = Output(
                        request_id,
                        index,
                        [],
                        finish_reason="error",
                        error="the engine was interrupted",
                    )
                    collector.add(failed)
            # An interrupt may have come before add() counted an end.
            collector.open_completions = 0
        self.collectors.clear()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector. A collection visits every live object, which takes some 10 ms
    at a thousand sequences, in the middle of a step. Nothing that the loop makes is cyclic."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
