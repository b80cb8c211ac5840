"""Text to tokens: short texts in the event loop, long ones in a worker process, and no work on a text that cannot fit.

A text of B bytes has at least B / (bytes of the longest token) tokens, so one that is far too long is refused unread.

Short texts that arrive in one turn of the event loop are tokenised in one call. The requests of a burst then proceed in step:
all up to their texts, then all from there on, which takes a fifth less time (docs/LOG.md, "The way in, in step"). That is for an
idle engine, which should begin with all of them. A busy engine wants the first as soon as it is ready: keeping clients in step
would make front and engine take turns, at a sixth less throughput.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from octavo.errors import ContextLengthExceeded
from octavo.serve.jobs import Decode, Encode, EncodeChat
from octavo.serve.worker_pool import WorkerPool
from octavo.text.chat import render_marked, select_template
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")
INLINE = 512  # characters that are tokenised faster than a worker process takes over
LIGHT = 64 * 2**10  # characters: a longer text is a heavy job


class Short(NamedTuple):
    """A text that waits for the end of the turn."""

    tokenizer: Tokenizer
    asked: tuple[str, bool, bool]  # Tokenizer.encode's arguments
    ids: asyncio.Future[list[int]]


class Texts:
    """`context`: the longest prompt that any request may have, in tokens."""

    def __init__(self, pool: WorkerPool, together: Callable[[], bool] = lambda: True):
        self.pool = pool
        self.together = together
        self._short: list[Short] = []

    def check_size(self, tokenizer: Tokenizer, size: int, context: int) -> None:
        """Refuse text of so many bytes that it must have more tokens than the context."""
        least = size // (4 * tokenizer.longest_token)
        if least >= context:
            raise ContextLengthExceeded(
                f"the prompt has at least {least} tokens ({size} bytes), but the context holds {context}: shorten it"
            )

    async def encode(
        self,
        tokenizer: Tokenizer,
        text: str,
        context: int,
        add_special_tokens: bool = True,
        parse_special: bool = True,
    ) -> list[int]:
        """The tokens of a text prompt."""
        self.check_size(tokenizer, len(text), context)
        if len(text) <= INLINE and self.together():
            ids = await self._soon(tokenizer, text, add_special_tokens, parse_special)
        else:
            ids = await self.encode_plain(tokenizer, text, add_special_tokens, parse_special)
        return tokenizer.as_prompt(ids)

    async def encode_plain(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, parse_special: bool
    ) -> list[int]:
        """As Tokenizer.encode."""
        if len(text) <= INLINE:
            return guarded(tokenizer.encode, text, add_special_tokens, parse_special)
        job = Encode(text, add_special_tokens, parse_special)
        ids: list[int] = await self.pool.run(job, list[int], heavy=len(text) > LIGHT)
        return ids

    async def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: list[dict[str, Any]],
        context: int,
        template: str | None,
        tools: list[dict[str, Any]] | None = None,
        /,
        **options: Any,
    ) -> list[int]:
        """The tokens of a conversation. `template` is the client's own; None: the model's."""
        size = sum(_size(m.get("content")) for m in messages)
        self.check_size(tokenizer, size, context)
        size += 16 * len(messages) + (INLINE if tools else 0)
        if size > INLINE or template is not None:
            job = EncodeChat(messages, tools, template, options)
            heavy = size > LIGHT or template is not None
            ids: list[int] = await self.pool.run(job, list[int], heavy=heavy)
            return ids
        model_template = guarded(select_template, tokenizer, None, tools is not None)
        text, mark = guarded(render_marked, tokenizer, model_template, messages, tools, **options)
        if mark is not None:
            return guarded(tokenizer.encode_marked, text, mark)
        if not self.together():
            return guarded(tokenizer.encode, text, False, True)
        return await self._soon(tokenizer, text, False, True)

    async def decode(self, tokenizer: Tokenizer, ids: list[int]) -> str:
        """The text of tokens, special tokens included."""
        if len(ids) <= INLINE:
            return guarded(tokenizer.decode, ids, skip_special_tokens=False)
        text: str = await self.pool.run(Decode(ids), str, heavy=len(ids) > LIGHT)
        return text

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
