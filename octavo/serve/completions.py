"""/v1/chat/completions and /v1/completions: the same flow, whole or streamed. The shapes are replies.py's."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from octavo.collect import Collector
from octavo.outputs import CompletionOutput
from octavo.params import SamplingParams
from octavo.serve import replies, validate
from octavo.serve.client import Call
from octavo.serve.errors import api_error, bad
from octavo.serve.exchange import Exchange
from octavo.serve.front import Caller, Front
from octavo.serve.protocol import ChatRequest, CompletionRequest, OpenAI
from octavo.serve.replies import ChunkWriter, Shape
from octavo.serve.tools import read_tools
from octavo.serve.validate import Prepared

log = logging.getLogger(__name__)


def open_call(front: Front, caller: Caller, prepared: Prepared, follow: bool) -> Call:
    """A call within the limits of the caller's key. Every transport generates through here."""
    key = caller.key
    if key is not None:
        key.enter()
    try:
        return front.client.open(
            caller.id,
            prepared.requests,
            prepared.texts,
            follow=follow,
            key=key,
            timeout=prepared.timeout,
            structure=prepared.structure,
            until=prepared.until,
        )
    except BaseException:
        if key is not None:
            key.leave(0)
        raise


# ---- the two routes -------------------------------------------------------------------------------------


async def chat_completions(exchange: Exchange) -> None:
    body, unknown = await exchange.body(ChatRequest)
    prepared, shape = await prepare_chat(exchange.front, exchange.caller, body, unknown)
    await answer(exchange, prepared, shape)


async def completions(exchange: Exchange) -> None:
    body, unknown = await exchange.body(CompletionRequest)
    prepared, shape = await prepare_completion(exchange.front, exchange.caller, body, unknown)
    await answer(exchange, prepared, shape)


async def render(exchange: Exchange) -> None:
    """What a conversation becomes, without generating: for learners. A request that could not be answered is refused here
    too, but for one whose prompt does not fit: that can be looked at."""
    front = exchange.front
    body, unknown = await exchange.body(ChatRequest)
    asked = read_chat(front, exchange.caller, body, unknown)
    asked.params.check_vocabulary(front.client.model.vocab_size)
    ids = await chat_ids(front, body, asked)
    text = front.tokenizer.decode(ids, skip_special_tokens=False)
    reply = {
        "prompt": text,
        "token_ids": ids,
        "count": len(ids),
        "max_model_len": front.client.model.max_model_len,
    }
    await exchange.reply(reply, asked.headers)


# ---- before -----------------------------------------------------------------------------------------------


def _stream(body: OpenAI) -> tuple[bool, str | None]:
    options = body.stream_options
    if options is not None and not body.stream:
        raise bad("stream_options", "stream_options are for stream: true")
    if options is None or not (options.include_usage or options.continuous_usage_stats):
        return bool(body.stream), None
    return True, "all" if options.continuous_usage_stats else "end"


def _prompt_logprobs(body: OpenAI, params: SamplingParams, limit: int) -> SamplingParams:
    if body.prompt_logprobs is None:
        return params
    if body.stream:
        raise bad("prompt_logprobs", "prompt_logprobs are not streamed: use stream: false")
    return replace(
        params,
        prompt_logprobs=validate.check_count("prompt_logprobs", body.prompt_logprobs, 0, limit),
    )


def _logprobs(params: SamplingParams, top: int | None) -> SamplingParams:
    return params if top is None else replace(params, logprobs=top)


@dataclass
class Asked:
    """A chat request, judged but for its prompt."""

    params: SamplingParams
    shape: Shape
    wanted: int | None  # tokens, at most
    timeout: float | None
    headers: dict[str, str]


