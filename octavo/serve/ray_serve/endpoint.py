"""The endpoint of all replicas: it accepts HTTP, checks API keys and limits, and relays requests.

The limits of a key hold for all replicas together, because this one process counts its requests and
tokens. A request that fails before its reply has begun is sent to another replica. A reply that has
begun ends with an error if its replica is lost.

This module must not import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from starlette.types import Receive, Scope, Send

from octavo.serve.api import api_errors
from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.error_formats import encode_stream_error
from octavo.serve.api.replies import KEEP_ALIVE
from octavo.serve.endpoints.application import METHODS, with_guard
from octavo.serve.front.body_memory import BodyReservation
from octavo.serve.front.front import Caller, Front
from octavo.serve.front.keys import Key
from octavo.serve.http import body
from octavo.serve.http.acceptor import raise_descriptor_limit
from octavo.serve.http.connections import ConnectionTable
from octavo.serve.http.exchange import Exchange
from octavo.serve.http.http_request import HttpRequest
from octavo.serve.ray_serve.metrics_merge import merge_metrics
from octavo.serve.ray_serve.prefix_index import block_hashes
from octavo.serve.ray_serve.relay import (
    Placement,
    RelayedIdentity,
    RelayEnd,
    RelayError,
    RelayHead,
    RelayPart,
    RelayStart,
    api_error_of,
    decode_reply,
    frame_message,
    no_replica,
    read_message,
    replica_lost,
)
from octavo.serve.ray_serve.routed_paths import (
    GENERATES,
    NOT_SERVED,
    PROBES,
    earlier_request,
    not_served,
)
from octavo.serve.serve_config import ServeConfig
from octavo.serve.server import OTHER_DESCRIPTORS, http_server, listen

log = logging.getLogger(__name__)
PROBE_SECONDS = 2.0  # A probe fails if no replica is free for this long.
PRIVATE_HEADERS = (b"authorization", b"x-api-key")  # An API key stays in this process.
STREAM_TYPES = (b"text/event-stream", b"application/x-ndjson")
# Errors of one replica that another replica may not have.
RETRIED = frozenset({"engine_starting", "engine_restarting", "draining", "queue_full"})
ATTEMPTS = 3  # The most replicas that a request is sent to.
# A request that runs when its replica or engine is lost may be the cause, so it is sent to one more
# replica only.
MAX_LOSSES = 2
REPLY_BYTES = 2**30  # The longest message of a replica.
SETTLE_SECONDS = 5.0  # A replica has this time to report the tokens of an aborted request.
REMEMBERED_REQUESTS = 65_536  # A client can cancel or continue one of these by its id.


class Replicas(Protocol):
    """The interface of the replicas for the endpoint."""

    async def place(self, hashes: list[bytes], failed: list[str], preferred: str) -> Placement:
        """Choose a replica and take a lease from it. Waits until there is one.

        `hashes` are the hashes of the prompt's blocks. Replicas that have `failed` are avoided. The
        replica `preferred` is taken if it exists and the name is not empty.
        """

    async def metrics(self) -> Mapping[str, bytes]:
        """Return the metrics of each replica, as text."""


class KnownRoute(NamedTuple):
    """The route of a request, as the log and the spans name it."""

    path: str


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Outgoing:
    """A request on its way to replicas."""

    start: RelayStart
    arrival: float
    hashes: list[bytes]
    request: HttpRequest
    send: Send
    reservation: BodyReservation
    seconds: float  # The request may wait this long for a replica.
    failed: list[str] = field(default_factory=list)
    earlier: str | None = None  # The id of the request that this one continues or cancels.
    started: bool = False  # The reply has begun.
    is_stream: bool = False
    events: int = 0  # The events of the stream that were sent.
    error: RelayError | None = None  # The error that the latest replica has sent.
    end: RelayEnd | None = None
    stream: Stream | None = None  # The connection to a replica that has not sent the end.


class Forwarder:
    """The ASGI application of the endpoint. The guard has checked the request before."""

    def __init__(self, front: Front, replicas: Replicas):
        self.front = front
        self.replicas = replicas
        self.draining = False
        self.open_requests = 0
        self._placements: OrderedDict[str, Placement] = OrderedDict()  # By the id of the request.
        self._settling: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ApiError(
                404, "this endpoint has no WebSockets: use /v1/chat/completions", "not_found"
            )
        if scope["path"] == "/livez":
            return await Exchange(self.front, scope, receive, send).reply({"state": "alive"})
        if self.draining:
            raise api_errors.draining()
        path = scope["path"].rstrip("/") or "/"
        if NOT_SERVED.fullmatch(path):
            raise not_served()
        if path in METHODS.get(scope["method"], ()):
            scope["route"] = KnownRoute(path)
        if scope["path"] == "/metrics":
            texts = {"endpoint": self.front.metrics.render(), **await self.replicas.metrics()}
            exchange = Exchange(self.front, scope, receive, send)
            return await exchange.send(
                merge_metrics(texts), "text/plain; version=0.0.4; charset=utf-8"
            )
        self.open_requests += 1
        try:
            await self._forward(scope, receive, send)
        finally:
            self.open_requests -= 1

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope["octavo.caller"]
        request: HttpRequest = scope["octavo.request"]
        path = scope["path"].rstrip("/") or "/"
        key = caller.key if path in GENERATES else None
        if key is not None:
            key.check()
        address = scope["client"][0] if scope.get("client") else ""
        with self.front.bodies.reserve(address) as reservation:
            request_body = b""
            if scope["method"] == "POST" and not path.endswith("/cancel"):
                limits = self.front.config.limits
                headers = scope["octavo.headers"]
                request_body = bytes(
                    await body.read(
                        headers, receive, request.take_complete_body(), limits, reservation
                    )
                )
            outgoing = Outgoing(
                start=self._start(scope, path, address, request_body),
                arrival=caller.arrival,
                hashes=block_hashes(request_body, caller.salt) if path in GENERATES else [],
                request=request,
                send=send,
                reservation=reservation,
                earlier=earlier_request(path, request_body),
                seconds=PROBE_SECONDS if path in PROBES else self.front.config.queue_timeout,
            )
            if key is not None:
                key.enter()
            task = asyncio.current_task()
            assert task is not None
            request.on_disconnect(lambda: cancel_task(task))
            try:
                await self._send_to_replicas(outgoing)
            finally:
                self._release(outgoing, key)

    def _start(self, scope: Scope, path: str, address: str, request_body: bytes) -> RelayStart:
        caller: Caller = scope["octavo.caller"]
        identity = RelayedIdentity()
        if caller.key is not None:
            identity = RelayedIdentity(
                caller.key.name, caller.key.priority, caller.key.admin, caller.key.salt
            )
        headers = [header for header in scope["headers"] if header[0] not in PRIVATE_HEADERS]
        if caller.span is not None:
            headers = [header for header in headers if header[0] != b"traceparent"]
            headers.append((b"traceparent", caller.span.traceresponse.encode()))
        return RelayStart(
            secret="",
            lease="",
            request_id=caller.id,
            elapsed=0.0,
            timeout=caller.timeout,
            identity=identity,
            client=address,
            method=scope["method"],
            path=path,
            headers=headers,
            body=request_body,
        )

    # ---- replicas --------------------------------------------------------------------------------

    async def _send_to_replicas(self, outgoing: Outgoing) -> None:
        """Send the request to one replica after another, until one replies."""
        losses = 0
        error = no_replica()
        for _ in range(ATTEMPTS):
            placement = await self._place(outgoing)
            outgoing.start.secret = placement.secret
            outgoing.start.lease = placement.lease
            outgoing.start.elapsed = time.monotonic() - outgoing.arrival
            try:
                await self._relay(outgoing, placement)
            except (OSError, EOFError):
                losses += 1
                error = replica_lost()
                log.warning("a replica was lost during request %s", outgoing.start.request_id)
                if outgoing.started:
                    return await end_reply(outgoing, error)
            else:
                if outgoing.error is None:
                    return
                error = api_error_of(outgoing.error)
                if error.code not in RETRIED:
                    raise error
                losses += outgoing.error.sent
            if losses >= MAX_LOSSES:
                raise error
            outgoing.failed.append(placement.replica)
        raise error

    async def _place(self, outgoing: Outgoing) -> Placement:
        """Choose a replica: the one of the earlier request, if this request has one."""
        preferred = ""
        earlier = self._placements.get(outgoing.earlier or "")
        if earlier is not None and earlier.replica not in outgoing.failed:
            if outgoing.start.path.endswith("/cancel"):
                # The router does not know a replica that drains, but it may have the request.
                return earlier._replace(lease="")
            preferred = earlier.replica
        try:
            async with asyncio.timeout(outgoing.seconds):
                placement = await self.replicas.place(outgoing.hashes, outgoing.failed, preferred)
        except TimeoutError:
            raise no_replica() from None
        if outgoing.start.path in GENERATES:
            self._placements[outgoing.start.request_id] = placement
            if len(self._placements) > REMEMBERED_REQUESTS:
                self._placements.popitem(last=False)
        return placement

    async def _relay(self, outgoing: Outgoing, placement: Placement) -> None:
        """Send the request to a replica and its reply to the client.

        Raises OSError or EOFError if the replica is lost.
        """
        outgoing.error = None
        outgoing.end = None
        outgoing.stream = await asyncio.open_connection(placement.host, placement.port)
        reader, writer = outgoing.stream
        try:
            writer.write(frame_message(outgoing.start))
            await writer.drain()
            while outgoing.end is None:
                await self._relay_message(outgoing, await read_message(reader, REPLY_BYTES))
        except (OSError, EOFError):
            outgoing.stream = None
            writer.close()
            raise
        outgoing.stream = None
        writer.close()

    async def _relay_message(self, outgoing: Outgoing, encoded: bytes) -> None:
        message = decode_reply(encoded)
        if isinstance(message, RelayHead):
            outgoing.started = True
            outgoing.start.body = b""
            outgoing.reservation.release()
            content_type = dict(message.headers).get(b"content-type", b"")
            outgoing.is_stream = content_type.startswith(STREAM_TYPES)
            if content_type.startswith(b"text/event-stream"):
                outgoing.request.keep_alive_comment = KEEP_ALIVE
            await outgoing.send(
                {
                    "type": "http.response.start",
                    "status": message.status,
                    "headers": message.headers,
                }
            )
        elif isinstance(message, RelayPart):
            outgoing.events += message.data.count(b"\n\n")
            await outgoing.send(
                {
                    "type": "http.response.body",
                    "body": message.data,
                    "more_body": not message.last,
                }
            )
        elif isinstance(message, RelayError):
            outgoing.error = message
        else:
            outgoing.end = message

    # ---- the end of a request --------------------------------------------------------------------

    def _release(self, outgoing: Outgoing, key: Key | None) -> None:
        """Count the tokens of a request. If the client has disconnected, abort it first."""
        if outgoing.stream is None:
            leave_key(key, outgoing.end)
            return
        task = asyncio.create_task(self._settle(outgoing.stream, key))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, stream: Stream, key: Key | None) -> None:
        """Abort a request, and wait until its replica has reported the tokens."""
        reader, writer = stream
        end: RelayEnd | None = None
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                writer.write_eof()
                while end is None:
                    message = decode_reply(await read_message(reader, REPLY_BYTES))
                    if isinstance(message, RelayEnd):
                        end = message
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.close()
            leave_key(key, end)


def cancel_task(task: asyncio.Task[None]) -> None:
    task.cancel()


def leave_key(key: Key | None, end: RelayEnd | None) -> None:
    """Count the tokens of a request. A request that reached no engine does not count."""
    if key is None:
        return
    key.leave(end.tokens if end is not None else 0)
    if end is not None and not end.sent and key.requests is not None:
        key.requests.take(-1)


async def end_reply(outgoing: Outgoing, error: ApiError) -> None:
    """End a reply that has begun with an error."""
    if not outgoing.is_stream:
        raise error
    start = outgoing.start
    event = encode_stream_error(error, start.path, start.request_id, outgoing.events)
    await outgoing.send({"type": "http.response.body", "body": event, "more_body": False})


class ClusterEndpoint:
    """Serves HTTP for all replicas."""

    def __init__(self, config: ServeConfig, replicas: Replicas):
        self.config = config
        self.socket = listen(config)
        self.port: int = self.socket.getsockname()[1]
        self.front = Front(config)
        self.forwarder = Forwarder(self.front, replicas)
        self.table = ConnectionTable(config.limits)
        self.http = http_server(
            config,
            with_guard(self.forwarder, self.front),
            self.socket,
            self.table,
            self.front.bodies,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        raise_descriptor_limit(2 * self.config.limits.connections + OTHER_DESCRIPTORS)
        self._tasks = [
            asyncio.create_task(self.http.serve()),
            asyncio.create_task(self.table.sweep_forever()),
        ]

    async def check_health(self) -> None:
        if any(task.done() for task in self._tasks):
            raise RuntimeError("the HTTP server of the endpoint has ended")

    async def listening_port(self) -> int:
        return self.port

    async def drain(self) -> None:
        """Accept no more requests, and wait for open requests until the drain timeout."""
        self.forwarder.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout):
                while self.forwarder.open_requests:
                    await asyncio.sleep(0.02)

    async def stop(self) -> None:
        await self.drain()
        serving, sweeping = self._tasks
        sweeping.cancel()
        self.http.should_exit = True
        await serving
        if self.front.tracing is not None:
            await asyncio.to_thread(self.front.tracing.close)
