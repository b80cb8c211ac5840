"""The server's front without a network and without an engine: bytes of a connection in, bytes of
the replies out.

Requests go through everything that the server has: the HTTP parser, the checks before every route,
the route, the parsing and the validation of the body. A request that is valid ends where it would
go to the engine, with the error code ACCEPTED.
"""

from __future__ import annotations

import asyncio
import http.client
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from uvicorn.server import ServerState

from octavo.serve.api.api_errors import ApiError
from octavo.serve.channel import jobs
from octavo.serve.channel.jobs import Setup
from octavo.serve.channel.messages import Loaded
from octavo.serve.endpoints.application import application
from octavo.serve.front.body_memory import BodyMemory
from octavo.serve.front.front import Front, worker_setup
from octavo.serve.http.connections import ConnectionTable
from octavo.serve.http.http_protocol import HttpProtocol, ServerContext
from octavo.serve.http.turn_queue import TurnQueue
from octavo.serve.serve_config import ServeConfig
from octavo.serve.workers import worker
from octavo.serve.workers.handlers import Context
from octavo.text.tokenizer import Tokenizer
from tests.http_replies import Reply, read_replies
from tests.tiny_tokenizer import VOCAB, write_tokenizer

ACCEPTED = "accepted_by_the_engine"
CONTEXT = 1024
SECONDS = 30.0  # for one request, on a machine that may be busy


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.changed = asyncio.Event()
        self.closed = False
        self.protocol: Any = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        self.changed.set()

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        addresses = {"peername": ("127.0.0.1", 50000), "sockname": ("127.0.0.1", 8000)}
        return addresses.get(name, default)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True
        self.changed.set()

    abort = close

    def write_eof(self) -> None:
        self.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_reading(self) -> bool:
        return True


@cache
def tokenizer_directory() -> str:
    folder = Path(tempfile.mkdtemp(prefix="octavo-fuzz-"))
    write_tokenizer(folder)
    return str(folder)


def loaded_model() -> Loaded:
    return Loaded(
        vocab_size=VOCAB,
        max_model_len=CONTEXT,
        max_num_seqs=64,
        max_batched_tokens=1024,
        block_size=16,
        num_blocks=512,
        prefix_caching=True,
        dtype="float32",
        device="cpu",
        architecture="LlamaForCausalLM",
        memory={},
        tokenizer_directory=tokenizer_directory(),
        tokenizer_gguf=None,
    )


class LocalPool:
    """Runs the jobs of the worker processes in this process, where a crash is seen."""

    def __init__(self, setup: Setup):
        self.context = Context.read(setup)

    async def run(self, job: Any, kind: Any, payload: bytes = b"", **_: Any) -> Any:
        reply = worker.run_job(self.context, jobs.encode(job), payload)
        if isinstance(reply, jobs.JobRefused):
            assert reply.code != "text_memory_exceeded", "the job ran out of memory"
            raise ApiError(reply.status, reply.message, reply.code, reply.param)
        assert isinstance(reply, jobs.JobDone), reply
        return msgspec.msgpack.decode(reply.value, type=kind)


def accept(*_: Any, **__: Any) -> None:
    raise ApiError(503, "the request is valid", ACCEPTED)


class FakeServer:
    def __init__(self, **config: Any) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.config = ServeConfig(served_model_name=("tiny",), request_templates=True, **config)
        self.front = Front(self.config)
        engine_client = self.front.engine_client
        engine_client.supervisor.phase = "ready"
        engine_client.supervisor.loaded = loaded_model()
        engine_client.tokenizer = Tokenizer.from_directory(tokenizer_directory())
        engine_client.open = accept  # type: ignore[method-assign]
        local = LocalPool(worker_setup(self.config, loaded_model()))
        self.front.pool.run = local.run  # type: ignore[method-assign]
        self.uvicorn = uvicorn.Config(
            application(self.front),
            ws_max_size=self.config.limits.body_bytes,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        self.uvicorn.load()

    def post(self, path: str, body: bytes) -> Reply:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        (reply,) = self.send([head.encode() + body], wait=True)
        return reply

    def send(self, parts: list[bytes], wait: bool = False) -> list[Reply]:
        """The replies on a connection on which these parts arrive. `wait`: there will be a
        reply."""
        return read_replies(self.write(parts, wait))

    def write(self, parts: list[bytes], wait: bool = False) -> bytes:
        """What the server writes to a connection on which these parts arrive."""
        return self.loop.run_until_complete(self._write(parts, wait))

    async def _write(self, parts: list[bytes], wait: bool) -> bytes:
        state = ServerState()
        table = ConnectionTable(self.config.limits)
        context = ServerContext(
            app=self.uvicorn.loaded_app,
            limits=self.config.limits,
            table=table,
            bodies=BodyMemory(self.config.limits),
            turns=TurnQueue(),
            uvicorn=self.uvicorn,
            state=state,
        )
        connection = table.admit("127.0.0.1")
        assert connection is not None
        protocol = HttpProtocol(context, connection)
        transport = Transport()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for part in parts:
            transport.get_protocol().data_received(part)
            for _ in range(3):
                await asyncio.sleep(0)
        if wait:
            async with asyncio.timeout(SECONDS):
                while not complete(transport.written):
                    transport.changed.clear()
                    await transport.changed.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        transport.closed = True
        transport.get_protocol().connection_lost(None)
        assert not table.connections, "a connection was not forgotten"
        if state.tasks:
            _, unfinished = await asyncio.wait(state.tasks, timeout=SECONDS)
            assert not unfinished, "a request goes on after its client left"
        return transport.written


def complete(data: bytes) -> bool:
    try:
        return bool(read_replies(data))
    except http.client.HTTPException:
        return False
