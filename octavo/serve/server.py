"""Runs the front process: it opens the port, starts the engine process, serves, drains and ends.

Only this module handles signals. After a first SIGTERM or SIGINT, the server is no longer ready,
and open requests have `drain_timeout` seconds to end before they are aborted. After a second
signal, open requests are aborted at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import logging
import os
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from octavo.errors import OctavoError
from octavo.option_declaration import flag_of
from octavo.serve.api import api_errors
from octavo.serve.endpoints.application import RouteTable, application
from octavo.serve.endpoints.batch_runner import BatchRunner
from octavo.serve.endpoints.guard import is_loopback
from octavo.serve.front.body_memory import BodyMemory
from octavo.serve.front.front import Front
from octavo.serve.front.loop_watchdog import LoopWatchdog
from octavo.serve.http.acceptor import Acceptor, raise_descriptor_limit
from octavo.serve.http.connections import ConnectionTable
from octavo.serve.http.health import HealthServer
from octavo.serve.http.http_protocol import HttpProtocol, ServerContext
from octavo.serve.http.turn_queue import TurnQueue
from octavo.serve.process import return_free_memory, return_large_blocks
from octavo.serve.serve_config import ServeConfig

if TYPE_CHECKING:
    from octavo.serve.endpoints.grpc_service import RpcServer

log = logging.getLogger(__name__)
LOOPBACK = ("127.0.0.1", "::1")  # Proxies at these addresses are always trusted.
CLOSE_SECONDS = 5.0  # Clients have this time to read the end of their replies.
OTHER_DESCRIPTORS = 256  # The number of open files that are not connections of clients.


class ServeError(OctavoError):
    """The server cannot start with this configuration."""


class HttpServer(uvicorn.Server):
    """A uvicorn server with Octavo's acceptor, and without uvicorn's signal handlers."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        table: ConnectionTable,
        bodies: BodyMemory,
        tls: ssl.SSLContext | None,
    ):
        super().__init__(config)
        self.listener = listener
        self.tls = tls
        self.table = table
        self.bodies = bodies

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = ServerContext(
            app=self.config.loaded_app,
            limits=self.table.limits,
            table=self.table,
            bodies=self.bodies,
            turns=TurnQueue(),
            uvicorn=self.config,
            state=self.server_state,
        )
        acceptor = Acceptor(
            listener=self.listener,
            table=self.table,
            make_protocol=lambda connection: HttpProtocol(context, connection),
            tls=self.tls,
        )
        acceptor.start()
        self.servers = [acceptor]  # type: ignore[list-item]
        self.started = True


def http_server(
    config: ServeConfig,
    app: ASGIApp,
    listener: socket.socket,
    table: ConnectionTable,
    bodies: BodyMemory,
) -> HttpServer:
    """Return a server for an application. The caller has opened the port."""
    uvicorn_config = uvicorn.Config(
        app,
        ws_max_size=config.limits.body_bytes,
        # Compression would cost a millisecond per frame and client of the live page.
        ws_per_message_deflate=False,
        lifespan="off",
        forwarded_allow_ips=[*LOOPBACK, *config.trusted_proxies],
        log_config=None,
        # At info, uvicorn logs query strings; at debug, websockets logs headers and messages.
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(CLOSE_SECONDS),
    )
    return HttpServer(uvicorn_config, listener, table, bodies, tls_context(config))


