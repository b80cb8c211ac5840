"""The routes of OpenAI's Responses API: create, read, delete and cancel a response."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from octavo.serve.api import openai_responses
from octavo.serve.api.api_errors import api_error, invalid_field, unsupported
from octavo.serve.api.openai_responses import ResponseWriter, new_response, response_id
from octavo.serve.api.protocol import ResponsesRequest
from octavo.serve.api.request_fields import RESPONSES_TABLE
from octavo.serve.api.translation import sent_names
from octavo.serve.endpoints.completions import answer, open_call
from octavo.serve.endpoints.translated import prepare
from octavo.serve.front.engine_client import Call
from octavo.serve.front.front import Front
from octavo.serve.http.exchange import Exchange

log = logging.getLogger(__name__)


async def create(exchange: Exchange) -> None:
    front = exchange.front
    caller = exchange.caller
    store = front.responses
    body, unknown = await exchange.body(ResponsesRequest, generates=True)
    check_background(body)
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        earlier = store.conversation(body.previous_response_id, caller.owner)
    translation, messages = openai_responses.to_chat(body, earlier, front.config.limits)

    def completed(response: dict[str, Any]) -> None:
        if body.store is not False:
            output = openai_responses.reply_messages(response)
            store.add(caller.owner, response, [*messages, *output])

    with translation.fields.errors(sent_names(body, unknown)):
        prepared, reply_format = await prepare(exchange, translation, unknown, RESPONSES_TABLE)
        response = new_response(body, response_id(caller.id), front.config.name)
        writer = ResponseWriter(
            response, reply_format.parser(), reply_format, front.tokenizer, completed
        )
        if body.background:
            call = open_call(front, caller, prepared, stream=False)
            store.begin(response["id"], caller.owner, response)
            store.keep_task(asyncio.create_task(run_in_background(front, call, writer)))
            return await exchange.reply(response, prepared.headers)
        store.begin(response["id"], caller.owner, response)
        try:
            await answer(exchange, prepared, writer, reply_format.stream)
        finally:
            store.end(response["id"])


def check_background(body: ResponsesRequest) -> None:
    if body.background and body.store is False:
        raise invalid_field(
            "background",
            "background can only be used when `store` is true, because the response is read from "
            "the store",
        )
    if body.background and body.stream:
        raise unsupported("background", "a stream cannot be continued: send one of the two fields")


async def run_in_background(front: Front, call: Call, writer: ResponseWriter) -> None:
    """Run a call whose client has its reply already, and store the response."""
    response = writer.response
    try:
        with call:
            await call.wait_finished()
            writer.full_reply(call.collectors)
    except Exception as e:
        error = api_error(e)
        front.engine_client.refuse(call.id, error)
        if error is not e:
            log.exception("request %s failed in the background", call.id)
        writer.fail(error)
        if error.code == "cancelled":
            response |= {"status": "cancelled", "error": None}
        front.responses.add(call.owner, response, None)
    finally:
        front.responses.end(response["id"])


async def retrieve(exchange: Exchange) -> None:
    front = exchange.front
    response = front.responses.response(exchange.path["id"], exchange.caller.owner)
    if response["status"] == "queued" and not is_waiting(front, response["id"]):
        response["status"] = "in_progress"
    await exchange.reply(response)


def is_waiting(front: Front, id: str) -> bool:
    """Return whether the request of a response is still in the queue."""
    return f"{openai_responses.request_id(id)}-0" in front.engine_client.queue_bound.waiting


async def delete(exchange: Exchange) -> None:
    id = exchange.path["id"]
    exchange.front.responses.delete(id, exchange.caller.owner)
    await exchange.reply({"id": id, "object": "response", "deleted": True})


async def cancel(exchange: Exchange) -> None:
    """End a response that is being generated. A request that waits for it gets an error."""
    front = exchange.front
    id = exchange.path["id"]
    owner = exchange.caller.owner
    response = front.responses.response(id, owner)
    if front.responses.is_open(id, owner):
        if front.engine_client.cancel(openai_responses.request_id(id), owner):
            response = {**response, "status": "cancelled"}
    elif not response["background"]:
        raise invalid_field(
            "id",
            "Cannot cancel a synchronous response. It is complete: create it with background to "
            "cancel it while it is generated",
        )
    await exchange.reply(response)
