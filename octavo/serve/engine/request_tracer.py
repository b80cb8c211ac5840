"""Sends the spans of sampled requests to the front process, which exports them.

The tracer is created for the first sampled request. It listens to the events of the engine. For a
request that is not sampled, it only checks whether any sampled request is open.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.engine import Engine
from octavo.core.spans import SequenceSpans, TimeSpan
from octavo.events import PRUNED, Event, Finished
from octavo.serve.channel.messages import RequestSpans
from octavo.types import Sequence


class RequestTracer:
    def __init__(self, engine: Engine, send: Callable[[RequestSpans], None]):
        self.send = send
        self.expected: set[str] = set()  # The sampled requests that are about to be queued.
        SequenceSpans(
            events=engine.events,
            clock=engine.scheduler.clock,
            on_end=self._send_spans,
            follows=self.expected.__contains__,
        )

    def _send_spans(self, seq: Sequence, spans: list[TimeSpan], event: Event) -> None:
        if isinstance(event, Finished) and event.reason == PRUNED:
            return
        fields = [
            (span.name, span.start, span.end, span.tokens, list(span.steps), list(span.landings))
            for span in spans
        ]
        self.send(RequestSpans(seq.request.id, seq.index, fields))
