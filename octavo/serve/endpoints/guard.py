"""The guard runs before every HTTP route and WebSocket.

It gives each request an id, checks the Host and Origin headers and the API key, and turns every
error into the same JSON shape. It denies by default: when keys are configured, only the probes and
the files of the live page need none. Those files show nothing until the user enters a key. A
browser cannot send an Authorization header with a WebSocket, so it sends the key as a subprotocol,
never in the URL. Keys and query strings are not logged.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.serve.api.api_errors import ApiError, api_error, invalid_field
from octavo.serve.api.error_formats import encode_error
from octavo.serve.api.validate import LABEL
from octavo.serve.endpoints.live_page import PAGE
from octavo.serve.front.front import Caller, Front
from octavo.serve.front.tracing import OPERATION, ServerSpan
from octavo.serve.http.connections import Connection

log = logging.getLogger(__name__)
OPEN_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health", *PAGE})
LOAD_FORMAT = b"endpoint-load-metrics-format"  # A header of requests: TEXT or JSON.
KEY_PROTOCOL = "octavo-key."  # The key follows in base64url without padding.
# Spans name the operation of these routes "chat", and of others "text_completion".
CHAT_PATHS = ("/v1/chat", "/v1/messages", "/v1/responses", "/api/chat")
SECONDS_PATTERN = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
# Clients use these names for this machine, although they are not loopback addresses.
LOCAL_NAMES = frozenset({"localhost", "0.0.0.0", "::"})


class Guard:
    def __init__(self, app: ASGIApp, front: Front):
        self.app = app
        self.front = front
        self.local = is_loopback(front.config.host)
        self.host_allowed = lru_cache(64)(self._host_allowed)  # Clients send few names.

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        request = scope.get("octavo.request")  # This is None for a WebSocket.
        caller = Caller() if request is None else Caller(arrival=request.arrival)
        scope["octavo.caller"] = caller
        # If a header is repeated, its first value is used.
        headers = scope["octavo.headers"] = dict(reversed(scope["headers"]))
        caller.span = self._begin_span(scope, headers, caller)
        status = 0

        async def send_with_ids(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                message["headers"] = [*message["headers"], *self.id_headers(headers, caller)]
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        try:
            self.check(scope, headers, caller)
            scope["app"] = self.app  # This makes the router raise errors instead of replying.
            await self.app(scope, receive, send_with_ids)
        except Exception as e:
            error = from_router(e) if isinstance(e, HTTPException) else api_error(e)
            if error.status == 500 and not isinstance(e, ApiError):
                log.exception("request %s failed", caller.id)
            self.front.engine_client.refuse(caller.id, error)
            if status == 0:
                await send_error(error, scope, send_with_ids, caller.id)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1011})
            else:
                raise
        finally:
            if request is not None:
                request.on_disconnect(None)
            if caller.span is not None:
                end_span(caller.span, scope, status)
            log.info(
                "%s %s %s %d %.1f ms%s",
                caller.id,
                scope.get("method", "WS"),
                known_path(scope),
                status,
                (time.monotonic() - caller.arrival) * 1000,
                caller.log_fields,
            )

    def _begin_span(
        self, scope: Scope, headers: Mapping[bytes, bytes], caller: Caller
    ) -> ServerSpan | None:
        """Begin a span. Returns None if tracing is off, or for a probe or a page."""
        tracing = self.front.tracing
        method = scope.get("method", "WS")
        if tracing is None or method not in ("POST", "WS"):
            return None
        context = {name.decode("latin-1"): headers[name].decode("latin-1") for name in headers}
        attributes = {
            "http.request.method": "GET" if method == "WS" else method,
            "url.scheme": scope.get("scheme", "http"),
            "gen_ai.request.id": caller.id,
            OPERATION: operation_of(scope["path"]),
        }
        return tracing.begin(method, context, caller.arrival, attributes)

    def id_headers(
        self, headers: Mapping[bytes, bytes], caller: Caller
    ) -> list[tuple[bytes, bytes]]:
        """Return the server's id, and x-request-id with the client's id if it sent a valid one."""
        server_id = caller.id.encode()
        client_id = headers.get(b"x-request-id", b"")
        is_valid = len(client_id) <= self.front.config.limits.label_chars and LABEL.fullmatch(
            client_id.decode("latin-1")
        )
        id_headers = [
            (b"x-request-id", client_id if is_valid else server_id),
            (b"x-octavo-request-id", server_id),
        ]
        if caller.span is not None:
            id_headers.append((b"traceresponse", caller.span.traceresponse.encode()))
        if (load_format := headers.get(LOAD_FORMAT)) is not None:
            id_headers += self.load_headers(load_format)
        return id_headers

    def load_headers(self, load_format: bytes) -> list[tuple[bytes, bytes]]:
        """Return the header with the engine's load in ORCA's format, which load balancers read."""
        engine_client = self.front.engine_client
        heartbeat = engine_client.supervisor.heartbeat
        blocks = heartbeat.blocks_used + heartbeat.blocks_cached + heartbeat.blocks_free
        load = {
            "kv_cache_usage_perc": heartbeat.blocks_used / blocks if blocks else 0.0,
            "num_requests_waiting": float(len(engine_client.queue_bound.waiting)),
        }
        metrics = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
        reports = {
            b"text": f"TEXT {metrics}",
            b"json": f"JSON {json.dumps({'named_metrics': load})}",
        }
        selected = reports.get(load_format.lower())
        return [] if selected is None else [(b"endpoint-load-metrics", selected.encode())]

    def check(self, scope: Scope, headers: Mapping[bytes, bytes], caller: Caller) -> None:
        host = header_text(headers, b"host") or ""
        if not self.host_allowed(host):
            raise ApiError(
                421,
                "the Host header names a host that this server does not accept: use another host"
                " name, or start the server with --allowed-host NAME",
                "wrong_host",
            )
        if scope["type"] == "websocket" or scope["path"].startswith("/api/"):
            self.check_origin(header_text(headers, b"origin"), host)
        if scope["path"] not in OPEN_PATHS:
            address = scope["client"][0] if scope.get("client") else ""
            caller.key = self.front.keys.check(
                header_text(headers, b"authorization") or alternative_key(scope, headers), address
            )
            if caller.key is not None:
                connection: Connection = scope["octavo.connection"]
                connection.table.claim(connection, caller.key)
        timeout = header_text(headers, b"x-request-timeout")
        if timeout is not None:
            if not SECONDS_PATTERN.fullmatch(timeout):
                raise invalid_field(
                    "timeout",
                    "the header x-request-timeout must be a number of seconds, such as 30 or 0.5",
                )
            caller.timeout = float(timeout)

    def _host_allowed(self, host: str) -> bool:
        """Return whether requests with this Host header are accepted.

        A web page can point its own domain name at this machine, and so make a browser send
        requests to it (DNS rebinding). Therefore only known names are accepted.
        """
        allowed = self.front.config.allowed_hosts
        name = None
        with suppress(ValueError):  # The brackets of an IPv6 address may not match.
            if host and not set(host) & set("/@?#\\"):
                name = urlsplit(f"//{host}").hostname
        if name is None:
            return False
        return (
            name in allowed
            or (self.local and (name in LOCAL_NAMES or is_loopback(name)))
            or not (allowed or self.local)
        )

    def check_origin(self, origin: str | None, host: str) -> None:
        """Raise unless web pages of this origin may use the server.

        Browsers send the header Origin with every WebSocket and with every POST that a page of
        another origin makes, and leave the check to the server. Other routes need no check: a
        browser asks for permission before it sends the type application/json, which they require.
        """
        with suppress(ValueError):  # The brackets of an IPv6 address may not match.
            if (
                origin is None
                or origin in self.front.config.allowed_origins
                or urlsplit(origin).netloc == host
            ):
                return
        raise ApiError(
            403,
            "web pages of this origin may not use this server: start the server with"
            " --allowed-origin ORIGIN to allow them",
            "wrong_origin",
        )


def operation_of(path: str) -> str:
    """Return OpenTelemetry's name of the operation that a request asks for."""
    return "chat" if path.startswith(CHAT_PATHS) else "text_completion"


