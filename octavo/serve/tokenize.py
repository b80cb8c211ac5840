"""Text to tokens off the event loop, in a few threads (the tokenizer lets go of the GIL), and no work on what cannot fit.

A text of B bytes makes at least B / (bytes of the longest token) tokens, so one that is far too long is refused unread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from octavo.errors import ContextLengthExceeded, InvalidRequest
from octavo.serve.threads import Threads
from octavo.text.chat import encode_chat, select_template
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")
INLINE = 512  # characters that are tokenised faster than a thread takes over


class TextWorker:
    """`context`: the longest prompt that any request may have, in tokens."""

    def __init__(self, threads: int, seconds: float):
        self.threads = Threads(threads, seconds, "tokenise")

    def close(self) -> None:
        self.threads.close()

    async def run(self, size: int, work: Callable[..., T], *args: Any, **options: Any) -> T:
        if size > INLINE:
            found: T = await self.threads.run(lambda: work(*args, **options))
            return found
        try:
            return work(*args, **options)
        except (Exception, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a library's native code is no Exception
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def check_size(self, tokenizer: Tokenizer, size: int, context: int) -> None:
        """Refuse text of so many bytes that it must have more tokens than the context."""
        least = size // (4 * tokenizer.longest_token)
        if least >= context:
            raise ContextLengthExceeded(
                f"the prompt has at least {least} tokens ({size} bytes), but the context holds {context}: shorten it"
            )

    async def encode(self, tokenizer: Tokenizer, text: str, context: int, add_special_tokens: bool = True) -> list[int]:
        self.check_size(tokenizer, len(text), context)
        ids = await self.run(len(text), tokenizer.encode, text, add_special_tokens)
        if not ids and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
        if not ids:
            raise InvalidRequest("the prompt is empty, and this model has no token that begins a text: give some", "prompt")
        return ids

    async def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: list[dict[str, Any]],
        context: int,
        template: str | None,
        tools: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> list[int]:
        size = sum(_size(m.get("content")) for m in messages)
        self.check_size(tokenizer, size, context)

        def work() -> list[int]:
            compiled = select_template(tokenizer, template, tools is not None)
            return encode_chat(tokenizer, compiled, messages, tools, **options)

        return await self.run(size + 16 * len(messages) + (INLINE if tools else 0), work)


def _size(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return 0
