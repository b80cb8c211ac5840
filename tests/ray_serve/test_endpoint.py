"""The endpoint and its replicas without Ray: retries, errors, keys, back-pressure.

Most replicas here are stubs that speak the relay's messages. The last test uses a real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx2 as httpx

from octavo.engine_options import EngineOptions
from octavo.serve.api.api_errors import draining, engine_lost, invalid_field, queue_full
from octavo.serve.endpoints.application import POST
from octavo.serve.ray_serve.endpoint import ClusterEndpoint
from octavo.serve.ray_serve.relay import (
    Placement,
    RelayEnd,
    RelayHead,
    RelayPart,
    RelayStart,
    decode_start,
    frame_message,
    read_message,
    relayed_error,
)
from octavo.serve.ray_serve.replica import Replica
from octavo.serve.ray_serve.routed_paths import GENERATES
from octavo.serve.serve_config import ServeConfig
from tests import tiny

EVENTS = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json"), (b"content-length", b"2")]
KEYS = """
[[keys]]
name = "alice"
key = "alice-0123456789abcdef"
requests_per_minute = 2
[[keys]]
name = "bob"
key = "bob-0123456789abcdef"
tokens_per_minute = 50
max_concurrency = 1
"""

Script = Callable[["Stub"], Awaitable[None]]


class Stub:
    """A replica whose replies are scripted. It records the requests that it gets."""

    def __init__(self, name: str, script: Script):
        self.name = name
        self.script = script
        self.starts: list[RelayStart] = []
        self.disconnected = asyncio.Event()
        self.written = 0

    async def open(self) -> None:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.starts.append(decode_start(await read_message(reader, 2**24)))
        with contextlib.suppress(OSError):
            await self.script(self)
        writer.close()

    async def send(self, *messages: Any) -> None:
        for message in messages:
            data = frame_message(message)
            self.writer.write(data)
            await self.writer.drain()
            self.written += len(data)


async def reply(stub: Stub) -> None:
    await stub.send(RelayHead(200, JSON), RelayPart(b"{}", True), RelayEnd(30, True))


def fails(error: Any, sent: bool) -> Script:
    async def script(stub: Stub) -> None:
        await stub.send(relayed_error(error, sent), RelayEnd(0, sent))

    return script


async def dies(stub: Stub) -> None:
    stub.writer.transport.abort()


async def dies_in_its_stream(stub: Stub) -> None:
    await stub.send(RelayHead(200, EVENTS), RelayPart(b"data: one\n\n", False))
    stub.writer.transport.abort()


class FakeReplicas:
    """Places a request on the first replica that has not failed it."""

    def __init__(self, stubs: list[Any]):
        self.stubs = stubs
        self.asked: list[tuple[list[bytes], list[str]]] = []

    async def place(self, hashes: list[bytes], failed: list[str], wanted: str) -> Placement:
        self.asked.append((hashes, list(failed)))
        for stub in sorted(self.stubs, key=lambda stub: stub.name != wanted):
            if stub.name not in failed:
                secret = getattr(stub, "secret", "")
                return Placement(stub.name, "127.0.0.1", stub.port, secret, "")
        await asyncio.sleep(3600)
        raise AssertionError

    async def metrics(self) -> Mapping[str, bytes]:
        text = b"# HELP x_total A.\n# TYPE x_total counter\nx_total 1.0\n"
        return {stub.name: text for stub in self.stubs}


class Served:
    def __init__(
        self, endpoint: ClusterEndpoint, replicas: FakeReplicas, client: httpx.AsyncClient
    ):
        self.endpoint = endpoint
        self.replicas = replicas
        self.client = client

    async def post(
        self, key: str = "", path: str = "/v1/completions", **fields: Any
    ) -> httpx.Response:
        headers = {"x-api-key": f"{key}-0123456789abcdef"} if key else {}
        body = {"prompt": "hello", **fields}
        return await self.client.post(path, json=body, headers=headers)


@contextlib.asynccontextmanager
async def served(*stubs: Stub, **config: Any) -> AsyncIterator[Served]:
    for stub in stubs:
        await stub.open()
    replicas = FakeReplicas(list(stubs))
    endpoint = ClusterEndpoint(ServeConfig(port=0, drain_timeout=1, **config), replicas)
    await endpoint.start()
    address = f"http://127.0.0.1:{endpoint.port}"
    async with httpx.AsyncClient(base_url=address, timeout=20) as client:
        yield Served(endpoint, replicas, client)
    await endpoint.stop()


def run(test: Awaitable[None], seconds: float = 60) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, seconds)

    asyncio.run(bounded())


@pytest.mark.parametrize(
    "failure",
    [
        dies,
        fails(engine_lost(), sent=True),
        fails(draining(), sent=False),
        fails(queue_full("9 requests", 1.0), sent=False),
    ],
)
def test_a_request_that_has_no_reply_yet_is_sent_to_another_replica(failure: Script) -> None:
    async def test() -> None:
        async with served(Stub("a", failure), Stub("b", reply)) as found:
            assert (await found.post()).status_code == 200
            assert [failed for _, failed in found.replicas.asked] == [[], ["a"]]

    run(test())


def test_a_request_that_may_be_the_cause_is_sent_to_two_replicas_only() -> None:
    async def test() -> None:
        stubs = [Stub(name, dies) for name in "abc"]
        async with served(*stubs) as found:
            answer = await found.post()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "replica_lost"
            assert answer.headers["retry-after"] == "1"
            assert [len(stub.starts) for stub in stubs] == [1, 1, 0]

    run(test())


def test_an_error_of_the_client_is_not_retried() -> None:
    async def test() -> None:
        error = invalid_field("prompt", "the prompt is wrong", "wrong_prompt")
        async with served(Stub("a", fails(error, False)), Stub("b", reply)) as found:
            answer = await found.post()
            assert answer.status_code == 400
            assert answer.json()["error"] == error.body["error"]

    run(test())


def test_a_stream_whose_replica_dies_ends_with_an_error_event() -> None:
    async def test() -> None:
        async with served(Stub("a", dies_in_its_stream), Stub("b", reply)) as found:
            answer = await found.post(stream=True)
            first, error, last = answer.text.strip().split("\n\n")
            assert (first, last) == ("data: one", "data: [DONE]")
            code = json.loads(error.removeprefix("data: "))["error"]["code"]
            assert code == "replica_lost"
            assert len(found.replicas.asked) == 1

    run(test())


@pytest.mark.parametrize(
    ("path", "content_type", "end"),
    [
        ("/v1/messages", b"text/event-stream", b'event: error\ndata: {"type":"error","error":{'),
        ("/v1/responses", b"text/event-stream", b'event: error\ndata: {"type":"error","sequence_'),
        ("/api/chat", b"application/x-ndjson", b'{"error":"the replica that computed this reply'),
    ],
)
def test_the_error_event_has_the_format_of_the_api(
    path: str, content_type: bytes, end: bytes
) -> None:
    async def dies_later(stub: Stub) -> None:
        await stub.send(RelayHead(200, [(b"content-type", content_type)]))
        await stub.send(RelayPart(b"data: one\n\n", False))
        stub.writer.transport.abort()

    async def test() -> None:
        async with served(Stub("a", dies_later)) as found:
            answer = await found.post(path=path, stream=True)
            assert answer.content.removeprefix(b"data: one\n\n").startswith(end)

    run(test())


def test_without_a_replica_a_probe_fails_and_the_endpoint_lives() -> None:
    async def test() -> None:
        async with served() as found:
            assert (await found.client.get("/livez")).status_code == 200
            answer = await found.client.get("/readyz")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")

    run(test())


def test_the_metrics_of_all_replicas_have_a_label() -> None:
    async def test() -> None:
        async with served(Stub("a", reply), Stub("b", reply)) as found:
            lines = (await found.client.get("/metrics")).text.splitlines()
            assert [line for line in lines if line.startswith("x_total")] == [
                'x_total{replica="a"} 1.0',
                'x_total{replica="b"} 1.0',
            ]

    run(test())


def test_the_limits_of_a_key_hold_for_all_replicas_together(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)

    async def test() -> None:
        stub = Stub("a", reply)
        async with served(stub, keys_file=str(keys)) as found:
            assert (await found.post()).status_code == 401
            codes = [(await found.post("alice")).status_code for _ in range(3)]
            assert codes == [200, 200, 429]
            codes = [(await found.post("bob")).status_code for _ in range(3)]
            assert codes == [200, 200, 429]  # Each reply has 30 tokens.
            identity = stub.starts[-1].identity
            assert (identity.name, bool(identity.salt)) == ("bob", True)
            assert not {b"authorization", b"x-api-key"} & dict(stub.starts[-1].headers).keys()

    run(test())


@pytest.mark.parametrize("path", sorted(GENERATES))
def test_the_limits_of_a_key_hold_for_every_route_that_generates(path: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)

    async def test() -> None:
        async with served(Stub("a", reply), keys_file=str(keys)) as found:
            codes = [(await found.post("alice", path)).status_code for _ in range(3)]
            assert codes == [200, 200, 429]

    run(test())


def test_the_endpoint_knows_every_route_that_generates() -> None:
    found = {
        path for path, handler in POST.items() if "generates=True" in inspect.getsource(handler)
    }
    # These call handlers that generate.
    assert found | {"/invocations", "/api/embed", "/api/embeddings"} == GENERATES


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/batches/b", "/sleep", "/flush_cache", "/live/settings"]
)
def test_a_route_of_one_server_is_refused(path: str) -> None:
    async def test() -> None:
        async with served(Stub("a", reply)) as found:
            answer = await found.post(path=path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert "--ray" in answer.json()["error"]["message"]
            assert found.replicas.asked == []

    run(test())


def test_a_request_goes_to_the_replica_that_stores_the_earlier_response() -> None:
    async def test() -> None:
        stubs = [Stub("a", reply), Stub("b", reply)]
        async with served(*stubs) as found:
            found.replicas.stubs = [stubs[1]]
            created = await found.post(path="/v1/responses", input="a")
            found.replicas.stubs = stubs
            id = created.headers["x-octavo-request-id"].replace("req_", "resp_")
            await found.post(path="/v1/responses", input="a", previous_response_id=id)
            await found.client.get(f"/v1/responses/{id}")
            await found.client.post(f"/v1/responses/{id}/cancel")
            assert [len(stub.starts) for stub in stubs] == [0, 4]
            await found.post(path="/v1/responses", input="a", previous_response_id="resp_other")
            assert [len(stub.starts) for stub in stubs] == [1, 4]

    run(test())


def test_a_refused_request_does_not_count(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)

    async def test() -> None:
        stub = Stub("a", fails(invalid_field("prompt", "the prompt is wrong"), sent=False))
        async with served(stub, keys_file=str(keys)) as found:
            codes = [(await found.post("alice")).status_code for _ in range(4)]
            assert codes == [400] * 4

    run(test())


def test_a_client_that_disconnects_ends_the_request_and_pays_for_its_tokens(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)

    async def endless(stub: Stub) -> None:
        await stub.send(RelayHead(200, EVENTS), RelayPart(b"data: one\n\n", False))
        assert await stub.reader.read(1) == b""
        stub.disconnected.set()
        await stub.send(RelayEnd(60, True))

    async def test() -> None:
        stub = Stub("a", endless)
        async with served(stub, keys_file=str(keys)) as found:
            headers = {"authorization": "Bearer bob-0123456789abcdef"}
            request = {"json": {"prompt": "a", "stream": True}, "headers": headers}
            async with found.client.stream("POST", "/v1/completions", **request) as answer:
                assert (await anext(answer.aiter_bytes())).startswith(b"data: one")
            await stub.disconnected.wait()
            key = found.endpoint.front.keys.keys[1]
            while key.open_requests:
                await asyncio.sleep(0.01)
            stub.script = reply
            assert (await found.post("bob")).status_code == 429

    run(test())


def test_a_client_that_does_not_read_stops_the_replica() -> None:
    async def floods(stub: Stub) -> None:
        await stub.send(RelayHead(200, EVENTS))
        while stub.written < 2**28:
            await stub.send(RelayPart(b"x" * 2**16, False))

    async def test() -> None:
        stub = Stub("a", floods)
        async with served(stub) as found:
            request = {"json": {"prompt": "a", "stream": True}}
            async with found.client.stream("POST", "/v1/completions", **request):
                written = -1
                while written != stub.written:
                    written = stub.written
                    await asyncio.sleep(0.5)
                assert 0 < stub.written < 2**26

    run(test())


def test_a_wrong_secret_is_refused() -> None:
    async def test() -> None:
        replica = Replica(ServeConfig(), "127.0.0.1", "a")
        server = await asyncio.start_server(replica._serve_connection, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        stub = Stub("a", reply)
        async with served(stub) as found:
            await found.post()
        writer.write(frame_message(stub.starts[0]))
        assert await reader.read() == b""
        writer.close()
        server.close()

    run(test())


def test_a_real_replica_replies_streams_and_cancels() -> None:
    async def test() -> None:
        engine = EngineOptions(max_model_len=1024, num_gpu_blocks_override=512)
        config = ServeConfig(model=tiny.model_dir(), engine=engine, served_model_name=("tiny",))
        replica = Replica(config, "127.0.0.1", "a")
        await replica.start()
        async with served(model=config.model, served_model_name=("tiny",)) as found:
            found.replicas.stubs = [replica]
            await replies_as_one_server(found)
            await cancels_by_id(found, replica)
            assert replica.record_routing_stats() == {"kv_tokens": 8192, "generation": 1}
            assert replica.record_autoscaling_stats()["kv_use"] < 0.5
            await replica.check_health()
        await replica.stop()

    run(test(), seconds=300)  # The first start on a machine compiles the CPU kernels.


def test_a_replica_can_be_stopped_while_its_engine_starts() -> None:
    async def test() -> None:
        replica = Replica(ServeConfig(model=tiny.model_dir()), "127.0.0.1", "a")
        start = asyncio.create_task(replica.start())
        supervisor = replica.front.engine_client.supervisor
        while supervisor.process is None:
            await asyncio.sleep(0.01)
        await replica.stop()
        start.cancel()
        assert supervisor.process is None or supervisor.process.returncode is not None

    run(test(), seconds=60)


async def replies_as_one_server(found: Served) -> None:
    answer = await found.post(max_tokens=4, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.headers["x-request-id"].startswith("req_")
    answer = await found.post(max_tokens=4, ignore_eos=True, stream=True)
    assert answer.text.count("data: ") == 5 and answer.text.endswith("data: [DONE]\n\n")
    answer = await found.post(temperature=-1)
    assert answer.json()["error"]["param"] == "temperature"
    answer = await found.client.get("/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert (await found.client.get("/v1/models")).json()["data"][0]["id"] == "tiny"


async def cancels_by_id(found: Served, replica: Replica) -> None:
    fields = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with found.client.stream("POST", "/v1/completions", json=fields) as answer:
        chunks = answer.aiter_bytes()
        await anext(chunks)
        request_id = answer.headers["x-octavo-request-id"]
        cancelled = await found.client.post(f"/v1/requests/{request_id}/cancel")
        assert cancelled.json() == {"id": request_id, "cancelled": True}
        rest = b"".join([chunk async for chunk in chunks])
        assert b'"code":"cancelled"' in rest
    while replica.front.engine_client.calls:
        await asyncio.sleep(0.01)
