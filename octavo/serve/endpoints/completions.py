"""The routes /v1/chat/completions, /v1/chat/completions/render and /v1/completions.

Chats and completions take the same path, whether the reply is streamed or not. The module
`replies` builds the JSON of the replies.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.params import SamplingParams
from octavo.serve.api import prompt, token_generation, validate
from octavo.serve.api.api_errors import ApiError, api_error, invalid_field, unsupported
from octavo.serve.api.logprobs import Layout
from octavo.serve.api.protocol import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    OpenAI,
    TokensRequest,
)
from octavo.serve.api.replies import ChunkWriter, Envelope, ReplyFormat
from octavo.serve.api.reply_writer import ReplyWriter
from octavo.serve.api.request_fields import FIELDS, Field
from octavo.serve.api.request_reasoning import reasoning_start, reasoning_style, show_tags
from octavo.serve.api.request_tools import read_tools, replace_functions
from octavo.serve.api.token_generation import TokensWriter
from octavo.serve.api.translation import FieldNames
from octavo.serve.api.validate import CheckedRequest, Prepared
from octavo.serve.front.engine_client import Call
from octavo.serve.front.front import Caller, Front
from octavo.serve.http.exchange import Exchange

log = logging.getLogger(__name__)
DEFAULT_TOKENS = 16  # The longest reply of a completion that does not set max_tokens.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


def open_call(front: Front, caller: Caller, prepared: Prepared, stream: bool) -> Call:
    """Open a call within the limits of the caller's key. Every transport uses this function."""
    key = caller.key
    if key is not None:
        key.enter()
    try:
        return front.engine_client.open(
            caller.id, prepared, stream=stream, key=key, parent_span=caller.span
        )
    except BaseException:
        if key is not None:
            key.leave(0)
        raise


# ---- routes --------------------------------------------------------------------------------------


async def chat_completions(exchange: Exchange) -> None:
    body, unknown = await exchange.body(ChatRequest, generates=True)
    prepared, reply_format = await prepare_chat(exchange.front, exchange.caller, body, unknown)
    await answer(exchange, prepared, chunk_writer(exchange, reply_format), reply_format.stream)


async def completions(exchange: Exchange) -> None:
    body, unknown = await exchange.body(CompletionRequest, generates=True)
    prepared, reply_format = await prepare_completion(
        exchange.front, exchange.caller, body, unknown
    )
    await answer(exchange, prepared, chunk_writer(exchange, reply_format), reply_format.stream)


async def chat_batch(exchange: Exchange) -> None:
    """Answer several conversations. The reply has a choice for each of them."""
    front = exchange.front
    caller = exchange.caller
    body, unknown = await exchange.body(BatchChatRequest, generates=True)
    conversations: list[Any] = list(body.messages or [])
    if not 1 <= len(conversations) <= front.config.limits.prompts:
        limit = front.config.limits.prompts
        raise invalid_field("messages", f"messages must have 1 to {limit} conversations")
    for name in ("stream", "tools", "functions"):
        if getattr(body, name):
            raise unsupported(name, "this route answers several conversations in text")
    shared_fields = {name: getattr(body, name) for name in ChatRequest.__struct_fields__}
    chats = [ChatRequest(**{**shared_fields, "messages": messages}) for messages in conversations]
    checked, reply_format = read_chat(front, caller, chats[0], unknown)
    context = prompt.max_prompt_tokens(front, body.truncate_prompt_tokens)
    prompts: list[tuple[str | None, list[int]]] = []
    for index, chat in enumerate(chats):
        with FieldNames({"messages": f"messages.{index}"}).errors():
            prompts.append((None, await prompt.chat_ids(front, chat, checked, None, context)))
    reply_format.reasoning = reasoning_start(front, chats[0], prompts[0][1], checked)
    prepared = validate.build(front, caller, chats[0], prompts, checked, param="messages")
    await answer(exchange, prepared, chunk_writer(exchange, reply_format), stream=False)


async def generate_tokens(exchange: Exchange) -> None:
    """Continue token ids, and reply with token ids."""
    front = exchange.front
    body, unknown = await exchange.body(TokensRequest, generates=True)
    completion, moved_fields = token_generation.to_completion(body)
    with FieldNames({"prompt": "token_ids"}).errors(sent=unknown):
        prepared, reply_format = await prepare_completion(
            front, exchange.caller, completion, {**moved_fields, **unknown}
        )
    if reply_format.logprobs is not None:
        reply_format.logprobs = replace(
            reply_format.logprobs, top=max(reply_format.logprobs.top, 1)
        )
    request_id = body.request_id or exchange.caller.id
    writer = TokensWriter(request_id, front.config.name, front.tokenizer, reply_format)
    await answer(exchange, prepared, writer, reply_format.stream)


