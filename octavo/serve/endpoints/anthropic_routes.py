"""The routes of Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from octavo.serve.api import anthropic_messages
from octavo.serve.api.anthropic_messages import MessageWriter
from octavo.serve.api.protocol import MessagesRequest
from octavo.serve.api.request_fields import MESSAGES_TABLE
from octavo.serve.api.translation import sent_names
from octavo.serve.endpoints.completions import answer
from octavo.serve.endpoints.translated import count_prompt, prepare
from octavo.serve.http.exchange import Exchange


async def messages(exchange: Exchange) -> None:
    front = exchange.front
    body, unknown = await exchange.body(MessagesRequest, generates=True)
    translation = anthropic_messages.to_chat(body, front.config.limits)
    with translation.fields.errors(sent_names(body, unknown)):
        prepared, reply_format = await prepare(exchange, translation, unknown, MESSAGES_TABLE)
        parser = reply_format.parser()
        writer = MessageWriter(exchange.caller.id, front.config.name, parser, body)
        await answer(exchange, prepared, writer, reply_format.stream)


async def count_tokens(exchange: Exchange) -> None:
    body, unknown = await exchange.body(MessagesRequest)
    translation = anthropic_messages.to_chat(body, exchange.front.config.limits)
    with translation.fields.errors(sent_names(body, unknown)):
        count, headers = await count_prompt(exchange, translation, unknown, MESSAGES_TABLE)
    await exchange.reply({"input_tokens": count}, headers)
