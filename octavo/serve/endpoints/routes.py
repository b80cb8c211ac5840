"""The other routes: models, tokenization, plain generation, probes, limits, metrics, cancel."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from octavo import __version__
from octavo.serve.api import openapi, prompt, validate
from octavo.serve.api.api_errors import ApiError, invalid_field
from octavo.serve.api.protocol import (
    BatchGenerateRequest,
    ChatRequest,
    GenerateRequest,
    TokenizeRequest,
)
from octavo.serve.api.request_fields import PLAIN_TABLE
from octavo.serve.api.request_tools import read_tools
from octavo.serve.api.validate import CheckedRequest, Prepared
from octavo.serve.channel.jobs import Encode, EncodeChat, Tokenize
from octavo.serve.endpoints.completions import open_call
from octavo.serve.front.front import Caller, Front
from octavo.serve.http.exchange import Exchange

DEFAULT_NEW_TOKENS = 128

# ---- models --------------------------------------------------------------------------------------


def card(front: Front, name: str) -> dict[str, Any]:
    loaded = front.engine_client.model_info()
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "octavo",
        "root": front.config.name,
        "parent": None,
        "max_model_len": loaded.max_model_len if loaded else None,
        "default_sampling_params": loaded.sampling if loaded else None,
    }


async def models(exchange: Exchange) -> None:
    front = exchange.front
    cards = [card(front, name) for name in front.config.names]
    await exchange.reply({"object": "list", "data": cards})


async def model(exchange: Exchange) -> None:
    name = exchange.path["id"]
    validate.check_model(exchange.front, name)
    await exchange.reply(card(exchange.front, name))


# ---- tokens --------------------------------------------------------------------------------------


async def tokenize(exchange: Exchange) -> None:
    front = exchange.front
    body, unknown = await exchange.body(TokenizeRequest)
    headers = validate.check_fields(front, unknown)
    validate.check_model(front, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid_field("prompt", "the request must have either prompt or messages")
    encoding: Encode | EncodeChat
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=body.add_special_tokens,
            tools=body.tools,
        )
        prompt.check_template_options(front, chat, headers)
        tools = read_tools(front, chat)
        encoding = prompt.chat_job(front, chat, tools, keep=None, context=sys.maxsize)
    else:
        assert body.prompt is not None
        encoding = Encode(
            [body.prompt],
            context=sys.maxsize,
            add_special_tokens=body.add_special_tokens is not False,
            parse_special=prompt.parse_special(front, body.parse_special),
        )
    job = Tokenize(encoding, bool(body.return_token_strs))
    reply = await front.text.tokenize(front.context, job)
    await exchange.send(reply, "application/json", headers)


async def detokenize(exchange: Exchange) -> None:
    front = exchange.front
    with exchange.reserve() as reservation:
        body = await exchange.read(reservation)
        reply = await front.text.detokenize(front.context, body)
    headers = validate.check_fields(front, reply.unknown)
    validate.check_model(front, reply.model)
    await exchange.send(reply.reply, "application/json", headers)


async def tokenizer_info(exchange: Exchange) -> None:
    """Reply with the facts about the tokenizer that lm-eval needs to work without its own."""
    front = exchange.front
    tokenizer = exchange.front.tokenizer
    await exchange.reply(
        {
            "tokenizer_class": tokenizer.tokenizer_class,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": front.engine_client.model.max_model_len,
            **tokenizer.specials,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "chat_template": tokenizer.chat_template,
        }
    )


# ---- plain generation ----------------------------------------------------------------------------


async def prepare_generate(
    front: Front,
    caller: Caller,
    body: GenerateRequest | BatchGenerateRequest,
    prompts: list[str],
    headers: dict[str, str],
    stream: bool = False,
) -> Prepared:
    limits = front.config.limits
    timeout = validate.check_common(front, caller, body)
    params = validate.choices(
        body, validate.sampling(front, body), 1, len(prompts), stream, limits, headers
    )
    max_tokens = validate.reply_length(body, ("max_new_tokens",))
    if max_tokens is None:
        max_tokens = DEFAULT_NEW_TOKENS
    if params.min_tokens > max_tokens:
        raise invalid_field(
            "min_tokens",
            f"min_tokens ({params.min_tokens}) must not exceed max_new_tokens ({max_tokens})",
            "param_out_of_range",
        )
    context = front.engine_client.model.max_model_len
    for text in prompts:
        prompt.check_size(front.tokenizer, len(text), context, "prompt")
    job = Encode(
        prompts,
        context=context,
        parse_special=prompt.parse_special(front, body.parse_special),
    )
    encoded: list[tuple[str | None, list[int]]] = [
        (text, front.tokenizer.as_prompt(tokens.ids))
        for text, tokens in zip(prompts, await front.text.encode(front.tokenizer, job), strict=True)
    ]
    checked = CheckedRequest(params, max_tokens, timeout, headers)
    return validate.build(front, caller, body, encoded, checked)


async def generate(exchange: Exchange) -> None:
    body, unknown = await exchange.body(GenerateRequest, generates=True)
    headers = validate.check_fields(exchange.front, unknown, chat=False, table=PLAIN_TABLE)
    if body.prompt is None:
        raise invalid_field("prompt", "prompt is missing: it must be a string")
    prepared = await prepare_generate(exchange.front, exchange.caller, body, [body.prompt], headers)
    (text,) = await generate_texts(exchange, prepared)
    await exchange.reply({"generated_text": text}, prepared.headers)


async def batch_generate(exchange: Exchange) -> None:
    body, unknown = await exchange.body(BatchGenerateRequest, generates=True)
    headers = validate.check_fields(exchange.front, unknown, chat=False, table=PLAIN_TABLE)
    prompts = check_prompts(exchange.front, body.prompts)
    prepared = await prepare_generate(exchange.front, exchange.caller, body, prompts, headers)
    await exchange.reply(
        {"generated_texts": await generate_texts(exchange, prepared)}, prepared.headers
    )


def check_prompts(front: Front, prompts: list[str] | None) -> list[str]:
    if not prompts:
        raise invalid_field("prompts", "prompts must be a list of at least one string")
    if len(prompts) > (limit := front.config.limits.prompts):
        raise invalid_field(
            "prompts", f"prompts can have at most {limit} items", "param_out_of_range"
        )
    return prompts


async def generate_texts(exchange: Exchange, prepared: Prepared) -> list[str]:
    with open_call(exchange.front, exchange.caller, prepared, stream=False) as call:
        exchange.watch(call)
        await call.wait_finished()
        return [collector.best[0].text for collector in call.collectors]


# ---- about the server ----------------------------------------------------------------------------


async def livez(exchange: Exchange) -> None:
    await exchange.reply({"state": "alive"})


async def readyz(exchange: Exchange) -> None:
    engine_client = exchange.front.engine_client
    await exchange.reply(engine_client.state(), status=200 if engine_client.ready else 503)


async def startupz(exchange: Exchange) -> None:
    started = (
        exchange.front.engine_client.tokenizer is not None
        and exchange.front.engine_client.supervisor.phase == "ready"
    )
    await exchange.reply(exchange.front.engine_client.state(), status=200 if started else 503)


async def version(exchange: Exchange) -> None:
    await exchange.reply({"version": __version__})


async def limits(exchange: Exchange) -> None:
    config = exchange.front.config
    loaded = exchange.front.engine_client.model_info()
    reply: dict[str, Any] = {
        **asdict(config.limits),
        "max_queue_memory": config.max_queue_memory,
        "max_queue": config.max_queue,
        "max_queue_tokens": config.max_queue_tokens,
        "queue_timeout": config.queue_timeout,
        "request_timeout": config.request_timeout,
        "max_model_len": loaded.max_model_len if loaded else None,
        "longest_sequence": loaded.longest_sequence if loaded else None,
    }
    await exchange.reply(reply)


async def metrics(exchange: Exchange) -> None:
    await exchange.send(exchange.front.metrics.render(), "text/plain; version=0.0.4; charset=utf-8")


async def dumps(exchange: Exchange) -> None:
    """Reply with the stacks of the engine's threads from the times when it hung.

    Only administrators may read them, because they contain file names.
    """
    key = exchange.caller.key
    if key is None or not key.admin:
        raise ApiError(
            403,
            "this route needs an administrator's key: set admin = true for a key in the file of "
            "--api-keys",
            "admin_only",
        )
    await exchange.reply({"dumps": exchange.front.engine_client.supervisor.dumps})


async def cancel(exchange: Exchange) -> None:
    id = exchange.path["id"]
    if not validate.LABEL.fullmatch(id) or len(id) > exchange.front.config.limits.label_chars:
        raise invalid_field("id", "the path does not contain a valid request id")
    await exchange.reply(
        {"id": id, "cancelled": exchange.front.engine_client.cancel(id, exchange.caller.owner)}
    )


async def description(exchange: Exchange) -> None:
    config = exchange.front.config
    loaded = exchange.front.engine_client.model_info()
    await exchange.reply(
        openapi.description(config.names, config.limits, loaded.vocab_size if loaded else None)
    )
