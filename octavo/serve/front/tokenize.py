"""Text to tokens: short texts in the event loop, long ones in a worker process, and no work on a
text that cannot fit.

A text of B bytes has at least B / (bytes of the longest token) tokens, so one that is far too long
is refused unread.

Short texts that arrive in one turn of the event loop are tokenised in one call. The requests of a
burst then proceed in step: all up to their texts, then all from there on, which takes a fifth less
time (docs/LOG.md, "The way in, in step"). That is for an idle engine, which should begin with all
of them. A busy engine wants the first as soon as it is ready: keeping clients in step would make
front and engine take turns, at a sixth less throughput.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from octavo.serve.api import prompt
from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.parse import Bytes, is_quick
from octavo.serve.channel.jobs import (
    Decode,
    Detokenize,
    Detokenized,
    Encode,
    EncodeChat,
    Encoded,
    Tokenize,
    Tokens,
    pack,
)
from octavo.serve.front.worker_pool import WorkerPool
from octavo.serve.workers.handlers import Context, detokenize, tokenize_reply
from octavo.text.chat import render_marked, select_template
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")
INLINE = 512  # characters that are tokenised faster than a worker process takes over
LIGHT = 64 * 2**10  # characters: a longer text is a heavy job
TURN = 32 * 2**10  # token ids that are unpacked in one turn of the event loop, in a millisecond


class Short(NamedTuple):
    """A text that waits for the end of the turn."""

    tokenizer: Tokenizer
    asked: tuple[str, bool, bool]  # Tokenizer.encode's arguments
    ids: asyncio.Future[list[int]]


class Texts:
    def __init__(
        self,
        pool: WorkerPool,
        template_seconds: float = 3.0,
        together: Callable[[], bool] = lambda: True,
    ):
        """`template_seconds`: how long a client's own template may take. `together`: whether short
        texts wait for others."""
        self.pool = pool
        self.template_seconds = template_seconds
        self.together = together
        self._short: list[Short] = []

    async def encode(self, tokenizer: Tokenizer, job: Encode) -> list[Tokens]:
        """The tokens of texts."""
        if weight(job) > INLINE:
            found = await self.pool.run(job, list[Encoded], heavy=weight(job) > LIGHT)
            return [Tokens(await self.unpack(one.ids), one.total) for one in found]
        flags = (job.add_special_tokens, job.parse_special)
        if len(job.texts) == 1 and self.together():
            lists = [await self._soon(tokenizer, job.texts[0], *flags)]
        else:
            lists = [guarded(tokenizer.encode, text, *flags) for text in job.texts]
        return [Tokens(ids, len(ids)) for ids in lists]

    async def encode_chat(self, tokenizer: Tokenizer, job: EncodeChat) -> Tokens:
        """The tokens of a conversation."""
        if weight(job) > INLINE:
            found = await self._run_chat(job, job, Encoded)
            return Tokens(await self.unpack(found.ids), found.total)
        template = guarded(select_template, tokenizer, None, job.tools is not None)
        text, mark = guarded(
            render_marked, tokenizer, template, job.messages, job.tools, **job.options
        )
        if mark is not None:
            ids = guarded(tokenizer.encode_marked, text, mark)
        elif self.together():
            ids = await self._soon(tokenizer, text, False, True)
        else:
            ids = guarded(tokenizer.encode, text, False, True)
        if job.add_special_tokens:
            ids = tokenizer.with_special_tokens(ids)
        return Tokens(ids, len(ids))

    async def _run_chat(self, chat: EncodeChat, job: EncodeChat | Tokenize, kind: Any) -> Any:
        if chat.template is not None:
            return await self._run_template(job, kind)
        return await self.pool.run(job, kind, heavy=weight(chat) > LIGHT)

    async def _run_template(self, job: EncodeChat | Tokenize, kind: Any) -> Any:
        """Run a job with a client's own template in it, which is blamed for whatever goes wrong."""
        try:
            return await self.pool.run(job, kind, heavy=True, seconds=self.template_seconds)
        except ApiError as error:
            if error.status < 500 and error.param is None:
                error.param = "chat_template"
            raise

    async def tokenize(self, context: Context, job: Tokenize) -> bytes:
        """The reply of /tokenize, as JSON."""
        what = job.what
        if weight(what) > INLINE:
            if isinstance(what, EncodeChat):
                reply: bytes = await self._run_chat(what, job, bytes)
            else:
                reply = await self.pool.run(job, bytes, heavy=weight(what) > LIGHT)
            return reply
        if isinstance(what, EncodeChat):
            tokens = await self.encode_chat(context.tokenizer, what)
        else:
            (tokens,) = await self.encode(context.tokenizer, what)
        return tokenize_reply(context, tokens.ids, job.token_strs)

    async def detokenize(self, context: Context, body: Bytes) -> Detokenized:
        """The answer to a request to /detokenize."""
        if len(body) <= INLINE:
            return guarded(detokenize, context, Detokenize(bytes(body)))
        found: Detokenized = await self.pool.run(
            Detokenize(), Detokenized, payload=body, heavy=not is_quick(body)
        )
        return found

    async def decode(self, tokenizer: Tokenizer, ids: list[int]) -> str:
        """The text of tokens, special tokens included."""
        if len(ids) <= INLINE:
            return guarded(tokenizer.decode, ids, skip_special_tokens=False)
        text: str = await self.pool.run(Decode(pack(ids)), str, heavy=len(ids) > LIGHT)
        return text

    async def unpack(self, data: bytes) -> list[int]:
        """Token ids that a worker process packed. Many of them take several turns of the event
        loop."""
        ids = array("I", data)
        if len(ids) <= TURN:
            return ids.tolist()
        found: list[int] = []
        for start in range(0, len(ids), TURN):
            found += ids[start : start + TURN].tolist()
            await asyncio.sleep(0)
        return found

    # ---- short texts -----------------------------------------------------------------------------

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


def weight(job: Encode | EncodeChat) -> int:
    """Characters to tokenise, about. Above INLINE a worker process does it; above LIGHT it is a
    heavy job, and so is whatever a client's own template does."""
    if isinstance(job, Encode):
        return sum(map(len, job.texts))
    if job.template is not None:
        return LIGHT + 1
    others = [v for message in job.messages for name, v in message.items() if name != "content"]
    others += job.options.values()
    nested = job.tools or any(isinstance(value, dict | list) for value in others)
    size = prompt.chat_size(job.messages) + sum(len(v) for v in others if isinstance(v, str))
    return size + 16 * len(job.messages) + (INLINE if nested else 0)
