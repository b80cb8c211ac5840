"""What can be wrong before a request is understood: bytes, headers, JSON, hosts. Nothing of it ends
the server or costs a second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

import octavo
from octavo.serve.front.body_memory import BodyMemory
from octavo.serve.http.connections import ConnectionTable
from octavo.serve.http.http_protocol import HttpProtocol, ServerContext
from octavo.serve.http.turn_queue import TurnQueue
from octavo.serve.http.websocket_protocol import WebSocketProtocol
from octavo.serve.limits import Limits
from tests.serve.running import NAME, Running, alive, check_error, http_request, raw, server

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
JSON = {"content-type": "application/json"}

NOT_JSON = {
    "empty": b"",
    "words": b"hello",
    "truncated": b'{"messages": [',
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "a number": b"1",
    "not UTF-8": b'{"prompt": "\xff"}',
    "twice the same name": b'{"prompt": "a", "prompt": "b"}',
    "twice, deep inside": b'{"messages": [{"role": "user", "role": "user", "content": "hi"}]}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "an integer of 400 digits": b'{"prompt": "a", "seed": 1%b}' % (b"0" * 400),
    "an integer beyond 64 bits": b'{"prompt": "a", "seed": 18446744073709551616}',
    "100,000 brackets": b'{"prompt": ' + b"[" * 100_000,
    "half of a surrogate pair": b'{"prompt": "a", "stop": "\\ud800"}',
    "half of a pair, in names": b'{"\\udFFF": 1, "\\udFFF": 2}',
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_a_body_that_is_not_a_json_object(running: Running, body: bytes) -> None:
    begun = time.monotonic()
    check_error(
        running.http.post("/v1/completions", content=body, headers=JSON), 400, code="invalid_json"
    )
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize(
    "content",
    [None, "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"],
)
def test_another_content_type(running: Running, content: str | None) -> None:
    headers = {} if content is None else {"content-type": content}
    check_error(running.http.post(CHAT, content=json.dumps(GOOD).encode(), headers=headers), 415)


@pytest.mark.parametrize("content", [None, "application/x-www-form-urlencoded"])
def test_ollamas_routes_take_any_content_type(running: Running, content: str | None) -> None:
    """`curl -d` and litellm send JSON under these types. The Origin header keeps web pages out."""
    headers = {} if content is None else {"content-type": content}
    body = {"model": NAME, "prompt": "hi", "stream": False, "options": {"num_predict": 2}}
    data = json.dumps(body).encode()
    assert running.http.post("/api/generate", content=data, headers=headers).status_code == 200
    foreign = {**headers, "origin": "http://other.example"}
    assert running.http.post("/api/generate", content=data, headers=foreign).status_code == 403


def test_json_with_a_charset_is_json(running: Running) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    assert (
        running.http.post(CHAT, content=json.dumps(GOOD).encode(), headers=headers).status_code
        == 200
    )


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_compressed_body(running: Running, encoding: str) -> None:
    """A bomb would have to be unpacked to be found out: none is."""
    check_error(
        running.http.post(
            CHAT, content=b"\x1f\x8b" * 100, headers={**JSON, "content-encoding": encoding}
        ),
        415,
    )


def test_a_body_over_the_limit(running: Running) -> None:
    body = b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}'
    reply = running.http.post("/v1/completions", content=body, headers=JSON)
    check_error(reply, 413)
    assert reply.headers["connection"] == "close"


def test_a_chunked_body_over_the_limit(running: Running) -> None:
    def chunks():  # type: ignore[no-untyped-def]
        for _ in range(100):
            yield b"x" * 100_000

    check_error(running.http.post("/v1/completions", content=chunks(), headers=JSON), 413)


def test_a_body_that_only_claims_to_be_large_is_refused_without_it(running: Running) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    begun = time.monotonic()
    reply = raw(running.port, f"{head}Content-Length: 99999999999\r\n\r\n".encode())
    assert reply.startswith(b"HTTP/1.1 413") and time.monotonic() - begun < 1


def test_a_prompt_far_beyond_the_context_is_refused_unread(running: Running) -> None:
    begun = time.monotonic()
    reply = running.post("/v1/completions", {"prompt": "x " * 3_500_000})
    check_error(reply, 400, "prompt", "context_length_exceeded")
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize(
    "headers",
    [["X-Big: " + "a" * 70_000], [f"X-{k}: 1" for k in range(300)]],
    ids=["too long", "too many"],
)
def test_headers_over_the_limit(running: Running, headers: list[str]) -> None:
    reply = raw(running.port, http_request(CHAT, b"{}", *headers))
    assert (
        reply.startswith(b"HTTP/1.1 431")
        and b'"code":"headers_too_large"' in reply
        and b"x-request-id" in reply
    )


def test_headers_without_end_are_refused_before_they_end(running: Running) -> None:
    reply = raw(running.port, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 500_000)
    assert reply.startswith(b"HTTP/1.1 431")


def test_bytes_that_are_not_http(running: Running) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\x00" * 100):
        reply = raw(running.port, data + b"\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 400") and b'"code":"invalid_http"' in reply


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/v1",
        "/v1/engines",
        "/docs",
        "/static/../livez",
        "//livez",
    ],
)
def test_an_unknown_route(running: Running, path: str) -> None:
    reply = raw(running.port, http_request(path, b"", "Connection: close", method="GET"))
    assert (
        reply.startswith(b"HTTP/1.1 404")
        and b'"type":"not_found_error"' in reply
        and b"/openapi.json" in reply
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", CHAT), ("DELETE", "/v1/models"), ("PUT", "/generate"), ("POST", "/livez")],
)
def test_a_wrong_method(running: Running, method: str, path: str) -> None:
    reply = running.http.request(method, path)
    check_error(reply, 405, code="method_not_allowed")
    assert {"GET", "POST"} & set(reply.headers["allow"].split(", "))


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "127.0.0.1.evil.com",
        "localhost@evil.com",
        "",
        "evil.com:80",
        "[::ffff:8.8.8.8]",
        "[",
    ],
)
def test_another_host_name_on_the_loopback(running: Running, host: str) -> None:
    reply = raw(running.port, http_request(CHAT, b"{}", "Connection: close", host=host))
    assert reply.startswith(b"HTTP/1.1 421"), reply[:100]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1234",
        "127.0.0.1",
        "[::1]:80",
        "127.0.0.1:8000",
        "0.0.0.0:8000",
        "[::]:8000",
    ],
)
def test_names_of_the_loopback(running: Running, host: str) -> None:
    assert raw(
        running.port, http_request("/livez", b"", "Connection: close", method="GET", host=host)
    ).startswith(b"HTTP/1.1 200")


def test_a_web_page_of_another_origin_gets_no_permission(running: Running) -> None:
    reply = running.http.post(CHAT, json=GOOD, headers={"origin": "https://evil.com"})
    assert not [h for h in reply.headers if h.startswith("access-control")]
    preflight = running.http.options(
        CHAT, headers={"origin": "https://evil.com", "access-control-request-method": "POST"}
    )
    assert preflight.status_code == 405 and not [
        h for h in preflight.headers if h.startswith("access-control")
    ]


def test_a_clients_request_id_is_returned_beside_ours(running: Running) -> None:
    headers = running.get("/livez", headers={"x-request-id": "mine.1"}).headers
    assert headers["x-request-id"] == "mine.1"
    assert headers["x-octavo-request-id"].startswith("req_")
    for label in ("a b", "x" * 200, "a\tb", "<script>", ""):
        headers = running.get("/livez", headers={"x-request-id": label}).headers
        assert headers["x-request-id"] == headers["x-octavo-request-id"]
        assert headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("path", ["/v1/models/", "/livez/", "/v1/limits/", "/v1/models/tiny/"])
def test_a_slash_at_the_end_of_a_path_makes_no_difference(running: Running, path: str) -> None:
    assert running.get(path).json().keys() == running.get(path[:-1]).json().keys()
    assert running.get(path).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip, chunked", "gzip", "identity", "xchunked"])
def test_other_transfer_encodings_than_chunked_are_refused(running: Running, encoding: str) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = f"{head}Transfer-Encoding: {encoding}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode()
    reply = raw(running.port, data)
    assert reply.startswith(b"HTTP/1.1 400") and b"unsupported_transfer_encoding" in reply


def test_a_client_of_http_1_0_gets_no_chunks(running: Running) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 3, "stream": True}).encode()
    request = http_request("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    head, _, stream = raw(running.port, request).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and b"transfer-encoding" not in head.lower()
    assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")


def test_the_client_of_pipelined_requests_leaves(running: Running) -> None:
    """Both end: also the one that runs, not only the one that waits behind it."""
    long = json.dumps({"prompt": "hi", "max_tokens": 1000, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(http_request("/v1/completions", long) * 2)
        time.sleep(0.1)
    time.sleep(0.1)
    for _ in range(20):
        if running.metrics()["octavo:num_requests_open"] == 0:
            return
        time.sleep(0.02)
    raise AssertionError("a request stayed open")


def test_a_whole_surrogate_pair_is_a_character(running: Running) -> None:
    body = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
    assert running.http.post("/v1/completions", content=body, headers=JSON).status_code == 200


def test_a_thousand_pipelined_requests_are_answered_in_order(running: Running) -> None:
    requests = [
        http_request("/livez", b"", f"X-Request-Id: {k}", method="GET") for k in range(1000)
    ]
    requests[-1] = http_request(
        "/livez", b"", "X-Request-Id: 999", "Connection: close", method="GET"
    )
    reply = raw(running.port, b"".join(requests), 30)
    assert reply.count(b"HTTP/1.1 200 OK") == 1000
    ids = re.findall(rb"x-request-id: (\d+)\r\n", reply)
    assert ids == [str(k).encode() for k in range(1000)]


def test_pipelined_requests_do_not_delay_others(running: Running) -> None:
    with (
        alive(running),
        socket.create_connection(("127.0.0.1", running.port), timeout=5) as connection,
    ):
        connection.sendall(http_request("/livez", b"", method="GET") * 10_000)
        time.sleep(0.5)


def test_reading_stops_while_input_waits_for_its_turn_to_be_parsed() -> None:
    """libuv reads a socket up to 32 times in one turn of the event loop, 256 KB each, unless it is
    told to stop. Eight bodies of 8 MB would hold up everybody else for a second."""

    class Transport(asyncio.Transport):
        paused = 0

        def pause_reading(self) -> None:
            self.paused += 1

        def get_extra_info(self, name: str, default: object = None) -> object:
            return default

        def get_write_buffer_size(self) -> int:
            return 0

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing is parsed in this test")

    async def run(kind: type[HttpProtocol] | type[WebSocketProtocol]) -> int:
        limits = Limits()
        table = ConnectionTable(limits)
        context = ServerContext(
            app=application,
            limits=limits,
            table=table,
            turns=TurnQueue(),
            bodies=BodyMemory(limits),
            uvicorn=uvicorn.Config(application, log_config=None, lifespan="off"),
            state=ServerState(),
        )
        connection = table.admit("127.0.0.1")
        assert connection is not None
        protocol = kind(context, connection)
        transport = Transport()
        protocol.connection_made(transport)
        protocol.queued = True
        protocol.data_received(bytes(10))
        assert transport.paused == 0
        protocol.data_received(bytes(256_000))
        return transport.paused

    assert asyncio.run(run(HttpProtocol)) == 1
    assert asyncio.run(run(WebSocketProtocol)) == 1


DISTURBANCES = {
    "garbage": b"\x00\x01garbage\r\n\r\n",
    "half a request line": b"GET /livez HT",
    "half a head": b"GET /livez HTTP/1.1\r\nHost: loc",
    "headers without end": b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000,
    "many requests": b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100,
    "another protocol": b"GET /ws/generate HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
}


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with server(tmp_path_factory.mktemp("impatient"), limits={"header_seconds": 0.1}) as found:
        yield found


@pytest.mark.parametrize("data", DISTURBANCES.values(), ids=DISTURBANCES.keys())
def test_nothing_is_written_into_a_running_response(impatient: Running, data: bytes) -> None:
    """Whatever a client sends meanwhile, its turn comes when the response is complete."""
    fields = {"prompt": "hi", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=20) as connection:
        connection.sendall(http_request("/v1/completions", json.dumps(fields).encode()))
        found = connection.recv(65536)
        connection.sendall(data)
        while b"\r\n0\r\n\r\n" not in found:
            part = connection.recv(65536)
            assert part, found[-300:]
            found += part
    stream = found[: found.index(b"\r\n0\r\n\r\n")]
    assert stream.count(b"HTTP/1.1") == 1 and b"[DONE]" in stream


def test_headers_behind_a_body_have_an_end(running: Running) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = raw(running.port, head + b"2\r\n{}\r\n0\r\n" + b"x-b: ccccccccc\r\n" * 50_000, 3)
    assert b"HTTP/1.1 431" in reply


def test_an_empty_line_keeps_no_connection_open(tmp_path: Path) -> None:
    with (
        server(tmp_path, ready=False, limits={"header_seconds": 0.3}) as quick,
        socket.create_connection(("127.0.0.1", quick.port), timeout=3) as connection,
    ):
        connection.sendall(http_request("/livez", b"", method="GET"))
        found = b""
        while not found.endswith(b"}"):
            found += connection.recv(65536)
        connection.sendall(b"\r\n")
        assert connection.recv(65536) == b""


@pytest.mark.parametrize("path", ["/ws/generate", "/ws/watch"])
def test_a_websocket_is_not_waited_for_to_send_headers(tmp_path: Path, path: str) -> None:
    handshake = (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: octavo-watch\r\n\r\n"
    )
    with (
        server(tmp_path, ready=False, limits={"header_seconds": 0.3}) as quick,
        socket.create_connection(("127.0.0.1", quick.port), timeout=0.2) as connection,
    ):
        connection.sendall(handshake.encode())
        found, until = b"", time.monotonic() + 1.2
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                data = connection.recv(65536)
                assert data, "the connection was closed"
                found += data
    assert found.startswith(b"HTTP/1.1 101 ") and b" 408 " not in found


def test_slow_headers_and_slow_bodies_are_cut_off(tmp_path: Path) -> None:
    with server(tmp_path, limits={"header_seconds": 0.3, "body_seconds": 0.5}) as quick:
        for data, status in (
            (b"GET /livez HTTP/1.1\r\nHost: lo", b"408"),
            (
                http_request(CHAT, b'{"mess')[:-6].replace(b"Length: 6", b"Length: 60") + b'{"mess',
                b"408",
            ),
        ):
            begun = time.monotonic()
            reply = raw(quick.port, data)
            assert time.monotonic() - begun < 2 and reply.startswith(b"HTTP/1.1 " + status), reply
        begun = time.monotonic()
        assert raw(quick.port, b"") == b"", "nothing was asked, and so nothing is answered"
        assert time.monotonic() - begun < 2
        assert quick.get("/livez").status_code == 200


def test_no_part_of_the_package_unpickles_or_evaluates() -> None:
    root = Path(octavo.__file__).parent
    pattern = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|dill)|torch\.load\(|(?<![\w.])eval\(",
        re.MULTILINE,
    )
    found = [str(f.relative_to(root)) for f in root.rglob("*.py") if pattern.search(f.read_text())]
    assert found == []