async def render(exchange: Exchange) -> None:
    """Reply with the rendered prompt and its tokens, and generate nothing.

    An invalid request is refused as in a chat, but a prompt may be longer than the context.
    """
    front = exchange.front
    body, unknown = await exchange.body(ChatRequest)
    wants_offsets = bool(unknown.pop("return_token_offsets", False))
    unknown.pop("return_assistant_tokens_mask", None)  # It is always null.
    checked, reply_format = read_chat(front, exchange.caller, body, unknown)
    checked.params.check_vocabulary(front.engine_client.model.vocab_size)
    ids = await prompt.chat_ids(front, body, checked, reply_format.tools, context=sys.maxsize)
    text = await front.text.decode(front.tokenizer, ids)
    reply = await describe_prompt(exchange, body, checked, (text, ids), wants_offsets)
    await exchange.reply(reply, checked.headers)


async def render_completion(exchange: Exchange) -> None:
    """Reply with the tokens of each prompt, and generate nothing."""
    front = exchange.front
    body, unknown = await exchange.body(CompletionRequest)
    wants_offsets = bool(unknown.pop("return_token_offsets", False))
    checked, _ = read_completion(front, exchange.caller, body, unknown)
    checked.params.check_vocabulary(front.engine_client.model.vocab_size)
    replies = []
    for text, ids in await prompt.completion_prompts(front, body, checked):
        prompt_text = text if text is not None else await front.text.decode(front.tokenizer, ids)
        replies.append(
            await describe_prompt(exchange, body, checked, (prompt_text, ids), wants_offsets)
        )
    await exchange.reply(replies, checked.headers)


async def describe_prompt(
    exchange: Exchange,
    body: OpenAI,
    checked: CheckedRequest,
    rendered_prompt: tuple[str, list[int]],
    wants_offsets: bool,
) -> dict[str, Any]:
    """Return the description of a prompt that the render routes reply with."""
    front = exchange.front
    offsets = None
    if wants_offsets:
        offsets = await asyncio.to_thread(
            token_generation.token_offsets, front.tokenizer, *rendered_prompt
        )
    reply_format = ReplyFormat(chat=isinstance(body, ChatRequest))
    description = token_generation.rendered(
        envelope(front, exchange.caller, reply_format).id,
        front.config.name,
        rendered_prompt,
        checked.params,
        body,
        offsets,
    )
    return {**description, "max_model_len": front.engine_client.model.max_model_len}


# ---- reading the request -------------------------------------------------------------------------


def _stream(body: OpenAI, headers: dict[str, str], forced: bool) -> tuple[bool, str | None]:
    """Return whether to stream, and which chunks contain the usage: None, "end" or "all".

    `forced` is true if a stream has the usage even when the request does not ask for it.
    """
    options = body.stream_options
    if not options:
        return bool(body.stream), "end" if forced and body.stream else None
    if not body.stream:
        raise invalid_field("stream_options", "stream_options is allowed only with stream: true")
    for name in STREAM_OPTIONS:
        if not isinstance(options.get(name), bool | None):
            raise invalid_field(
                f"stream_options.{name}", f"stream_options.{name} must be true or false"
            )
    unknown = [name for name in options if name not in STREAM_OPTIONS]
    names = [f"stream_options.{name[:64]}" for name in unknown if validate.LABEL.fullmatch(name)]
    validate.ignore(headers, *names[:20])
    if not (options.get("include_usage") or forced):
        return True, None
    return True, "all" if options.get("continuous_usage_stats") else "end"


def _prompt_logprobs(body: OpenAI, params: SamplingParams, limit: int) -> SamplingParams:
    if body.prompt_logprobs is None:
        return params
    if body.stream:
        raise invalid_field(
            "prompt_logprobs", "prompt_logprobs cannot be streamed: use stream: false"
        )
    return replace(
        params,
        prompt_logprobs=validate.check_count("prompt_logprobs", body.prompt_logprobs, 0, limit),
    )


def _logprobs(
    body: OpenAI, reply_format: ReplyFormat, params: SamplingParams, top: int | None
) -> SamplingParams:
    """Return the parameters with logprobs of the `top` likeliest tokens, or none if it is None."""
    if top is None:
        if body.logprob_token_ids:
            raise invalid_field(
                "logprob_token_ids",
                "logprob_token_ids needs logprobs: set logprobs too, or remove logprob_token_ids",
            )
        return params
    params = replace(params, logprobs=top, logprob_token_ids=body.logprob_token_ids)
    reply_format.logprobs = Layout(top, params.logprob_token_ids, reply_format.tokens_as_ids)
    return params


