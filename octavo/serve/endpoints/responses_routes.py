"""The routes of OpenAI's Responses API: create, read, delete and cancel a response."""

from __future__ import annotations

from typing import Any

from octavo.serve.api import openai_responses
from octavo.serve.api.api_errors import invalid_field
from octavo.serve.api.openai_responses import ResponseWriter, new_response, response_id
from octavo.serve.api.protocol import ResponsesRequest
from octavo.serve.api.request_fields import RESPONSES_TABLE
from octavo.serve.endpoints.completions import answer
from octavo.serve.endpoints.translated import prepare
from octavo.serve.http.exchange import Exchange


async def create(exchange: Exchange) -> None:
    front = exchange.front
    caller = exchange.caller
    store = front.responses
    body, unknown = await exchange.body(ResponsesRequest, generates=True)
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        earlier = store.conversation(body.previous_response_id, caller.owner)
    translation, messages = openai_responses.to_chat(body, earlier, front.config.limits)

    def completed(response: dict[str, Any]) -> None:
        if body.store is not False:
            output = openai_responses.reply_messages(response)
            store.add(caller.owner, response, [*messages, *output])

    with translation.fields.errors():
        prepared, shape = await prepare(exchange, translation, unknown, RESPONSES_TABLE)
        response = new_response(body, response_id(caller.id), front.config.name)
        parser = shape.parser()
        writer = ResponseWriter(response, parser, shape, front.tokenizer, completed)
        store.begin(response["id"], caller.owner, response)
        try:
            await answer(exchange, prepared, writer, shape.stream)
        finally:
            store.end(response["id"])


async def retrieve(exchange: Exchange) -> None:
    found = exchange.front.responses.response(exchange.path["id"], exchange.caller.owner)
    await exchange.reply(found)


async def delete(exchange: Exchange) -> None:
    id = exchange.path["id"]
    exchange.front.responses.delete(id, exchange.caller.owner)
    await exchange.reply({"id": id, "object": "response", "deleted": True})


async def cancel(exchange: Exchange) -> None:
    """End a response that is being generated. Its own request gets an error."""
    front = exchange.front
    id = exchange.path["id"]
    owner = exchange.caller.owner
    found = front.responses.response(id, owner)
    if not front.responses.is_open(id, owner):
        raise invalid_field("id", "the response is complete and cannot be cancelled")
    front.client.cancel(f"req_{id.removeprefix('resp_')}", owner)
    await exchange.reply({**found, "status": "cancelled"})