def read_chat(front: Front, caller: Caller, body: ChatRequest, unknown: dict[str, Any]) -> Asked:
    limits = front.config.limits
    headers = validate.check_fields(front, unknown, body, "max_tokens")
    validate.check_template_options(front, body, headers)
    timeout = validate.check_common(front, caller, body)
    params = validate.sampling(front, body)
    shape = Shape(chat=True, n=1 if body.n is None else body.n)
    shape.stream, shape.usage = _stream(body)
    shape.prompt_logprobs = body.prompt_logprobs is not None
    params = validate.choices(body, params, shape.n, 1, shape.stream, limits, headers)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs: true")
    if body.logprobs:
        shape.top = validate.check_count(
            "top_logprobs", body.top_logprobs or 0, 0, limits.top_logprobs
        )
    wanted = body.max_completion_tokens
    name = "max_completion_tokens"
    if wanted is None:
        wanted = body.max_tokens
        name = "max_tokens"
    if wanted is not None:
        validate.check_count(name, wanted, 1)
    else:
        wanted = default_length(front)
    params = _logprobs(_prompt_logprobs(body, params, limits.top_logprobs), shape.top)
    _check_minimum(params, wanted)
    shape.tools = read_tools(front, body, params.structured_outputs)
    if shape.tools is not None:
        params = shape.tools.sampling(params)
        shape.tools.note(headers)
    return Asked(params, shape, wanted, timeout, headers)


def default_length(front: Front) -> int | None:
    """The longest reply to a chat that names no length: the model's recommendation, if it has one."""
    length = front.client.model.sampling.get("max_tokens")
    return None if length is None else int(length)


async def chat_ids(front: Front, body: ChatRequest, asked: Asked) -> list[int]:
    ids = await validate.chat_prompt(front, body, asked.shape.tools)
    return validate.truncate(ids, body.truncate_prompt_tokens, asked.headers)


async def prepare_chat(
    front: Front, caller: Caller, body: ChatRequest, unknown: dict[str, Any]
) -> tuple[Prepared, Shape]:
    asked = read_chat(front, caller, body, unknown)
    prompts: list[tuple[str | None, list[int]]] = [(None, await chat_ids(front, body, asked))]
    prepared = validate.build(
        front,
        caller,
        body,
        prompts,
        asked.params,
        asked.wanted,
        asked.timeout,
        asked.headers,
        "messages",
    )
    shape = asked.shape
    if shape.tools is not None and shape.tools.grammar is not None:
        prepared.structure = "tools"
    if shape.tools is not None and not shape.tools.parallel:
        prepared.until = shape.tools.first_call
    return prepared, shape


async def prepare_completion(
    front: Front, caller: Caller, body: CompletionRequest, unknown: dict[str, Any]
) -> tuple[Prepared, Shape]:
    limits = front.config.limits
    headers = validate.check_fields(front, unknown, body, "max_tokens")
    timeout = validate.check_common(front, caller, body)
    params = validate.sampling(front, body)
    shape = Shape(chat=False, n=1 if body.n is None else body.n, echo=bool(body.echo))
    shape.stream, shape.usage = _stream(body)
    shape.prompt_logprobs = body.prompt_logprobs is not None
    many = (
        len(body.prompt)
        if isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int)
        else 1
    )
    params = validate.choices(body, params, shape.n, many, shape.stream, limits, headers)
    if body.logprobs is not None:
        shape.top = validate.check_count("logprobs", body.logprobs, 0, limits.completion_logprobs)
    wanted = 16 if body.max_tokens is None else body.max_tokens
    shape.prompt_only = shape.echo and wanted == 0
    validate.check_count("max_tokens", wanted, 0 if shape.echo else 1)
    params = _prompt_logprobs(body, params, limits.top_logprobs)
    if shape.echo and shape.top is not None:
        params = replace(params, prompt_logprobs=max(shape.top, params.prompt_logprobs or 0))
    params = _logprobs(params, shape.top)
    _check_minimum(params, wanted)
    prompts: list[tuple[str | None, list[int]]] = []
    for text, ids in await validate.completion_prompts(front, body):
        kept = validate.truncate(ids, body.truncate_prompt_tokens, headers)
        # of what was cut, the text is what the tokens say
        prompts.append((text if len(kept) == len(ids) else None, kept))
    return validate.build(
        front, caller, body, prompts, params, max(wanted, 1), timeout, headers
    ), shape


