"""Whom a conversation is held with: here, a model in this process; in remote.py, one behind a server. Prints nothing.

Must not import torch at its top: `octavo chat --url` does without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from octavo.cli.options import SamplingOptions

if TYPE_CHECKING:
    from octavo.llm import LLM

Messages = list[dict[str, str]]


@dataclass
class Prompt:
    """What messages become."""

    messages: Messages
    ids: list[int]  # empty where a server does not tell
    end: str  # its last few characters

    def __len__(self) -> int:
        return len(self.ids)


class Piece(NamedTuple):
    """Some of a reply, and counts of all of it so far."""

    text: str
    generated_tokens: int
    cached_tokens: int  # of the prompt
    finish_reason: str | None


class Partner(Protocol):
    context: int  # tokens of prompt and reply together; 0: nobody knows

    def encode(self, messages: Messages) -> Prompt: ...

    def pieces(self, prompt: Prompt, sampling: SamplingOptions) -> Iterator[Piece]:
        """A reply as it comes, up to its end or `stop`. Raises OctavoError."""

    def stop(self) -> None:
        """End the reply that is coming. May be called by a signal handler, at any time."""

    def memory(self) -> str | None:
        """How the KV pool stands."""


class Local:
    def __init__(self, llm: LLM):
        self.llm = llm
        self.context = min(
            llm.schedule.max_model_len, llm.cache.num_blocks * llm.cache.block_size + 1
        )
        self._stopped = False  # the reply that is coming, or the next one

    def encode(self, messages: Messages) -> Prompt:
        said: list[Any] = messages
        ids = self.llm.encode_chat(said)
        return Prompt(
            messages, ids, self.llm.get_tokenizer().decode(ids[-8:], skip_special_tokens=False)
        )

    def pieces(self, prompt: Prompt, sampling: SamplingOptions) -> Iterator[Piece]:
        """Ends when `stop` was called, between two steps of a long prompt as well."""
        llm = self.llm
        count = self.llm.engine.scheduler.counters
        room = self.context - len(prompt)
        stream = llm.stream(prompt.ids, sampling.params(max_tokens=min(sampling.max_tokens, room)))
        generated = count.generated_tokens
        cached = count.cached_tokens
        said = 0
        try:
            while not (self._stopped or llm.engine.idle) and count.generated_tokens == generated:
                llm.step()
            while not self._stopped and (piece := next(stream, None)) is not None:
                said += len(piece.token_ids)
                yield Piece(piece.text, said, count.cached_tokens - cached, piece.finish_reason)
        finally:
            self._stopped = False
            for request in list(llm.engine.scheduler.requests):  # there is at most this one
                llm.abort(request)

    def stop(self) -> None:
        self._stopped = True

    def memory(self) -> str:
        pool = self.llm.engine.scheduler.pool
        used = pool.num_blocks - len(pool.free_blocks)
        cached = pool.num_cached
        free = len(pool.free_blocks) - cached
        return f"{used:,} used, {cached:,} cached, {free:,} free, of {self.llm.cache.block_size} tokens each"