def _reply_format(front: Front, body: OpenAI, chat: bool, headers: dict[str, str]) -> ReplyFormat:
    """Return the part of the reply's format that chats and completions have in common."""
    reply_format = ReplyFormat(chat=chat, n=1 if body.n is None else body.n)
    forced = front.config.enable_force_include_usage
    reply_format.stream, reply_format.usage = _stream(body, headers, forced)
    reply_format.tokens_as_ids = front.config.return_tokens_as_token_ids
    if body.return_tokens_as_token_ids is not None:
        reply_format.tokens_as_ids = body.return_tokens_as_token_ids
    reply_format.prompt_logprobs = body.prompt_logprobs is not None
    reply_format.token_ids = bool(body.return_token_ids)
    return reply_format


def read_chat(
    front: Front,
    caller: Caller,
    body: ChatRequest,
    unknown: dict[str, Any],
    table: Mapping[str, Field] = FIELDS,
) -> tuple[CheckedRequest, ReplyFormat]:
    """Return the checked request without its prompt, and the format of its reply.

    `table` has the fields of the API to which the unknown fields were sent.
    """
    limits = front.config.limits
    headers = validate.check_fields(front, unknown, chat=True, table=table)
    prompt.check_template_options(front, body, headers)
    timeout = validate.check_common(front, caller, body)
    params = validate.sampling(front, body)
    reply_format = _reply_format(front, body, True, headers)
    reply_format.prompt_text = bool(body.return_prompt_text)
    reply_format.prefix = last_message(body) if body.echo else ""
    params = validate.choices(body, params, reply_format.n, 1, reply_format.stream, limits, headers)
    if body.top_logprobs and not body.logprobs:
        raise invalid_field(
            "top_logprobs", "top_logprobs needs logprobs: set logprobs to true as well"
        )
    top = None
    if body.logprobs:
        top = validate.check_count("top_logprobs", body.top_logprobs or 0, 0, limits.top_logprobs)
    max_tokens = validate.reply_length(body, LENGTHS)
    if max_tokens is None:
        max_tokens = default_length(front)
    if body.thinking_token_budget is not None:
        validate.check_count("thinking_token_budget", body.thinking_token_budget, -1)
    params = _prompt_logprobs(body, params, limits.top_logprobs)
    params = _logprobs(body, reply_format, params, top)
    _check_minimum(params, max_tokens)
    reply_format.is_legacy = replace_functions(body)
    reply_format.tools = read_tools(front, body, params.structured_outputs)
    if reply_format.tools is not None:
        params = reply_format.tools.sampling(params)
        reply_format.tools.note(headers)
    style = reasoning_style(front, body)
    if style is not None:
        params = show_tags(front.tokenizer, style, params)
    reply_format.shows_reasoning = body.include_reasoning is not False
    return CheckedRequest(params, max_tokens, timeout, headers), reply_format


def last_message(body: ChatRequest) -> str:
    """Return the text of the last message if the assistant wrote it, or else an empty text."""
    message = (body.messages or [{}])[-1]
    if message.get("role") != "assistant":
        return ""
    content = message.get("content")
    if isinstance(content, str):
        return content
    content_parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in content_parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def default_length(front: Front) -> int | None:
    """Return the model's recommended limit for a chat that sets no limit, or None."""
    length = front.engine_client.model.sampling.get("max_tokens")
    return None if length is None else int(length)


async def prepare_chat(
    front: Front,
    caller: Caller,
    body: ChatRequest,
    unknown: dict[str, Any],
    table: Mapping[str, Field] = FIELDS,
) -> tuple[Prepared, ReplyFormat]:
    checked, reply_format = read_chat(front, caller, body, unknown, table)
    context = prompt.max_prompt_tokens(front, body.truncate_prompt_tokens)
    ids = await prompt.chat_ids(front, body, checked, reply_format.tools, context)
    reply_format.reasoning = reasoning_start(front, body, ids, checked)
    prepared = validate.build(front, caller, body, [(None, ids)], checked, param="messages")
    if reply_format.tools is not None and reply_format.tools.grammar is not None:
        prepared.structure_field = "tools"
    if reply_format.tools is not None and not reply_format.tools.parallel:
        prepared.make_end_check = reply_format.tools.make_end_check
    return prepared, reply_format


async def prepare_completion(
    front: Front,
    caller: Caller,
    body: CompletionRequest,
    unknown: dict[str, Any],
    table: Mapping[str, Field] = FIELDS,
) -> tuple[Prepared, ReplyFormat]:
    checked, reply_format = read_completion(front, caller, body, unknown, table)
    prompts = await prompt.completion_prompts(front, body, checked)
    return validate.build(front, caller, body, prompts, checked), reply_format


