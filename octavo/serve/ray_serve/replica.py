"""A replica on Ray Serve: the front and the engine of one server, without its HTTP port.

The endpoint takes a lease from a replica, connects to its relay port and sends the request there.
The lease is a call of Ray Serve that lasts as long as the request. So Ray Serve counts the request,
does not stop the replica before it has ended, and adds replicas when there are many.

This module must not import Ray, because the tests of the relay need none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Message

from octavo.errors import ModelError
from octavo.serve.api import api_errors
from octavo.serve.api.api_errors import api_error
from octavo.serve.api.replies import KEEP_ALIVE
from octavo.serve.endpoints.application import RouteTable
from octavo.serve.endpoints.guard import from_router, operation_of
from octavo.serve.front.front import Caller, Front
from octavo.serve.front.keys import Key, KeyEntry
from octavo.serve.front.tracing import OPERATION
from octavo.serve.ray_serve.relay import (
    HEAD_BYTES,
    FromReplica,
    Placement,
    RelayedIdentity,
    RelayEnd,
    RelayHead,
    RelayPart,
    RelayStart,
    decode_start,
    frame_message,
    read_message,
    relayed_error,
)
from octavo.serve.serve_config import ServeConfig

log = logging.getLogger(__name__)
CONNECT_SECONDS = 10.0  # The endpoint has this time to connect after it has taken a lease.
DOWN_SECONDS = 60.0  # Ray replaces a replica whose engine cannot be restarted for this long.


class RelayedKey(Key):
    """The key of a relayed request. It has no limits, because the endpoint enforces them."""

    def __init__(self, identity: RelayedIdentity):
        entry = KeyEntry(identity.name, priority=identity.priority, admin=identity.admin)
        super().__init__(entry, digest=b"")
        self.salt = identity.salt
        self.sent = False  # True means that the request was sent to the engine.
        self.used_tokens = 0

    def enter(self) -> None:
        self.sent = True

    def leave(self, tokens: int) -> None:
        self.used_tokens += tokens


class RelayedRequest:
    """One relayed request and its response. It has the same methods as HttpRequest.

    The head of the response and the comments that keep a stream open are held back until there is
    text. Until then the request may fail, and the endpoint sends it to another replica.
    """

    def __init__(self, start: RelayStart, writer: asyncio.StreamWriter):
        self.arrival = time.monotonic() - start.elapsed
        self.response_started = False
        self.keep_alive_comment = b""
        self.disconnected = False
        self._body = start.body
        self._writer = writer
        self._head: RelayHead | None = None
        self._on_disconnect: Callable[[], None] | None = None

    def take_complete_body(self) -> bytes:
        return self._body

    @property
    def write_paused(self) -> bool:
        _, high = self._writer.transport.get_write_buffer_limits()
        return self._writer.transport.get_write_buffer_size() > high

    def abort(self) -> None:
        self._writer.transport.abort()

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._on_disconnect = callback
        if self.disconnected and callback is not None:
            callback()

    def disconnect(self) -> None:
        self.disconnected = True
        if self._on_disconnect is not None:
            self._on_disconnect()

    async def receive(self) -> Message:
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = RelayHead(message["status"], message["headers"])
            return
        body = message.get("body", b"")
        if body == KEEP_ALIVE and not self.response_started:
            return
        part = RelayPart(body, last=not message.get("more_body", False))
        if self._head is not None:
            self.response_started = True
            self.write(self._head)
            self._head = None
        self.write(part)
        with contextlib.suppress(OSError):  # The endpoint has disconnected.
            await self._writer.drain()

    def write(self, message: FromReplica) -> None:
        self._writer.write(frame_message(message))


class Lease:
    """A call of Ray Serve that lasts as long as a relayed request.

    It ends when the connection of the request ends.
    """

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self.ended = asyncio.Event()


class Replica:
    def __init__(self, config: ServeConfig, host: str, name: str):
        """Create a replica. `host` is the address of its node, and `name` is unique."""
        self.config = replace(config, keys_file=None, api_keys=())
        self.front = Front(self.config)
        self.routes = RouteTable(self.front)
        self.secret = secrets.token_hex(16)
        self.host = host
        self.port = 0
        self.name = name
        self.leases: dict[str, Lease] = {}
        # Both are None before start(). A replica may be stopped while its engine still starts.
        self._supervision: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start the engine, and return when it is ready."""
        self._supervision = asyncio.create_task(self.front.engine_client.supervisor.run())
        while not self.front.engine_client.ready:
            if self._supervision.done():
                self._supervision.result()
                raise ModelError("the engine process has ended before it was ready")
            await asyncio.sleep(0.05)
        self._server = await asyncio.start_server(self._serve_connection, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    # ---- methods that Ray Serve calls ------------------------------------------------------------

    async def lease(
        self, hashes: list[bytes], failed: list[str], preferred: str
    ) -> AsyncIterator[Placement]:
        """Yield the address for a request, and end when the request has ended.

        The arguments are for the request router.
        """
        lease_id = secrets.token_hex(8)
        lease = self.leases[lease_id] = Lease()
        try:
            yield Placement(self.name, self.host, self.port, self.secret, lease_id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lease.connected.wait(), CONNECT_SECONDS)
                await lease.ended.wait()
        finally:
            del self.leases[lease_id]

    async def check_health(self) -> None:
        """Raise an error if Ray should replace this replica.

        The supervisor restarts an engine that fails. Until then requests go to other replicas.
        """
        supervisor = self.front.engine_client.supervisor
        if self._supervision is None or self._supervision.done():
            raise RuntimeError("the supervisor of the engine process has ended")
        if not supervisor.ready and time.monotonic() - supervisor.phase_started > DOWN_SECONDS:
            raise RuntimeError(f"the engine has been {supervisor.phase} for {DOWN_SECONDS:g} s")

    def record_routing_stats(self) -> dict[str, int]:
        """Return the facts about this replica that Ray Serve sends to the request router."""
        loaded = self.front.engine_client.model_info()
        assert loaded is not None
        return {
            "kv_tokens": loaded.num_blocks * loaded.block_size,
            "generation": self.front.engine_client.supervisor.starts,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        heartbeat = self.front.engine_client.supervisor.heartbeat
        cached = heartbeat.blocks_cached + heartbeat.blocks_free
        total = max(heartbeat.blocks_used + cached, 1)
        return {"kv_use": heartbeat.blocks_used / total}

    async def metrics(self) -> tuple[str, bytes]:
        return self.name, self.front.metrics.render()

    async def stop(self) -> None:
        """End the processes of this replica. Ray Serve has waited for open requests before."""
        self.front.engine_client.draining = True
        self.front.engine_client.fail_all(api_errors.cut_off())
        if self._server is not None:
            self._server.close()
        await self.front.engine_client.supervisor.stop()
        await self.front.pool.close()
        if self._supervision is not None:
            self._supervision.cancel()
        if self.front.tracing is not None:
            await asyncio.to_thread(self.front.tracing.close)

    # ---- relayed requests ------------------------------------------------------------------------

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        lease: Lease | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                encoded_start = await read_message(
                    reader, HEAD_BYTES + self.config.limits.body_bytes
                )
            start = decode_start(encoded_start)
            if not hmac.compare_digest(start.secret, self.secret):
                raise ConnectionError("the secret is wrong")
            lease = self.leases.get(start.lease)
            if lease is not None:
                lease.connected.set()
            await self._serve_request(start, reader, writer)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            log.warning("a connection to the relay has ended: %s", error)
        finally:
            if lease is not None:
                lease.ended.set()
            writer.close()

    async def _serve_request(
        self, start: RelayStart, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request = RelayedRequest(start, writer)
        key = RelayedKey(start.identity)
        scope = self._scope(start, request, key)
        span = scope["octavo.caller"].span
        failure = ""
        # The endpoint sends nothing more, so the end of the stream means that it has disconnected.
        disconnected = asyncio.create_task(reader.read(1))
        disconnected.add_done_callback(lambda _: request.disconnect())
        try:
            await self.routes(scope, request.receive, request.send)
        except Exception as e:
            error = from_router(e) if isinstance(e, HTTPException) else api_error(e)
            failure = error.code or error.type
            if error is not e and error.status == 500:
                log.exception("request %s failed", start.request_id)
            self.front.metrics.rejections.labels(error.code or error.type).inc()
            request.write(relayed_error(error, key.sent))
        finally:
            request.on_disconnect(None)
            disconnected.cancel()
            if span is not None:
                span.end({}, error=failure)
        request.write(RelayEnd(key.used_tokens, key.sent))
        async with asyncio.timeout(self.config.limits.send_seconds):
            await writer.drain()

    def _scope(self, start: RelayStart, request: RelayedRequest, key: Key) -> dict[str, Any]:
        caller = Caller(start.request_id, request.arrival, key, start.timeout)
        if self.front.tracing is not None and start.method == "POST":
            # The endpoint has put its own span into the header traceparent.
            context = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in start.headers
            }
            attributes = {"octavo.replica": self.name, OPERATION: operation_of(start.path)}
            caller.span = self.front.tracing.begin("replica", context, request.arrival, attributes)
        return {
            "type": "http",
            "method": start.method,
            "path": start.path,
            "root_path": "",
            "headers": start.headers,
            "client": (start.client, 0),
            "app": self.routes,  # This makes the router raise errors instead of replying.
            "octavo.headers": dict(reversed(start.headers)),
            "octavo.caller": caller,
            "octavo.request": request,
        }
