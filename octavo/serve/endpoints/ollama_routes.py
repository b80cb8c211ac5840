"""The routes of Ollama's API below /api."""

from __future__ import annotations

from typing import Any

from octavo import __version__
from octavo.serve.api import ollama_api, validate
from octavo.serve.api.ollama_api import LineWriter, loaded_reply, served_name
from octavo.serve.api.protocol import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from octavo.serve.api.reply_writer import ReplyParser
from octavo.serve.api.request_fields import OLLAMA_TABLE
from octavo.serve.api.request_reasoning import model_style
from octavo.serve.api.translation import Translation, sent_names
from octavo.serve.endpoints.completions import answer, prepare_completion
from octavo.serve.endpoints.translated import (
    finish_headers,
    prepare,
    read,
)
from octavo.serve.http.exchange import Exchange


async def chat(exchange: Exchange) -> None:
    front = exchange.front
    config = front.config
    body, unknown = await exchange.body(OllamaChatRequest, generates=True)
    translation = ollama_api.chat_to_chat(body, config.names, config.limits)
    with translation.fields.errors(sent_names(body, unknown)):
        if not body.messages:
            return await reply_loaded(exchange, translation, unknown, is_chat=True)
        prepared, reply_format = await prepare(exchange, translation, unknown, OLLAMA_TABLE)
        parser = reply_format.parser()
        writer = LineWriter(config.name, parser, reply_format, front.tokenizer, is_chat=True)
        await answer(exchange, prepared, writer, reply_format.stream)


async def generate(exchange: Exchange) -> None:
    front = exchange.front
    config = front.config
    body, unknown = await exchange.body(OllamaGenerateRequest, generates=True)
    if body.raw and body.prompt:
        return await generate_raw(exchange, body, unknown)
    translation = ollama_api.generate_to_chat(body, config.names)
    with translation.fields.errors(sent_names(body, unknown)):
        if not body.prompt:
            return await reply_loaded(exchange, translation, unknown, is_chat=False)
        prepared, reply_format = await prepare(exchange, translation, unknown, OLLAMA_TABLE)
        parser = reply_format.parser()
        writer = LineWriter(config.name, parser, reply_format, front.tokenizer, is_chat=False)
        await answer(exchange, prepared, writer, reply_format.stream)


async def generate_raw(
    exchange: Exchange, body: OllamaGenerateRequest, unknown: dict[str, Any]
) -> None:
    """Continue a prompt without a chat template, as a completion does."""
    front = exchange.front
    config = front.config
    completion, fields = ollama_api.generate_to_completion(body, config.names)
    with fields.errors(sent_names(body, unknown)):
        prepared, reply_format = await prepare_completion(
            front, exchange.caller, completion, unknown, OLLAMA_TABLE
        )
        finish_headers(fields, prepared.headers)
        parser = ReplyParser(tools=None, reasoning=None)
        writer = LineWriter(config.name, parser, reply_format, front.tokenizer, is_chat=False)
        await answer(exchange, prepared, writer, reply_format.stream)


async def reply_loaded(
    exchange: Exchange, translation: Translation, unknown: dict[str, Any], is_chat: bool
) -> None:
    """Reply that the model is loaded. Ollama's clients send a request without a prompt for this."""
    checked, _ = read(exchange, translation, unknown, OLLAMA_TABLE)
    checked.params.check_vocabulary(exchange.front.engine_client.model.vocab_size)
    finish_headers(translation.fields, checked.headers)
    await exchange.reply(loaded_reply(exchange.front.config.name, is_chat), checked.headers)


async def tags(exchange: Exchange) -> None:
    front = exchange.front
    loaded = front.engine_client.model
    names = front.config.names
    models = [ollama_api.model_entry(name, loaded, front.created) for name in names]
    await exchange.reply({"models": models})


async def running_models(exchange: Exchange) -> None:
    front = exchange.front
    entry = ollama_api.running_entry(front.config.name, front.engine_client.model, front.created)
    await exchange.reply({"models": [entry]})


async def show(exchange: Exchange) -> None:
    front = exchange.front
    body, unknown = await exchange.body(OllamaShowRequest)
    headers = validate.check_fields(front, unknown)
    validate.check_model(front, served_name(body.model or body.name, front.config.names))
    template = front.tokenizer.chat_template
    capabilities = ["completion"]
    if template is not None:
        capabilities.append("tools")
    if model_style(front.tokenizer) is not None:
        capabilities.append("thinking")
    loaded = front.engine_client.model
    description = ollama_api.model_description(loaded, front.created, template, capabilities)
    await exchange.reply(description, headers)


async def version(exchange: Exchange) -> None:
    await exchange.reply({"version": __version__})