def read_completion(
    front: Front,
    caller: Caller,
    body: CompletionRequest,
    unknown: dict[str, Any],
    table: Mapping[str, Field] = FIELDS,
) -> tuple[CheckedRequest, ReplyFormat]:
    """Return the checked request without its prompts, and the format of its reply."""
    limits = front.config.limits
    headers = validate.check_fields(front, unknown, chat=False, table=table)
    timeout = validate.check_common(front, caller, body)
    params = validate.sampling(front, body)
    reply_format = _reply_format(front, body, False, headers)
    reply_format.echo = bool(body.echo)
    num_prompts = 1
    if isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int):
        num_prompts = len(body.prompt)
    params = validate.choices(
        body, params, reply_format.n, num_prompts, reply_format.stream, limits, headers
    )
    if body.logprobs is True:
        raise invalid_field(
            "logprobs", "logprobs of a completion must be a number of tokens, got true"
        )
    top = None if body.logprobs is False else body.logprobs
    if top is not None:
        validate.check_count("logprobs", top, 0, limits.completion_logprobs)
    max_tokens = validate.reply_length(body, LENGTHS, minimum=0 if reply_format.echo else 1)
    if max_tokens is None:
        max_tokens = DEFAULT_TOKENS
    reply_format.prompt_only = reply_format.echo and max_tokens == 0
    params = _prompt_logprobs(body, params, limits.top_logprobs)
    if reply_format.echo and top is not None:
        params = replace(params, prompt_logprobs=max(top, params.prompt_logprobs or 0))
    params = _logprobs(body, reply_format, params, top)
    _check_minimum(params, max_tokens)
    return CheckedRequest(params, max(max_tokens, 1), timeout, headers), reply_format


def _check_minimum(params: SamplingParams, max_tokens: int | None) -> None:
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise invalid_field(
            "min_tokens",
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({max_tokens})",
            "param_out_of_range",
        )


# ---- writing the reply ---------------------------------------------------------------------------


async def answer(exchange: Exchange, prepared: Prepared, writer: ReplyWriter, stream: bool) -> None:
    """Run a request and send its reply in the writer's format. Every HTTP API uses this."""
    with open_call(exchange.front, exchange.caller, prepared, stream=stream) as call:
        exchange.watch(call)
        if stream:
            # Until the engine has accepted the request, a refusal can be sent as an HTTP error.
            await call.wait_accepted()
            await send_stream(exchange, call, prepared, writer)
        else:
            await call.wait_finished()
            await exchange.reply(writer.full_reply(call.collectors), prepared.headers)


async def send_stream(
    exchange: Exchange, call: Call, prepared: Prepared, writer: ReplyWriter
) -> None:
    """Send the headers at once, then the text as it is generated.

    An error that happens later is sent as a part of the stream.
    """
    front = exchange.front
    loop = asyncio.get_running_loop()
    last_write = time.monotonic()
    timer: asyncio.TimerHandle | None = None
    keep_alive = front.config.keep_alive

    def wake_if_quiet() -> None:
        nonlocal timer
        if time.monotonic() - last_write >= keep_alive:
            call.wake()
        timer = loop.call_later(keep_alive / 4, wake_if_quiet)

    await exchange.start_stream(prepared.headers, writer.content_type, writer.keep_alive)
    front.metrics.streams.inc()
    wake_if_quiet()
    error: ApiError | None = None
    try:
        if start := writer.begin():
            await exchange.write(start)
        async for pieces in call:
            chunks = [writer.piece(index, piece, call.collectors) for index, piece in pieces]
            chunk = b"".join(chunks) if pieces else writer.keep_alive
            if chunk:  # The writer holds back text that may become a tool call.
                await exchange.write(chunk)
                last_write = time.monotonic()
    except Exception as e:
        error = api_error(e)
        if error.code != "client_gone":
            front.engine_client.refuse(exchange.caller.id, error)
        if error.status == 500 and error is not e:
            log.exception("request %s failed in its stream", exchange.caller.id)
        if not exchange.started:
            raise  # On Ray, another replica can still take the request.
    finally:
        if timer is not None:
            timer.cancel()
        front.metrics.streams.dec()
    await exchange.write(writer.end(call.collectors, error), last=True)


def chunk_writer(exchange: Exchange, reply_format: ReplyFormat) -> ChunkWriter:
    front = exchange.front
    return ChunkWriter(
        envelope(front, exchange.caller, reply_format), front.tokenizer, reply_format
    )


def envelope(front: Front, caller: Caller, reply_format: ReplyFormat) -> Envelope:
    id = f"{'chatcmpl' if reply_format.chat else 'cmpl'}-{caller.id.removeprefix('req_')}"
    return Envelope(id, front.config.name, front.fingerprint)
