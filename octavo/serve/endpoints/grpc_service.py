"""The gRPC services octavo.v1.InferenceService, grpc.health.v1.Health and reflection.

They run in the event loop of the API server. Generation takes the same path as over HTTP. In the
gRPC protocol a unary call is a stream of one message in each direction, so every method here is a
stream handler on bytes. This lets the server check the key before it reads the message, limit the
time for reading, and reply with its own error to a message that it cannot parse.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
import msgspec
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.collect import Collector
from octavo.serve.api import validate
from octavo.serve.api.api_errors import ApiError, api_error, deadline_exceeded, invalid_field
from octavo.serve.api.grpc_request import parse_message, read_message
from octavo.serve.api.parse import INLINE_BYTES
from octavo.serve.api.protocol import BatchGenerateRequest, GenerateRequest
from octavo.serve.api.validate import Prepared
from octavo.serve.channel.jobs import ParseMessage
from octavo.serve.endpoints.completions import open_call
from octavo.serve.endpoints.routes import check_prompts, prepare_generate
from octavo.serve.front.front import Caller, Front
from octavo.serve.front.keys import network
from octavo.serve.front.tracing import ServerSpan
from octavo.serve.http.body import parse_in_worker
from octavo.serve.http.exchange import client_gone
from octavo.serve.limits import Limits
from octavo.serve.proto import octavo_pb2 as pb

log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
Context = Any  # The class is grpc.aio.ServicerContext, which has no type information.
Method = Callable[[Caller, Context], Awaitable[None]]

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,  # Reflection clients then try an older version.
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
GENERATING = ("Generate", "BatchGenerate", "GenerateStream")  # These methods have spans.
NOT_IN_METADATA = ("connection", "www-authenticate")
POLL_SECONDS = 0.05  # The interval of the checks whether the server is ready.
MIN_PING_MS = 500  # This is half of the documented interval, which allows for jitter.
IDLE_SECONDS = 300.0  # A connection without calls is closed after this time.
HEALTH_BYTES = 4096  # The limit is low because a HealthRequest needs no key.
HEALTH_WATCHERS = 256  # A watcher needs no key, and it holds one of the allowed calls.


def options(limits: Limits) -> list[tuple[str, int]]:
    return [
        # With SO_REUSEPORT, a second server on the port would silently get half of the clients.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.body_bytes),
        # Compression is off, because gRPC checks the size of a message before decompression.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_metadata_size", limits.header_bytes),
        ("grpc.absolute_max_metadata_size", limits.header_bytes),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", int(limits.header_seconds * 1000)),
        # The server's own pings find clients that vanished without closing the connection.
        ("grpc.keepalive_time_ms", int(limits.send_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(limits.send_seconds * 1000)),
        # Clients may ping every second, with or without calls. gRPC's default is five minutes.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_MS),
        # A client reconnects by itself when it makes its next call.
        ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
    ]


class RpcServer:
    def __init__(self, front: Front, address: str):
        """Listen on `address`, given as host:port. Raises RuntimeError if that is impossible."""
        self.front = front
        guard = CallGuard(front)
        self.service = Service(front, guard)
        self.health = Health(front, guard)
        limits = front.config.limits
        self._server = grpc.aio.server(
            interceptors=[GuardInterceptor(guard)],
            options=options(limits),
            maximum_concurrent_rpcs=limits.connections,
        )
        self._server.add_generic_rpc_handlers((self.service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, HEALTH, reflection.SERVICE_NAME), self._server
        )
        self.port: int = self._server.add_insecure_port(address)

    async def start(self) -> None:
        await self._server.start()
        self._readiness_task = asyncio.create_task(self.health.watch_readiness())

    async def stop(self, grace: float) -> None:
        """Report "not serving" to health watchers, then give open calls `grace` seconds to end."""
        self._readiness_task.cancel()
        self.health.close()
        await self._server.stop(grace)


# ---- before and after every method ---------------------------------------------------------------


class CallGuard:
    """Runs before and after every method.

    It checks the key and the limits, returns the id of the request, and turns errors into a status.
    """

    def __init__(self, front: Front):
        self.front = front
        self._open_calls: Counter[str] = Counter()  # The number of open calls of each address.

    @contextlib.contextmanager
    def count(self, context: Context) -> Iterator[None]:
        """Count a call while it is open. Raises if its address has too many open calls."""
        address = network(_address(context.peer()))
        limit = self.front.config.limits.connections_per_address
        if self._open_calls[address] >= limit:
            raise ApiError(
                429,
                f"an address may have {limit} open calls at a time: wait until one has ended",
                "too_many_connections",
                retry_after=1.0,
            )
        self._open_calls[address] += 1
        try:
            yield
        finally:
            self._open_calls[address] -= 1
            if not self._open_calls[address]:
                del self._open_calls[address]

    def wrap(
        self, name: str, method: Method, needs_key: bool = True
    ) -> Callable[[Any, Context], Awaitable[None]]:
        async def run(_: Any, context: Context) -> None:
            caller = Caller()
            code = "OK"
            caller.span = self._begin_span(name, caller, context)
            context.set_trailing_metadata(call_metadata(caller))
            try:
                with self.count(context):
                    self._check(caller, context, needs_key)
                    await method(caller, context)
            except asyncio.CancelledError:
                code = "CANCELLED"  # The client has cancelled the call, or the deadline passed.
                raise
            except Exception as e:
                error = api_error(e).forget()
                if error.status == 500 and not isinstance(e, ApiError):
                    log.exception("request %s failed", caller.id)
                if error.code != "client_gone":
                    self.front.engine_client.refuse(caller.id, error)
                code = STATUS_CODES[error.status].name
                metadata = (*call_metadata(caller), *error_metadata(error))
                await context.abort(STATUS_CODES[error.status], error.message, metadata)
            finally:
                if caller.span is not None:
                    status = grpc.StatusCode[code].value[0]
                    caller.span.end({"rpc.grpc.status_code": status}, "" if code == "OK" else code)
                log.info(
                    "%s gRPC %s %s %.1f ms%s",
                    caller.id,
                    name,
                    code,
                    (time.monotonic() - caller.arrival) * 1000,
                    caller.log_fields,
                )

        return run

    def _begin_span(self, name: str, caller: Caller, context: Context) -> ServerSpan | None:
        tracing = self.front.tracing
        if tracing is None or name not in GENERATING:
            return None
        metadata = {
            key: value
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        }
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": SERVICE,
            "rpc.method": name,
            "gen_ai.request.id": caller.id,
        }
        return tracing.begin(f"{SERVICE}/{name}", metadata, caller.arrival, attributes)

    def _check(self, caller: Caller, context: Context, needs_key: bool) -> None:
        if needs_key:
            caller.key = self.front.keys.check(_authorization(context), _address(context.peer()))
        remaining = context.time_remaining()
        if remaining is not None:
            if remaining <= 0:
                raise deadline_exceeded(0)
            caller.timeout = min(remaining, self.front.config.limits.timeout_seconds)


def call_metadata(caller: Caller) -> list[tuple[str, str]]:
    """Return the id of the call and, if tracing is on, its trace context."""
    metadata = [("x-request-id", caller.id)]
    if caller.span is not None:
        metadata.append(("traceresponse", caller.span.traceresponse))
    return metadata


def error_metadata(error: ApiError) -> list[tuple[str, str | bytes]]:
    metadata: list[tuple[str, str | bytes]] = [
        (name, value) for name, value in error.headers.items() if name not in NOT_IN_METADATA
    ]
    if "retry-after-ms" in error.headers:
        # The automatic retries of gRPC clients read this field.
        metadata.append(("grpc-retry-pushback-ms", error.headers["retry-after-ms"]))
    return [*metadata, ("octavo-error-bin", error.encode())]


def _authorization(context: Context) -> str | None:
    return next(
        (value for name, value in context.invocation_metadata() or () if name == "authorization"),
        None,
    )


def _address(peer: str) -> str:
    """Return the address without the port.

    `peer` is percent-encoded, such as ipv4:127.0.0.1:123 or ipv6:%5B::1%5D:123.
    """
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Applies the guard to reflection and to unknown methods.

    The methods of the service apply the guard themselves. The health check is open to everyone.
    """

    def __init__(self, guard: CallGuard):
        self.guard = guard

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is not None and details.method.startswith((f"/{SERVICE}/", f"/{HEALTH}/")):
            return handler
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(
                self.guard.wrap("-", refuse_unknown_method)
            )

        async def relay(requests: AsyncIterator[Any], context: Context) -> None:
            async def method(caller: Caller, context: Context) -> None:
                async for reply in handler.stream_stream(requests, context):
                    await context.write(reply)

            await self.guard.wrap(details.method, method)(requests, context)

        return grpc.stream_stream_rpc_method_handler(
            relay, handler.request_deserializer, handler.response_serializer
        )


