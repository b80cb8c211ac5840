"""Converts text to tokens: short texts in the event loop, long texts in a worker process.

A text of B bytes has at least B / (bytes of the longest token) tokens, so a text that is far too
long is refused before it is tokenised.

While the engine is idle, short texts that arrive in one iteration of the event loop are tokenised
in one call. A burst of requests then takes a fifth less time in the front process (docs/LOG.md,
"Front: requests that arrive together"), and the engine can start all of them in one step. A busy
engine gets each request as soon as it is ready. Otherwise clients would stay synchronised, and the
front process and the engine would work alternately, at a sixth less throughput.
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

ResultType = TypeVar("ResultType")
INLINE_CHARACTERS = 512  # Shorter texts are tokenised faster than they reach a worker process.
LIGHT_CHARACTERS = 64 * 2**10  # A longer text is a heavy job.
# One iteration of the event loop unpacks this many token ids, in about a millisecond.
TOKENS_PER_TURN = 32 * 2**10


class ShortText(NamedTuple):
    """A short text that will be tokenised together with others."""

    tokenizer: Tokenizer
    arguments: tuple[str, bool, bool]  # The arguments of Tokenizer.encode.
    token_ids: asyncio.Future[list[int]]


class Texts:
    def __init__(
        self,
        pool: WorkerPool,
        template_seconds: float = 3.0,
        combines_texts: Callable[[], bool] = lambda: True,
    ):
        """Create the object.

        `template_seconds` limits the time of a template that came with a request. Short texts of
        several requests are tokenised in one call while `combines_texts()` is true.
        """
        self.pool = pool
        self.template_seconds = template_seconds
        self.combines_texts = combines_texts
        self._short_texts: list[ShortText] = []

    async def encode(self, tokenizer: Tokenizer, job: Encode) -> list[Tokens]:
        """Tokenise texts."""
        if job_size(job) > INLINE_CHARACTERS:
            encoded = await self.pool.run(
                job, list[Encoded], heavy=job_size(job) > LIGHT_CHARACTERS
            )
            return [Tokens(await self.unpack(text.ids), text.total) for text in encoded]
        flags = (job.add_special_tokens, job.parse_special)
        if len(job.texts) == 1 and self.combines_texts():
            lists = [await self._encode_combined(tokenizer, job.texts[0], *flags)]
        else:
            lists = [call_native(tokenizer.encode, text, *flags) for text in job.texts]
        return [Tokens(token_ids, len(token_ids)) for token_ids in lists]

    async def encode_chat(self, tokenizer: Tokenizer, job: EncodeChat) -> Tokens:
        """Render a conversation and tokenise it."""
        if job_size(job) > INLINE_CHARACTERS:
            encoded = await self._run_chat(job, job, Encoded)
            return Tokens(await self.unpack(encoded.ids), encoded.total)
        template = call_native(select_template, tokenizer, None, job.tools is not None)
        text, mark = call_native(
            render_marked, tokenizer, template, job.messages, job.tools, **job.options
        )
        if mark is not None:
            token_ids = call_native(tokenizer.encode_marked, text, mark)
        elif self.combines_texts():
            token_ids = await self._encode_combined(tokenizer, text, False, True)
        else:
            token_ids = call_native(tokenizer.encode, text, False, True)
        if job.add_special_tokens:
            token_ids = tokenizer.with_special_tokens(token_ids)
        return Tokens(token_ids, len(token_ids))

    async def _run_chat(
        self, chat: EncodeChat, job: EncodeChat | Tokenize, result_type: Any
    ) -> Any:
        if chat.template is not None:
            return await self._run_template(job, result_type)
        return await self.pool.run(job, result_type, heavy=job_size(chat) > LIGHT_CHARACTERS)

    async def _run_template(self, job: EncodeChat | Tokenize, result_type: Any) -> Any:
        """Run a job with a client's template, and name the template in its errors."""
        try:
            return await self.pool.run(job, result_type, heavy=True, seconds=self.template_seconds)
        except ApiError as error:
            if error.status < 500 and error.param is None:
                error.param = "chat_template"
            raise

    async def tokenize(self, context: Context, job: Tokenize) -> bytes:
        """Return the reply of /tokenize as JSON."""
        encoding = job.encoding
        if job_size(encoding) > INLINE_CHARACTERS:
            if isinstance(encoding, EncodeChat):
                reply: bytes = await self._run_chat(encoding, job, bytes)
            else:
                reply = await self.pool.run(job, bytes, heavy=job_size(encoding) > LIGHT_CHARACTERS)
            return reply
        if isinstance(encoding, EncodeChat):
            tokens = await self.encode_chat(context.tokenizer, encoding)
        else:
            (tokens,) = await self.encode(context.tokenizer, encoding)
        return tokenize_reply(context, tokens.ids, job.token_strs)

    async def detokenize(self, context: Context, body: Bytes) -> Detokenized:
        """Return the reply of /detokenize."""
        if len(body) <= INLINE_CHARACTERS:
            return call_native(detokenize, context, Detokenize(bytes(body)))
        reply: Detokenized = await self.pool.run(
            Detokenize(), Detokenized, payload=body, heavy=not is_quick(body)
        )
        return reply

    async def decode(self, tokenizer: Tokenizer, token_ids: list[int]) -> str:
        """Return the text of tokens, including special tokens."""
        if len(token_ids) <= INLINE_CHARACTERS:
            return call_native(tokenizer.decode, token_ids, skip_special_tokens=False)
        text: str = await self.pool.run(
            Decode(pack(token_ids)), str, heavy=len(token_ids) > LIGHT_CHARACTERS
        )
        return text

    async def unpack(self, packed: bytes) -> list[int]:
        """Unpack token ids from a worker process, over several iterations if there are many."""
        token_ids = array("I", packed)
        if len(token_ids) <= TOKENS_PER_TURN:
            return token_ids.tolist()
        unpacked: list[int] = []
        for start in range(0, len(token_ids), TOKENS_PER_TURN):
            unpacked += token_ids[start : start + TOKENS_PER_TURN].tolist()
            await asyncio.sleep(0)
        return unpacked

    # ---- short texts -----------------------------------------------------------------------------

    def _encode_combined(self, tokenizer: Tokenizer, *arguments: Any) -> asyncio.Future[list[int]]:
        loop = asyncio.get_running_loop()
        if not self._short_texts:
            loop.call_soon(self._encode_short_texts)
        self._short_texts.append(ShortText(tokenizer, arguments, loop.create_future()))
        return self._short_texts[-1].token_ids

    def _encode_short_texts(self) -> None:
        short_texts = self._short_texts
        self._short_texts = []
        # There is one tokenizer, except in the iteration in which a new engine becomes ready.
        for tokenizer, group in groupby(short_texts, lambda text: text.tokenizer):
            batch = list(group)
            try:
                token_lists = call_native(tokenizer.encode_many, [text.arguments for text in batch])
            except Exception:  # One of the texts is the cause, and only its request must fail.
                for text in batch:
                    _encode_separately(text)
            else:
                for text, token_ids in zip(batch, token_lists, strict=True):
                    if not text.token_ids.done():
                        text.token_ids.set_result(token_ids)


