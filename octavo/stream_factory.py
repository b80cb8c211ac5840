"""Makes the event streams of an LLM's engines: facts about the model, text, and recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.core.engine import Engine
from octavo.core.event_recorder import EventRecorder
from octavo.core.event_stream import EventStream
from octavo.text.detokenize import Detokenizer
from octavo.text.tokenizer import Tokenizer


class StreamText:
    """Turns tokens into text for an event stream that shows it."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def pieces(self) -> Detokenizer:
        return Detokenizer(self.tokenizer, skip_special_tokens=False, continuing=True)


@dataclass(frozen=True)
class StreamFactory:
    about: dict[str, Any]  # facts about the model
    text: StreamText | None  # None: streams have no text
    recorder: EventRecorder | None

    def stream_of(self, engine: Engine) -> EventStream:
        """Return a stream of the events of an engine, which is not open yet."""
        return EventStream(engine, dict(self.about), self.text)

    def record(self, new_engine: Callable[[], Engine]) -> Engine:
        """Make an engine, and record its events if there is a recorder."""
        engine = new_engine()
        if self.recorder is not None:
            self.stream_of(engine).open(self.recorder)
        return engine