def end_span(span: ServerSpan, scope: Scope, status: int) -> None:
    """End the span of a request. Its name has the route, which is known only now."""
    path = known_path(scope)
    span.rename(f"{scope.get('method', 'WS')} {path}")
    attributes = {"http.route": path, "url.path": path, "http.response.status_code": status}
    span.end(attributes, error=str(status) if status >= 500 or status == 0 else "")


def alternative_key(scope: Scope, headers: Mapping[bytes, bytes]) -> str | None:
    """Return the key of a client that sends no Authorization header, or None.

    Anthropic's clients send the header x-api-key, and a browser sends the key as a WebSocket
    subprotocol. The result has the form of an Authorization header.
    """
    if (key := header_text(headers, b"x-api-key")) is not None:
        return f"Bearer {key}"
    for name in scope.get("subprotocols", ()):
        if name.startswith(KEY_PROTOCOL):
            key = name.removeprefix(KEY_PROTOCOL)
            try:
                return "Bearer " + base64.urlsafe_b64decode(key + "=" * (-len(key) % 4)).decode(
                    "ascii"
                )
            except (binascii.Error, ValueError):
                return "Bearer"
    return None


def header_text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def known_path(scope: Scope) -> str:
    """Return the path to log: the pattern of the route, or "-" for text that a client chose."""
    route = scope.get("route")
    return getattr(route, "path", None) or (scope["path"] if scope["path"] in OPEN_PATHS else "-")


def from_router(error: HTTPException) -> ApiError:
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow")
        advice = f": use {allow}" if allow else ""
        return ApiError(
            405, f"this route does not allow the method{advice}", "method_not_allowed", allow=allow
        )
    return ApiError(
        404, "this server has no such route: /openapi.json lists its routes", "not_found"
    )


async def send_error(error: ApiError, scope: Scope, send: Send, request_id: str) -> None:
    body = encode_error(error, scope["path"], request_id)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers,
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    message_type = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            return await send({"type": "websocket.close", "code": 1008})
        message_type = "websocket.http.response"
    status = 400 if error.status == 499 else error.status
    await send({"type": f"{message_type}.start", "status": status, "headers": encoded})
    await send({"type": f"{message_type}.body", "body": body})
