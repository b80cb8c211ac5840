"""A request that the server makes to its own application, such as a line of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Scope

from octavo.serve.api.api_errors import ApiError, api_error
from octavo.serve.front.front import Caller


class InternalRequest:
    """One request and its response. It has the same methods as HttpRequest."""

    keep_alive_comment = b""
    write_paused = False

    def __init__(self, body: bytes):
        self.arrival = time.monotonic()
        self.status = 0
        self.reply = b""
        self.response_started = False
        self._body = body
        self._on_disconnect: Callable[[], None] | None = None

    def take_complete_body(self) -> bytes:
        return self._body

    def abort(self) -> None:
        pass

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._on_disconnect = callback

    def disconnect(self) -> None:
        """End the request as if its client had disconnected."""
        if self._on_disconnect is not None:
            self._on_disconnect()

    async def receive(self) -> Message:
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.response_started = True
        else:
            self.reply += message.get("body", b"")

    async def run(self, app: ASGIApp, path: str, caller: Caller) -> ApiError | None:
        """Send the request to a route. Returns the error if the request was refused, or None."""
        headers = [(b"content-type", b"application/json")]
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 0),
            "app": app,  # This makes the router raise errors instead of replying.
            "octavo.headers": dict(headers),
            "octavo.caller": caller,
            "octavo.request": self,
        }
        try:
            await app(scope, self.receive, self.send)
        except HTTPException as error:
            return ApiError(error.status_code, "this server has no such route", "not_found")
        except Exception as error:
            return api_error(error)
        return None