def _check_minimum(params: SamplingParams, wanted: int | None) -> None:
    if wanted is not None and params.min_tokens > wanted:
        raise bad(
            "min_tokens",
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({wanted})",
            "param_out_of_range",
        )


# ---- after ------------------------------------------------------------------------------------------------


async def answer(exchange: Exchange, prepared: Prepared, shape: Shape) -> None:
    front = exchange.front
    caller = exchange.caller
    with open_call(front, caller, prepared, follow=shape.stream) as call:
        exchange.watch(call)
        if shape.stream:
            await call.taken()  # what is refused is an HTTP error still, and no event
            await stream(exchange, call, prepared, shape)
        else:
            await call.done()
            reply = replies.whole(
                reply_id(caller, shape), front.config.name, front.tokenizer, call.collectors, shape
            )
            await exchange.reply(reply, prepared.headers)


async def stream(exchange: Exchange, call: Call, prepared: Prepared, shape: Shape) -> None:
    """Headers go out at once, then pieces as they come; what goes wrong from here on is told in the stream."""
    front = exchange.front
    loop = asyncio.get_running_loop()
    written = time.monotonic()
    timer: asyncio.TimerHandle | None = None
    quiet = front.config.keep_alive

    def tick() -> None:
        nonlocal timer
        if time.monotonic() - written >= quiet:
            call.wake()
        timer = loop.call_later(quiet / 4, tick)

    writer = chunk_writer(front, exchange.caller, shape)
    await exchange.start_events(prepared.headers)
    front.metrics.streams.inc()
    tick()
    opened: set[int] = set()
    try:
        async for pieces in call:
            parts = []
            for which, piece in pieces:
                index = which * shape.n + piece.index
                if index not in opened:
                    opened.add(index)
                    parts += opening(writer, index, call.collectors[which], shape)
                if not shape.prompt_only:
                    parts.append(writer.piece(index, piece, call.collectors))
                elif piece.finish_reason is not None:
                    parts.append(
                        writer.piece(
                            index,
                            CompletionOutput(index, "", [], finish_reason="length"),
                            call.collectors,
                        )
                    )
            data = b"".join(parts) if pieces else replies.KEEP_ALIVE
            if data:  # a piece that may yet become a call is held back
                await exchange.write(data)
                written = time.monotonic()
        await exchange.write(
            writer.end(call.collectors, 0 if shape.prompt_only else None), last=True
        )
    except Exception as e:
        error = api_error(e)
        if error.code != "client_gone":
            front.metrics.rejections.labels(error.code or error.type).inc()
        if error.status == 500 and error is not e:
            log.exception("request %s failed in its stream", exchange.caller.id)
        await exchange.write(
            writer.end(call.collectors, 0 if shape.prompt_only else None, error.encode()), last=True
        )
    finally:
        if timer is not None:
            timer.cancel()
        front.metrics.streams.dec()


def chunk_writer(front: Front, caller: Caller, shape: Shape) -> ChunkWriter:
    kind = "chat.completion.chunk" if shape.chat else "text_completion"
    return ChunkWriter(
        reply_id(caller, shape),
        kind,
        front.config.name,
        front.tokenizer,
        shape.top,
        shape.usage,
        shape.tools,
    )


def reply_id(caller: Caller, shape: Shape) -> str:
    return f"{'chatcmpl' if shape.chat else 'cmpl'}-{caller.id.removeprefix('req_')}"


def opening(writer: ChunkWriter, index: int, collector: Collector, shape: Shape) -> list[bytes]:
    """What comes before the first piece of a choice: the role, or the prompt."""
    if shape.chat:
        return [writer.role(index)]
    return [writer.echo(index, collector)] if shape.echo else []