def listen_unix(file: str) -> socket.socket:
    """Open a Unix domain socket. A socket that an earlier server left behind is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(os.stat(file).st_mode):
            os.unlink(file)
    except FileNotFoundError:
        pass
    try:
        listener.bind(file)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ServeError(f"cannot listen on the socket {file}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Return the TLS settings of the server, or None without a certificate."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
            if getattr(config, name):
                flag = flag_of(ServeConfig, name)
                raise ServeError(f"{flag} needs the certificate too: add --ssl-certfile FILE")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ServeError(
            f"cannot use the certificate {config.ssl_certfile} with the key "
            f"{config.ssl_keyfile or 'in the same file'}: {error.strerror or error}"
        ) from None
    check_client_certificates(context, config)
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError as error:
            raise ServeError(f"cannot use --ssl-ciphers {config.ssl_ciphers}: {error}") from None
    return context


def check_client_certificates(context: ssl.SSLContext, config: ServeConfig) -> None:
    """Set whether clients need a certificate, and which authorities may sign it."""
    if config.ssl_ca_certs is None:
        if config.ssl_cert_reqs:
            raise ServeError("--ssl-cert-reqs needs authorities: add --ssl-ca-certs FILE")
        return
    try:
        context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ServeError(f"cannot use --ssl-ca-certs {config.ssl_ca_certs}: {error}") from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)


def listen(config: ServeConfig) -> socket.socket:
    """Open the port. The server does this first, so that an error is reported at once."""
    if config.uds is not None:
        return listen_unix(config.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (socket.gaierror, UnicodeError, OverflowError):
        raise ServeError(
            f"{config.host!r} is not an address of this machine: try 127.0.0.1"
        ) from None
    if not (is_loopback(str(address[0])) or config.needs_key or config.allow_unauthenticated):
        listener.close()
        raise ServeError(
            f"{config.host} can be reached from other machines, and no API keys are set: use "
            "--api-key KEY or --api-keys FILE, or let everyone use the server with "
            "--allow-unauthenticated"
        )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {config.port} is in use already: stop the program that uses it, or use "
                "another --port"
            ) from None
        raise ServeError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror}"
        ) from None
    listener.setblocking(False)
    return listener


def listen_rpc(front: Front, host: str, port: int) -> RpcServer:
    """Listen for gRPC on the same host as HTTP, which was checked before."""
    # Child processes are new programs, not forks that would continue the open calls.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    try:
        from octavo.serve.endpoints.grpc_service import RpcServer
    except ImportError as error:
        raise ServeError(
            f"gRPC needs more packages ({error.name} is missing): pip install 'octavo[serve]'"
        ) from None
    try:
        return RpcServer(front, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError:
        raise ServeError(
            f"cannot listen on port {port} for gRPC: stop the program that uses it, or use another "
            "--grpc-port"
        ) from None


def listen_health(host: str, port: int, watchdog: LoopWatchdog) -> HealthServer:
    """Listen for health checks on the same host as HTTP."""
    try:
        return HealthServer((host, port), watchdog)
    except OSError as error:
        raise ServeError(
            f"cannot listen on port {port} for /livez ({error.strerror}): use another --health-port"
        ) from None


def check_kv_events(config: ServeConfig) -> None:
    """Raise ServeError if KV events cannot be published."""
    if config.kv_events_config is None or not config.kv_events_config.enabled:
        return
    if importlib.util.find_spec("zmq") is None:
        raise ServeError("--kv-events-config needs pyzmq: pip install 'octavo[kv-events]'")
    if not config.engine.reuses_prefixes:
        raise ServeError(
            "--kv-events-config publishes the contents of the prefix cache: leave out "
            "--no-prefix-caching, --no-kv-cache and --kv-allocation"
        )


class Server:
    def __init__(
        self,
        config: ServeConfig,
        on_ready: Callable[[Front, int], None] | None = None,
        on_phase: Callable[[str, float | None], None] | None = None,
    ):
        """Create the server.

        `on_ready` is called with the front and the port after the model is loaded. Before that,
        `on_phase` is called with the phase of the start and the fraction of it that is done.
        """
        check_kv_events(config)
        tls_context(config)  # A certificate that cannot be used is reported at once.
        self.socket = listen(config)
        self.port = 0 if config.uds is not None else self.socket.getsockname()[1]
        self.config = config
        self.on_ready = on_ready
        self.on_phase = on_phase
        self.front = Front(config)
        self.rpc: RpcServer | None = None
        self.table = ConnectionTable(config.limits)
        self.watchdog = LoopWatchdog(lambda: len(self.table))
        self.health: HealthServer | None = None
        if config.health_port is not None:
            self.health = listen_health(self._host, config.health_port, self.watchdog)
        self._stop_signal: asyncio.Event = asyncio.Event()
        self._abort_signal: asyncio.Event = asyncio.Event()

    def run(self) -> None:
        """Serve until a signal arrives. Raises an error if the server cannot start."""
        import uvloop

        return_large_blocks()
        return_free_memory()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve())

    @property
    def _host(self) -> str:
        """The address of the gRPC port and the health port."""
        host: str = self.config.host
        return host if self.config.uds is not None else str(self.socket.getsockname()[0])

    def _on_signal(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\n")  # The terminal shows ^C without a line break.
        if self._stop_signal.is_set():
            self._abort_signal.set()
        self._stop_signal.set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        servers = 1 if self.config.grpc_port is None else 2
        raise_descriptor_limit(servers * self.config.limits.connections + OTHER_DESCRIPTORS)
        http = http_server(
            self.config, application(self.front), self.socket, self.table, self.front.bodies
        )
        engine_client = self.front.engine_client
        if self.health is not None:
            self.health.begin()
        if self.config.grpc_port is not None:
            self.rpc = listen_rpc(self.front, self._host, self.config.grpc_port)
            await self.rpc.start()
        serving = asyncio.create_task(http.serve())
        engine = asyncio.create_task(engine_client.supervisor.run())
        stop = asyncio.create_task(self._stop_signal.wait())
        batch_runner = BatchRunner(self.front, RouteTable(self.front))
        self.front.batch_runner = batch_runner
        helpers = [
            asyncio.create_task(batch_runner.run()),
            asyncio.create_task(self.watchdog.run(self.front.metrics)),
            asyncio.create_task(self.table.sweep_forever()),
            asyncio.create_task(self._report_ready()),
        ]
        try:
            await asyncio.wait({serving, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
            if engine.done() and engine.exception() is not None:
                http.force_exit = True
                raise engine.exception()  # type: ignore[misc]
            await self._drain()
        finally:
            for task in (stop, *helpers):
                task.cancel()
            http.should_exit = True
            if self.rpc is not None:
                await self.rpc.stop(CLOSE_SECONDS)
            await engine_client.supervisor.stop()
            await asyncio.gather(serving, engine, return_exceptions=True)
            await asyncio.gather(*helpers, return_exceptions=True)
            self.front.files.close()
            await self.front.pool.close()
            if self.front.tracing is not None:
                await asyncio.to_thread(self.front.tracing.close)
            if self.health is not None:
                await asyncio.to_thread(self.health.shutdown)
                self.health.server_close()

    async def _report_ready(self) -> None:
        supervisor = self.front.engine_client.supervisor
        while not self.front.engine_client.ready:
            if self.on_phase is not None:
                self.on_phase(supervisor.phase, supervisor.fraction)
            await asyncio.sleep(0.05)
        if self.on_ready is not None:
            self.on_ready(self.front, self.port)

    async def _drain(self) -> None:
        """Accept no more requests, and wait for open requests until the drain timeout."""
        engine_client = self.front.engine_client
        engine_client.draining = True
        if engine_client.calls:
            log.warning(
                "shutting down: open requests (%d) may finish within %g s; another Ctrl-C or "
                "SIGTERM ends them now",
                len(engine_client.calls),
                self.config.drain_timeout,
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout):
                while engine_client.calls and not self._abort_signal.is_set():
                    await asyncio.sleep(0.02)
        engine_client.fail_all(api_errors.cut_off())
        for _ in range(50):  # The streams need time to send the error.
            if not engine_client.calls:
                return
            await asyncio.sleep(0.02)


def run(
    config: ServeConfig,
    on_ready: Callable[[Front, int], None] | None = None,
    on_phase: Callable[[str, float | None], None] | None = None,
) -> None:
    logging.getLogger().setLevel(config.log_level.upper())
    Server(config, on_ready, on_phase).run()
    sys.stdout.flush()
