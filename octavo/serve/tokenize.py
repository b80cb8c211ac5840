"""Text to tokens: long texts off the event loop, in a few threads (the tokenizer lets go of the GIL), short ones together, and
no work on what cannot fit.

A text of B bytes makes at least B / (bytes of the longest token) tokens, so one that is far too long is refused unread.

Short texts that come in one turn of the event loop are tokenised in one call. Of 32 requests that arrive at once each then
does its part in step with the others, first all up to their texts, then all from there on, and what the processor has just
learnt of one serves the next: a fifth less time for all of them (docs/LOG.md, "The way in, in step"). That is for an idle engine,
which should begin with all of them. One at work wants the first as soon as it is ready: a front that keeps clients in step makes
the two take turns, a sixth less throughput.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from octavo.errors import ContextLengthExceeded
from octavo.serve.threads import Threads
from octavo.text.chat import encode_chat, render_marked, select_template
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")
INLINE = 512  # characters that are tokenised faster than a thread takes over


class Short(NamedTuple):
    """A text that waits for the end of the turn."""

    tokenizer: Tokenizer
    asked: tuple[str, bool, bool]  # Tokenizer.encode's arguments
    ids: asyncio.Future[list[int]]


class TextWorker:
    """`context`: the longest prompt that any request may have, in tokens."""

    def __init__(self, threads: int, seconds: float, together: Callable[[], bool] = lambda: True):
        self.threads = Threads(threads, seconds, "tokenise")
        self.together = together
        self._short: list[Short] = []

    def close(self) -> None:
        self.threads.close()

    async def run(self, size: int, work: Callable[..., T], *args: Any, **options: Any) -> T:
        if size > INLINE:
            found: T = await self.threads.run(lambda: work(*args, **options))
            return found
        return guarded(work, *args, **options)

    def check_size(self, tokenizer: Tokenizer, size: int, context: int) -> None:
        """Refuse text of so many bytes that it must have more tokens than the context."""
        least = size // (4 * tokenizer.longest_token)
        if least >= context:
            raise ContextLengthExceeded(
                f"the prompt has at least {least} tokens ({size} bytes), but the context holds {context}: shorten it"
            )

    async def encode(
        self, tokenizer: Tokenizer, text: str, context: int, add_special_tokens: bool = True
    ) -> list[int]:
        self.check_size(tokenizer, len(text), context)
        if len(text) > INLINE or not self.together():
            ids = await self.run(len(text), tokenizer.encode, text, add_special_tokens)
        else:
            ids = await self._soon(tokenizer, text, add_special_tokens, False)
        return tokenizer.as_prompt(ids)

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
        size += 16 * len(messages) + (INLINE if tools else 0)

        def work(how: Callable[..., T]) -> T:
            return how(
                tokenizer,
                select_template(tokenizer, template, tools is not None),
                messages,
                tools,
                **options,
            )

        if size > INLINE:
            return await self.run(size, work, encode_chat)
        text, mark = guarded(work, render_marked)
        if mark is not None:
            return guarded(tokenizer.encode_marked, text, mark)
        if not self.together():
            return guarded(tokenizer.encode, text, False, True)
        return await self._soon(tokenizer, text, False, True)

    # ---- short texts ------------------------------------------------------------------------------------

    def _soon(self, tokenizer: Tokenizer, *asked: Any) -> asyncio.Future[list[int]]:
        loop = asyncio.get_running_loop()
        if not self._short:
            loop.call_soon(self._encode)
        self._short.append(Short(tokenizer, asked, loop.create_future()))
        return self._short[-1].ids

    def _encode(self) -> None:
        short = self._short
        self._short = []
        # one, but for the turn in which an engine is new
        for tokenizer, group in groupby(short, lambda one: one.tokenizer):
            texts = list(group)
            try:
                found = guarded(tokenizer.encode_many, [one.asked for one in texts])
            except Exception:  # of one of them, which it alone shall hear of
                for one in texts:
                    _answer(one)
            else:
                for one, ids in zip(texts, found, strict=True):
                    if not one.ids.done():
                        one.ids.set_result(ids)


def _answer(one: Short) -> None:
    try:
        ids = guarded(one.tokenizer.encode, *one.asked)
    except Exception as error:
        if not one.ids.done():
            one.ids.set_exception(error)
    else:
        if not one.ids.done():
            one.ids.set_result(ids)


def guarded(work: Callable[..., T], *args: Any, **options: Any) -> T:
    try:
        return work(*args, **options)
    except (Exception, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in a library's native code is no Exception
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _size(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(
            len(part["text"])
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return 0