async def refuse_unknown_method(caller: Caller, context: Context) -> None:
    raise ApiError(
        501,
        "this server has no such method: reflection lists its methods",
        "unknown_method",
        type="not_found_error",
    )


# ---- the service ---------------------------------------------------------------------------------


class Service:
    def __init__(self, front: Front, guard: CallGuard):
        self.front = front
        self.guard = guard

    def handlers(self) -> Any:
        methods = {
            "Generate": self.generate,
            "BatchGenerate": self.batch_generate,
            "GenerateStream": self.generate_stream,
            "Health": self.health,
        }
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(
                self.guard.wrap(name, method, needs_key=name != "Health")
            )
            for name, method in methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def generate(self, caller: Caller, context: Context) -> None:
        prepared = await self._prepare_single(caller, context)
        (reply,) = await self._generate_all(caller, prepared)
        await self._send_reply(caller, context, prepared, reply)

    async def batch_generate(self, caller: Caller, context: Context) -> None:
        body, headers = await self._read(caller, context, BatchGenerateRequest)
        prompts = check_prompts(self.front, body.prompts)
        prepared = await prepare_generate(self.front, caller, body, prompts, headers)
        replies = await self._generate_all(caller, prepared)
        await self._send_reply(
            caller, context, prepared, pb.BatchGenerateResponse(responses=replies)
        )

    async def generate_stream(self, caller: Caller, context: Context) -> None:
        prepared = await self._prepare_single(caller, context, stream=True)
        with (
            open_call(self.front, caller, prepared, stream=True) as call,
            self.front.metrics.streams.track_inprogress(),
        ):
            # A client can cancel the request over HTTP with this id.
            await context.send_initial_metadata((("x-request-id", caller.id),))
            context.set_trailing_metadata((*call_metadata(caller), *prepared.headers.items()))
            count = 0
            async for pieces in call:
                for prompt_index, piece in pieces:
                    count += len(piece.token_ids)
                    reply = pb.GenerateStreamResponse(
                        text=piece.text, tokens_generated=count, latency_ms=elapsed(caller)
                    )
                    if piece.finish_reason is not None:
                        reply.finish_reason = piece.finish_reason
                        reply.prompt_tokens, reply.cached_tokens = prompt_counts(
                            call.collectors[prompt_index]
                        )
                    await self._write(context, reply)

    async def health(self, caller: Caller, context: Context) -> None:
        message = await self._receive(context)
        if len(message) > HEALTH_BYTES:
            raise invalid_field(None, f"a HealthRequest can have at most {HEALTH_BYTES} bytes")
        parse_message(message, pb.HealthRequest)
        state: dict[str, Any] = self.front.engine_client.state()
        fields = {name: state[name] for name in ("state", "phase", "elapsed_s")}
        await self._write(
            context, pb.HealthResponse(ready=self.front.engine_client.ready, **fields)
        )

    # ---- parts of the methods --------------------------------------------------------------------

    async def _prepare_single(
        self, caller: Caller, context: Context, stream: bool = False
    ) -> Prepared:
        body, headers = await self._read(caller, context, GenerateRequest)
        prompts = [body.prompt or ""]
        return await prepare_generate(self.front, caller, body, prompts, headers, stream)

    async def _generate_all(self, caller: Caller, prepared: Prepared) -> list[pb.GenerateResponse]:
        def response_of(collector: Collector) -> pb.GenerateResponse:
            (completion,) = collector.best
            prompt_tokens, cached_tokens = prompt_counts(collector)
            return pb.GenerateResponse(
                generated_text=completion.text,
                tokens_generated=len(completion.token_ids),
                latency_ms=elapsed(caller),
                finish_reason=completion.finish_reason,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
            )

        with open_call(self.front, caller, prepared, stream=False) as call:
            await call.wait_finished()
            return [response_of(collector) for collector in call.collectors]

    async def _send_reply(
        self, caller: Caller, context: Context, prepared: Prepared, reply: Message
    ) -> None:
        context.set_trailing_metadata((*call_metadata(caller), *prepared.headers.items()))
        await self._write(context, reply)

    async def _read(
        self, caller: Caller, context: Context, kind: type[T]
    ) -> tuple[T, dict[str, str]]:
        """Return the message of the call as a `kind`, and headers about its unknown fields."""
        front = self.front
        front.check_may_send(caller)
        message = await self._receive(context)
        limits = front.config.limits
        with front.bodies.reserve(_address(context.peer())) as reservation:
            refusal = reservation.resize(len(message))
            if refusal is not None:
                raise refusal
            if len(message) <= INLINE_BYTES:
                body, unknown_fields = read_message(message, kind, limits)
            else:
                job = ParseMessage(kind.__name__)
                body, unknown_fields = await parse_in_worker(front.pool, job, message, kind)
        return body, validate.check_fields(front, unknown_fields)

    async def _receive(self, context: Context) -> bytes:
        seconds = self.front.config.limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                message: Any = await context.read()
        except TimeoutError:
            raise ApiError(
                408, f"the message did not arrive within {seconds:g} s", "body_timeout"
            ) from None
        if message is grpc.aio.EOF:
            raise invalid_field(None, "the call has no message: send one message")
        return bytes(message)

    async def _write(self, context: Context, reply: Message) -> None:
        """Write a message. Raises if the client does not read it within `send_seconds`."""
        try:
            async with asyncio.timeout(self.front.config.limits.send_seconds):
                await context.write(reply.SerializeToString())
        except TimeoutError:
            raise client_gone() from None


