"""Routes for operators, under the names of vLLM and SageMaker: load, sleep, ping, invocations."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec

from octavo.serve.api.api_errors import ApiError, invalid_field
from octavo.serve.endpoints import completions, file_routes, pooling_routes, routes
from octavo.serve.front.sagemaker_sessions import NO_SESSION
from octavo.serve.http.exchange import Exchange, Handler

SESSION_HEADER = b"x-amzn-sagemaker-session-id"


class RouteFields(msgspec.Struct):
    """The fields that determine the route of a request. Their values are not parsed."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    # Only requests for embeddings have this field. Their text may be in `messages`, as in a chat.
    encoding_format: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    # This field is set if the request creates or closes a session.
    request_type: msgspec.Raw | msgspec.UnsetType = msgspec.field(
        name="requestType", default=msgspec.UNSET
    )


class SessionRequest(msgspec.Struct, forbid_unknown_fields=True):
    request_type: Literal["NEW_SESSION", "CLOSE"] = msgspec.field(name="requestType")


INVOKED_ROUTES: dict[str, Handler] = {
    "encoding_format": pooling_routes.embeddings,
    "messages": completions.chat_completions,
    "prompt": completions.completions,
    "input": pooling_routes.embeddings,
    "query": pooling_routes.rerank,
    "text_1": pooling_routes.score,
}


async def ping(exchange: Exchange) -> None:
    """Reply as /health does. SageMaker checks the health of the server with this route."""
    await routes.readyz(exchange)


async def invocations(exchange: Exchange) -> None:
    """Pass a request on to the route that its fields belong to.

    SageMaker sends all requests to this route.
    """
    with exchange.reserve() as reservation:
        body = await exchange.read(reservation)
        try:
            fields = msgspec.json.decode(body, type=RouteFields)
        except (msgspec.MsgspecError, RecursionError):
            raise invalid_field(None, "the body must be a JSON object", "invalid_json") from None
    if fields.request_type is not msgspec.UNSET:
        return await change_session(exchange, bytes(body))
    session = exchange.scope["octavo.headers"].get(SESSION_HEADER, b"").decode("latin-1")
    if session not in NO_SESSION:
        exchange.front.sagemaker_sessions.check(session, exchange.caller.owner)
    for name, handler in INVOKED_ROUTES.items():
        if getattr(fields, name) is not msgspec.UNSET:
            exchange.put_back(bytes(body))
            return await handler(exchange)
    names = ", ".join(INVOKED_ROUTES)
    raise invalid_field(None, f"the request must have one of the fields {names}")


async def change_session(exchange: Exchange, body: bytes) -> None:
    """Create or close a session of SageMaker."""
    try:
        session = msgspec.json.decode(body, type=SessionRequest)
    except msgspec.MsgspecError:
        raise invalid_field(
            "requestType",
            "the body must have requestType, which is NEW_SESSION or CLOSE, and no other field",
        ) from None
    sessions = exchange.front.sagemaker_sessions
    owner = exchange.caller.owner
    if session.request_type == "NEW_SESSION":
        id, expires = sessions.create(owner)
        expiry = datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        headers = {"x-amzn-sagemaker-new-session-id": f"{id}; Expires={expiry}"}
        return await exchange.reply({"session_id": id, "expires": expiry}, headers)
    id = exchange.scope["octavo.headers"].get(SESSION_HEADER, b"").decode("latin-1")
    sessions.close(id, owner)
    await exchange.reply({"session_id": id}, {"x-amzn-sagemaker-closed-session-id": id})


async def load(exchange: Exchange) -> None:
    await exchange.reply({"server_load": len(exchange.front.engine_client.calls)})


# ---- sleep -------------------------------------------------------------------------------------


async def sleep(exchange: Exchange) -> None:
    """End the engine process, which frees all memory of the model, until /wake_up.

    vLLM's levels differ in what stays in memory. This server keeps nothing at either level.
    """
    check_operator(exchange)
    front = exchange.front
    level = file_routes.query_of(exchange).get("level", "1")
    if level not in ("1", "2"):
        raise invalid_field("level", "level must be 1 or 2")
    supervisor = front.engine_client.supervisor
    if supervisor.sleep_level == 0:
        _ = front.engine_client.model  # This raises an error while the engine is not ready.
        if front.engine_client.calls:
            raise ApiError(
                409,
                f"{len(front.engine_client.calls)} requests are open: wait until they have ended",
                "requests_open",
            )
        await supervisor.sleep(int(level))
    await exchange.reply({"is_sleeping": True})


async def wake_up(exchange: Exchange) -> None:
    """Start the engine process again, and reply when it is ready.

    As in vLLM, a client may wake the weights and the KV cache one after the other with `tags`.
    """
    check_operator(exchange)
    supervisor = exchange.front.engine_client.supervisor
    tag = file_routes.query_of(exchange).get("tags")
    if tag not in (None, *supervisor.PARTS):
        raise invalid_field("tags", f"tags must be one of {', '.join(supervisor.PARTS)}")
    await supervisor.wake(supervisor.PARTS if tag is None else (tag,))
    await exchange.reply({"is_sleeping": supervisor.sleep_level > 0})


async def is_sleeping(exchange: Exchange) -> None:
    asleep = exchange.front.engine_client.supervisor.sleep_level > 0
    await exchange.reply({"is_sleeping": asleep})


def check_operator(exchange: Exchange) -> None:
    """Raise ApiError if there are API keys and this one is not an administrator's."""
    key = exchange.caller.key
    if key is not None and not key.admin:
        raise ApiError(
            403,
            "this route needs an administrator's key: set admin = true for a key in the file of "
            "--api-keys",
            "admin_only",
        )