def _encode_separately(text: ShortText) -> None:
    try:
        token_ids = call_native(text.tokenizer.encode, *text.arguments)
    except Exception as error:
        if not text.token_ids.done():
            text.token_ids.set_exception(error)
    else:
        if not text.token_ids.done():
            text.token_ids.set_result(token_ids)


def call_native(function: Callable[..., ResultType], *args: Any, **options: Any) -> ResultType:
    """Call a function of a library, and turn a panic in its native code into a RuntimeError."""
    try:
        return function(*args, **options)
    except (Exception, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of PyO3 is a direct subclass of BaseException.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def job_size(job: Encode | EncodeChat) -> int:
    """Return the approximate number of characters to tokenise.

    A job above INLINE_CHARACTERS is sent to a worker process, and a job above LIGHT_CHARACTERS is
    heavy. A job with a client's template is always heavy.
    """
    if isinstance(job, Encode):
        return sum(map(len, job.texts))
    if job.template is not None:
        return LIGHT_CHARACTERS + 1
    other_values = [
        value for message in job.messages for name, value in message.items() if name != "content"
    ]
    other_values += job.options.values()
    has_nested = job.tools or any(isinstance(value, dict | list) for value in other_values)
    characters = prompt.chat_size(job.messages)
    characters += sum(len(value) for value in other_values if isinstance(value, str))
    return characters + 16 * len(job.messages) + (INLINE_CHARACTERS if has_nested else 0)
