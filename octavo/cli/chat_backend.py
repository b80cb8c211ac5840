"""Backends of `octavo chat`: a model in this process, or a model on a server (remote_backend.py).

This module must not import torch at the top, because `octavo chat --url` works without torch. It
prints nothing.
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
    """The prompt that messages are rendered to."""

    messages: Messages
    ids: list[int]  # empty if the server does not report them
    end: str  # the last few characters

    def __len__(self) -> int:
        return len(self.ids)


class Piece(NamedTuple):
    """A piece of a reply, with the counts of the reply up to and including this piece."""

    text: str
    generated_tokens: int
    cached_tokens: int  # cached tokens of the prompt
    finish_reason: str | None


class ChatBackend(Protocol):
    context: int  # maximum tokens of prompt and reply together; 0 if unknown

    def encode(self, messages: Messages) -> Prompt: ...

    def pieces(self, prompt: Prompt, sampling: SamplingOptions) -> Iterator[Piece]:
        """Yield a reply as it arrives, until its end or `stop`. Raises OctavoError."""

    def stop(self) -> None:
        """End the current reply. A signal handler may call this at any time."""

    def memory(self) -> str | None:
        """Describe the use of the KV block pool."""


class LocalBackend:
    def __init__(self, llm: LLM):
        self.llm = llm
        self.context = min(
            llm.schedule.max_model_len, llm.cache.num_blocks * llm.cache.block_size + 1
        )
        self._stopped = False  # ends the current reply, or the next one

    def encode(self, messages: Messages) -> Prompt:
        conversation: list[Any] = messages
        token_ids = self.llm.encode_chat(conversation)
        tokenizer = self.llm.get_tokenizer()
        return Prompt(
            messages=messages,
            ids=token_ids,
            end=tokenizer.decode(token_ids[-8:], skip_special_tokens=False),
        )

    def pieces(self, prompt: Prompt, sampling: SamplingOptions) -> Iterator[Piece]:
        """Yield a reply. `stop` ends the reply, even between two steps of a long prompt."""
        llm = self.llm
        counters = self.llm.engine.scheduler.counters
        remaining = self.context - len(prompt)
        stream = llm.stream(
            prompt.ids, sampling.params(max_tokens=min(sampling.max_tokens, remaining))
        )
        generated_before = counters.generated_tokens
        cached_before = counters.cached_tokens
        generated = 0
        try:
            while (
                not (self._stopped or llm.engine.idle)
                and counters.generated_tokens == generated_before
            ):
                llm.step()
            while not self._stopped and (output := next(stream, None)) is not None:
                generated += len(output.token_ids)
                yield Piece(
                    output.text,
                    generated,
                    counters.cached_tokens - cached_before,
                    output.finish_reason,
                )
        finally:
            self._stopped = False
            for request in list(llm.engine.scheduler.sequences_by_request):  # There is at most one.
                llm.abort(request)

    def stop(self) -> None:
        self._stopped = True

    def memory(self) -> str:
        pool = self.llm.engine.scheduler.pool
        used_blocks = pool.num_blocks - pool.num_available
        cached_blocks = pool.num_cached
        free_blocks = pool.num_available - cached_blocks
        block_size = self.llm.cache.block_size
        return (
            f"{used_blocks:,} used, {cached_blocks:,} cached, {free_blocks:,} free, of "
            f"{block_size} tokens each"
        )
