"""Runs before every route, HTTP and WebSocket alike: ids, the Host and Origin checks, keys, and
errors in one shape.

It is plain ASGI and denies by default: with keys configured, only the probes are open, and the
files of the live page, which show nothing without a key. A browser cannot send an Authorization
header with a WebSocket: it sends the key as a subprotocol, never in the URL. Neither keys nor query
strings are logged.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
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
from octavo.serve.api.validate import LABEL
from octavo.serve.endpoints.live_page import PAGE
from octavo.serve.front.front import Caller, Front
from octavo.serve.http.connections import Connection

log = logging.getLogger(__name__)
OPEN = frozenset({"/livez", "/readyz", "/startupz", "/health", *PAGE})
KEY_PROTOCOL = "octavo-key."  # and the key in base64url, without padding
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
# names of this machine that are no addresses of the loopback, though clients use them as such
LOCAL_NAMES = frozenset({"localhost", "0.0.0.0", "::"})


class Guard:
    def __init__(self, app: ASGIApp, front: Front):
        self.app = app
        self.front = front
        self.local = is_loopback(front.config.host)
        self.host_allowed = lru_cache(64)(self._host_allowed)  # clients send the same few names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        request = scope.get("octavo.request")  # a WebSocket has none
        caller = Caller() if request is None else Caller(arrival=request.arrival)
        scope["octavo.caller"] = caller
        # The first of several headers of one name counts.
        headers = scope["octavo.headers"] = dict(reversed(scope["headers"]))
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                message["headers"] = [*message["headers"], *self.id_headers(headers, caller)]
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        try:
            self.check(scope, headers, caller)
            scope["app"] = self.app  # the router then raises its errors instead of answering
            await self.app(scope, receive, send_on)
        except Exception as e:
            error = from_router(e) if isinstance(e, HTTPException) else api_error(e)
            if error.status == 500 and not isinstance(e, ApiError):
                log.exception("request %s failed", caller.id)
            self.front.metrics.rejections.labels(error.code or error.type).inc()
            if status == 0:
                await send_error(error, scope, send_on)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1011})
            else:
                raise
        finally:
            if request is not None:
                request.on_disconnect(None)
            log.info(
                "%s %s %s %d %.1f ms%s",
                caller.id,
                scope.get("method", "WS"),
                known_path(scope),
                status,
                (time.monotonic() - caller.arrival) * 1000,
                f" {caller.owner}" if caller.owner else "",
            )

    def id_headers(
        self, headers: Mapping[bytes, bytes], caller: Caller
    ) -> list[tuple[bytes, bytes]]:
        """The client's own id under the name that it came by, if it is a valid one, and ours."""
        ours = caller.id.encode()
        given = headers.get(b"x-request-id", b"")
        valid = len(given) <= self.front.config.limits.label_chars and LABEL.fullmatch(
            given.decode("latin-1")
        )
        return [(b"x-request-id", given if valid else ours), (b"x-octavo-request-id", ours)]

    def check(self, scope: Scope, headers: Mapping[bytes, bytes], caller: Caller) -> None:
        host = text(headers, b"host") or ""
        if not self.host_allowed(host):
            raise ApiError(
                421,
                "this server does not answer under that host name (--allowed-host adds one)",
                "wrong_host",
            )
        if scope["type"] == "websocket":
            self.check_origin(text(headers, b"origin"), host)
        if scope["path"] not in OPEN:
            address = scope["client"][0] if scope.get("client") else ""
            caller.key = self.front.keys.check(
                text(headers, b"authorization") or offered_key(scope), address
            )
            if caller.key is not None:
                connection: Connection = scope["octavo.connection"]
                connection.table.claim(connection, caller.key)
        timeout = text(headers, b"x-request-timeout")
        if timeout is not None:
            if not SECONDS.fullmatch(timeout):
                raise invalid_field(
                    "timeout",
                    "the header x-request-timeout must be a number of seconds, such as 30 or 0.5",
                )
            caller.timeout = float(timeout)

    def _host_allowed(self, host: str) -> bool:
        """A web page can make a browser send requests to this machine under a name of the page's
        own choice. So only known names are answered."""
        allowed = self.front.config.allowed_hosts
        name = None
        with suppress(ValueError):  # brackets that do not fit
            name = (
                urlsplit(f"//{host}").hostname if host and not set(host) & set("/@?#\\") else None
            )
        if name is None:
            return False
        return (
            name in allowed
            or (self.local and (name in LOCAL_NAMES or is_loopback(name)))
            or not (allowed or self.local)
        )

    def check_origin(self, origin: str | None, host: str) -> None:
        """Browsers always send it with a WebSocket, and do not apply any rule of their own."""
        with suppress(ValueError):  # brackets that do not fit
            if (
                origin is None
                or origin in self.front.config.allowed_origins
                or urlsplit(origin).netloc == host
            ):
                return
        raise ApiError(
            403,
            "web pages of this origin may not use this server (--allowed-origin adds one)",
            "wrong_origin",
        )


def offered_key(scope: Scope) -> str | None:
    """Return the key that a browser sends as a WebSocket subprotocol, because it cannot set headers."""
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


def text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    found = headers.get(name)
    return None if found is None else found.decode("latin-1")


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
    return getattr(route, "path", None) or (scope["path"] if scope["path"] in OPEN else "-")


def from_router(error: HTTPException) -> ApiError:
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow")
        takes = f": it takes {allow}" if allow else ""
        return ApiError(
            405, f"this route does not take this method{takes}", "method_not_allowed", allow=allow
        )
    return ApiError(404, "there is no such route: /openapi.json names those there are", "not_found")


async def send_error(error: ApiError, scope: Scope, send: Send) -> None:
    data = error.encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(data)),
        **error.headers,
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    kind = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            return await send({"type": "websocket.close", "code": 1008})
        kind = "websocket.http.response"
    status = 400 if error.status == 499 else error.status
    await send({"type": f"{kind}.start", "status": status, "headers": encoded})
    await send({"type": f"{kind}.body", "body": data})