def prompt_counts(collector: Collector) -> tuple[int, int]:
    """Return the number of tokens in the prompt, and how many of them were cached."""
    return len(collector.request.prompt), collector.cached


def elapsed(caller: Caller) -> float:
    """Return the milliseconds since the request arrived."""
    return (time.monotonic() - caller.arrival) * 1000


# ---- health --------------------------------------------------------------------------------------


class Health(health_pb2_grpc.HealthServicer):
    """Implements the standard health check, which needs no key, like the HTTP probes.

    The implementation in grpc_health is not used: it stops updating the other watchers when one
    watcher disconnects.
    """

    def __init__(self, front: Front, guard: CallGuard):
        self.front = front
        self.guard = guard
        self._watchers = 0
        self._reported_ready = front.engine_client.ready
        self._closed = False
        self._changed = asyncio.Event()

    def status(self, service: str) -> Any:
        if service not in ("", SERVICE):
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        ready = self.front.engine_client.ready and not self._closed
        return (
            health_pb2.HealthCheckResponse.SERVING
            if ready
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )

    async def Check(self, request: Any, context: Context) -> Any:
        status = self.status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Context) -> None:
        if self._watchers >= HEALTH_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{HEALTH_WATCHERS} clients already watch the health: use Check instead of Watch",
            )
        self._watchers += 1
        try:
            with self.guard.count(context):
                await self._watch(request, context)
        except ApiError as error:
            await context.abort(STATUS_CODES[error.status], error.message)
        finally:
            self._watchers -= 1

    async def _watch(self, request: Any, context: Context) -> None:
        reported = None
        while True:
            changed = self._changed
            status = self.status(request.service)
            if status != reported:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                reported = status
            if self._closed:
                return
            await changed.wait()

    async def watch_readiness(self) -> None:
        while True:
            if self._reported_ready != self.front.engine_client.ready:
                self._reported_ready = self.front.engine_client.ready
                self._wake()
            await asyncio.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Report "not serving" to all watchers, and end their calls."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
