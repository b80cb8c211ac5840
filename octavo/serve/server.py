"""Runs the front: opens the port, starts the engine, serves, drains, ends. The only place that handles signals.

first SIGTERM or SIGINT   no longer ready; open requests have `drain_timeout` seconds to end; then the rest is cut off
second                    the rest is cut off now
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from octavo.errors import OctavoError
from octavo.serve import errors
from octavo.serve.config import ServeConfig
from octavo.serve.front import Front
from octavo.serve.guard import is_loopback
from octavo.serve.health import HealthServer
from octavo.serve.http import application
from octavo.serve.lag import Seen, watch_loop
from octavo.serve.wire import BoundedSocket, bounded, drop_unread

if TYPE_CHECKING:
    from octavo.serve.rpc import RpcServer

log = logging.getLogger(__name__)
LAST_WORDS = 5.0  # seconds that connections have to take in how their requests ended


class ServeError(OctavoError):
    """The server cannot start as it was asked to."""


class Quiet(uvicorn.Server):
    """Signals are handled here, not there."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(config: ServeConfig) -> socket.socket:
    """The open port. Before anything else, so that whatever is wrong with it is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        found = socket.socket(family, kind, protocol)
    except (socket.gaierror, UnicodeError, OverflowError):
        raise ServeError(
            f"{config.host!r} is not an address of this machine: try 127.0.0.1"
        ) from None
    if not (is_loopback(str(address[0])) or config.keys_file or config.allow_unauthenticated):
        found.close()
        raise ServeError(
            f"{config.host} can be reached from other machines, and no API keys are set: give --api-keys FILE, or say that "
            "anybody may use the server with --allow-unauthenticated"
        )
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(2048)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {config.port} is in use already: stop what uses it, or give another --port"
            ) from None
        raise ServeError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror}"
        ) from None
    found.setblocking(False)
    return found


def listen_rpc(front: Front, host: str, port: int) -> RpcServer:
    """On the same address as HTTP, which has been judged. gRPC opens its ports itself."""
    # the engine is a new program, not a fork that goes on with our calls
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    try:
        from octavo.serve.rpc import RpcServer
    except ImportError as error:
        raise ServeError(
            f"gRPC needs more packages ({error.name} is missing): pip install 'octavo[serve]'"
        ) from None
    try:
        return RpcServer(front, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError:
        raise ServeError(
            f"cannot listen on port {port} for gRPC: stop what uses it, or give another --grpc-port"
        ) from None


def listen_health(address: tuple[str, int], port: int, seen: Seen) -> HealthServer:
    """On the same address as HTTP."""
    try:
        return HealthServer((address[0], port), seen)
    except OSError as error:
        raise ServeError(
            f"cannot listen on port {port} for /livez ({error.strerror}): give another --health-port"
        ) from None


class Server:
    def __init__(self, config: ServeConfig, say: Callable[[Front, int], None] | None = None):
        """`say` is called once the model is loaded, with the port."""
        self.socket = listen(config)
        self.port = self.socket.getsockname()[1]
        self.config = config
        self.say = say
        self.front = Front(config)
        self.rpc: RpcServer | None = None
        self.seen = Seen()
        self.health: HealthServer | None = None
        if config.health_port is not None:
            self.health = listen_health(self.socket.getsockname(), config.health_port, self.seen)
        self._stop: asyncio.Event = asyncio.Event()
        self._cut: asyncio.Event = asyncio.Event()

    def run(self) -> None:
        """Until a signal. Raises what kept it from starting."""
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve())

    def _signal(self) -> None:
        if self._stop.is_set():
            self._cut.set()
        self._stop.set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        limits = self.config.limits
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)
        http = Quiet(
            uvicorn.Config(
                application(self.front),
                http=bounded(limits),
                ws=BoundedSocket,
                ws_max_size=limits.body_bytes,
                # a millisecond a frame of the live page, for each who watches
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(LAST_WORDS),
                backlog=2048,
            )
        )
        client = self.front.client
        if self.health is not None:
            self.health.begin()
        if self.config.grpc_port is not None:
            self.rpc = listen_rpc(self.front, self.socket.getsockname()[0], self.config.grpc_port)
            await self.rpc.start()
        serving = asyncio.create_task(http.serve([self.socket]))
        engine = asyncio.create_task(client.supervisor.run())
        lag = asyncio.create_task(watch_loop(self.front.metrics, self.seen))
        unread = asyncio.create_task(
            drop_unread(http.server_state.connections, limits.send_seconds)
        )
        told = asyncio.create_task(self._tell())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
            if engine.done() and engine.exception() is not None:
                http.force_exit = True
                raise engine.exception()  # type: ignore[misc]
            await self._drain()
        finally:
            for task in (lag, unread, told, stop):
                task.cancel()
            http.should_exit = True
            if self.rpc is not None:
                await self.rpc.stop(LAST_WORDS)
            await client.supervisor.stop()
            await asyncio.gather(serving, engine, return_exceptions=True)
            await self.front.pool.close()
            if self.health is not None:
                await asyncio.to_thread(self.health.shutdown)
                self.health.server_close()

    async def _tell(self) -> None:
        while not self.front.client.ready:
            await asyncio.sleep(0.05)
        if self.say is not None:
            self.say(self.front, self.port)

    async def _drain(self) -> None:
        """Readiness goes first; who is here may finish."""
        client = self.front.client
        client.draining = True
        if client.calls:
            waits = f"finishing {len(client.calls)} open requests, for at most {self.config.drain_timeout:g} s"
            log.warning("shutting down: %s; another Ctrl-C or SIGTERM ends them now", waits)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout):
                while client.calls and not self._cut.is_set():
                    await asyncio.sleep(0.02)
        client.fail_all(errors.cut_off())
        for _ in range(50):  # let the streams say so
            if not client.calls:
                return
            await asyncio.sleep(0.02)


def run(config: ServeConfig, say: Callable[[Front, int], None] | None = None) -> None:
    Server(config, say).run()
    sys.stdout.flush()
