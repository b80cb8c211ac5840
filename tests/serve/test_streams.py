"""Streams and WebSockets: clients that leave, that read slowly, that cancel; blocks always come
back."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests import tiny
from tests.serve.running import Running, check_error, events, http_request, raw, server

LONG = {"prompt": "hello there", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def settled(running: Running, seconds: float = 2.0) -> dict[str, float]:
    """The metrics once nothing is open any more."""
    begun = time.monotonic()
    while True:
        found = running.metrics()
        if (
            found["octavo:num_requests_open"]
            == found["octavo:kv_blocks_used"]
            == found["octavo:num_requests_running"]
            == 0
        ):
            return found
        assert time.monotonic() - begun < seconds, {
            k: v for k, v in found.items() if "num_" in k or "blocks" in k
        }
        time.sleep(0.01)


# ---- the format ----------------------------------------------------------------------------------


def test_the_stream_is_well_formed(running: Running) -> None:
    reply = running.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5},
    )
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(reply.text)
    assert {tuple(sorted(e)) for e in found} == {
        ("choices", "created", "id", "model", "object", "system_fingerprint")
    }
    assert [e["choices"][0]["finish_reason"] for e in found][:-1] == [None] * (len(found) - 1)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert found[0]["object"] == "chat.completion.chunk"


def test_what_is_wrong_before_the_stream_is_an_ordinary_error(running: Running) -> None:
    check_error(
        running.post("/v1/completions", {"prompt": [1] * 5000, "stream": True}), 400, "prompt"
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"allowed_token_ids": [65, 66], "stop_token_ids": [65, 66, 67]},
        {"allowed_token_ids": [tiny.EOS], "ignore_eos": False},
        {"allowed_token_ids": [65, tiny.EOS], "stop_token_ids": [65], "ignore_eos": False},
    ],
    ids=["by stop_token_ids", "by the end of text", "by both"],
)
def test_min_tokens_that_forbid_every_allowed_token_are_refused_before_the_stream(
    running: Running, asked: dict[str, Any]
) -> None:
    body = {"prompt": "hi", "max_tokens": 4, "min_tokens": 1, "stream": True, **asked}
    error = check_error(running.post("/v1/completions", body), 400, "min_tokens")
    assert "allow another token or set min_tokens to 0" in error["message"]
    reply = running.post("/v1/completions", {**body, "min_tokens": 0})
    assert reply.status_code == 200 and "[DONE]" in reply.text


def test_min_tokens_with_ignore_eos_may_allow_the_end_of_text(running: Running) -> None:
    body = {"prompt": "hi", "max_tokens": 4, "min_tokens": 2, "ignore_eos": True}
    reply = running.post("/v1/completions", {**body, "allowed_token_ids": [tiny.EOS]})
    assert reply.json()["usage"]["completion_tokens"] == 4


# ---- clients that leave --------------------------------------------------------------------------


async def leave(port: int, body: dict[str, Any], after: float, bytes_read: int | None) -> None:
    """Send a request and go, after a time or after so much of the reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = http_request("/v1/completions", json.dumps(body).encode())
    writer.write(data)
    try:
        if bytes_read is None:
            await asyncio.sleep(after)
        else:
            await asyncio.wait_for(reader.read(bytes_read), 5)
    finally:
        if random.random() < 0.5:
            writer.transport.abort()
        writer.close()


def test_200_clients_leave_at_random_and_every_block_comes_back(running: Running) -> None:
    """Before the first token, in the middle of a long prompt, while tokens come; streaming or not.
    One who stays gets the same tokens as alone."""
    alone = running.complete(**LONG)["choices"][0]["text"]
    before = settled(running)
    g = random.Random(0)

    async def crowd() -> str:
        async def visitor(k: int) -> None:
            await asyncio.sleep(g.random() * 2)
            body = {"prompt": [g.randrange(250) for _ in range(g.choice([3, 400]))], "max_tokens": g.choice([1, 500]),
                    "ignore_eos": True, "n": g.choice([1, 1, 3]), "stream": g.random() < 0.6}  # fmt: skip
            await leave(
                running.port,
                body,
                g.random() * 0.05,
                g.choice([None, None, 1, 3000]) if body["stream"] else None,
            )

        async with httpx.AsyncClient(timeout=60) as http:
            staying = asyncio.create_task(http.post(f"{running.url}/v1/completions", json=LONG))
            await asyncio.gather(*(visitor(k) for k in range(200)))
            return str((await staying).json()["choices"][0]["text"])

    assert asyncio.run(crowd()) == alone
    after = settled(running)
    for name in ("octavo:num_requests_waiting", "octavo:num_tokens_waiting", "octavo:open_streams"):
        assert after[name] == 0
    total = sum(after[f"octavo:kv_blocks_{kind}"] for kind in ("used", "cached", "free"))
    assert (
        total
        == sum(before[f"octavo:kv_blocks_{kind}"] for kind in ("used", "cached", "free"))
        == 512
    )


@pytest.mark.parametrize(("stream", "size"), [(False, 1), (True, 1), (False, 200_000)])
def test_a_disconnect_is_noticed_at_once(running: Running, stream: bool, size: int) -> None:
    """Whatever was asked: of a large body no more is read than is wanted, and who does not read
    sees nobody leave."""
    before = settled(running)["octavo:engine_steps_total"]
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(
            http_request(
                "/v1/completions",
                json.dumps({**LONG, "stream": stream, "user": "u" * size}).encode(),
            )
        )
        while (found := running.metrics())["octavo:kv_blocks_used"] == 0 and found[
            "octavo:engine_steps_total"
        ] < before + 800:
            time.sleep(0.005)
    left = time.monotonic()
    steps = settled(running)["octavo:engine_steps_total"] - before
    assert time.monotonic() - left < 0.25
    assert 0 < steps < 600, "it ran, and not to its end"


def test_a_disconnect_between_the_last_token_and_the_end(running: Running) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall(
                http_request(
                    "/v1/completions", b'{"prompt": "hi", "max_tokens": 2, "stream": true}'
                )
            )
            while b'finish_reason":"length' not in connection.recv(65536):
                pass
    settled(running)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_a_client_that_closes_its_own_direction_gets_its_reply(
    running: Running, stream: bool, version: bytes
) -> None:
    body = json.dumps({**LONG, "max_tokens": 400, "stream": stream}).encode()
    request = http_request("/v1/completions", body).replace(b"HTTP/1.1", version, 1)
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        reply = b""
        while part := connection.recv(65536):
            reply += part
    assert b"HTTP/1.1 200 OK" in reply
    assert b"[DONE]" in reply if stream else b'"completion_tokens":400' in reply


def test_a_client_that_leaves_after_it_closed_its_own_direction_is_noticed(
    running: Running,
) -> None:
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(http_request("/v1/completions", json.dumps(LONG).encode()))
        connection.shutdown(socket.SHUT_WR)
    settled(running, 0.5)


def test_cancelling_by_id(running: Running) -> None:
    with (
        httpx.Client(base_url=running.url) as http,
        http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream,
    ):
        id = stream.headers["x-octavo-request-id"]
        assert running.post(f"/v1/requests/{id}/cancel", None).json() == {
            "id": id,
            "cancelled": True,
        }
        found = events(stream.read().decode())
    assert found[-1]["error"]["code"] == "cancelled"
    assert running.post(f"/v1/requests/{id}/cancel", None).json() == {
        "id": id,
        "cancelled": False,
    }, "again: nothing to do"
    check_error(running.post("/v1/requests/req_unknown/cancel", None), 404)
    check_error(running.post("/v1/requests/a%20b/cancel", None), 400)
    settled(running)


# ---- quick limits --------------------------------------------------------------------------------


def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    """Its connection is cut, its blocks come back, and others never notice."""
    with server(tmp_path, limits={"send_seconds": 0.3}) as quick:
        body = json.dumps(
            {**LONG, "temperature": 1, "n": 16, "stream": True, "logprobs": 5}
        ).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", quick.port))
            connection.sendall(http_request("/v1/completions", body))
            begun = time.monotonic()
            while quick.metrics()["octavo:open_streams"] == 0:
                assert time.monotonic() - begun < 5, "it never began"
            while (found := quick.metrics())["octavo:open_streams"] > 0:
                assert time.monotonic() - begun < 30, "it is still written to"
                time.sleep(0.05)
            assert found["octavo:generation_tokens_total"] < 16 * 900, "it was ended, not finished"
            settled(quick)


# ---- WebSocket -----------------------------------------------------------------------------------


def ws(running: Running, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{running.port}/ws/generate", open_timeout=5, **options)


def read_all(socket: ClientConnection) -> tuple[str, dict[str, Any]]:
    text = ""
    while True:
        message = json.loads(socket.recv(timeout=10))
        if message.get("type") != "text":
            return text, message
        text += message["text"]


def test_a_websocket_streams_the_same_text(running: Running) -> None:
    same = {"prompt": "hello", "max_new_tokens": 20, "temperature": 0}
    want = running.post("/generate", same).json()["generated_text"]
    with ws(running) as socket:
        for _ in range(2):
            socket.send(json.dumps(same))
            text, end = read_all(socket)
            assert (
                text == want and end["type"] == "done" and end["usage"]["completion_tokens"] == 20
            )


def test_a_refused_websocket_is_no_error_of_ours(running: Running) -> None:
    with (
        pytest.raises(InvalidStatus),
        connect(f"ws://127.0.0.1:{running.port}/ws/nowhere", open_timeout=5),
    ):
        pass
    assert "handshake" not in running.log.read_text()


def test_a_websocket_survives_bad_requests(running: Running) -> None:
    with ws(running) as socket:
        for bad, code in (("hello", "invalid_json"), ("[]", "invalid_json"), ("{}", None), ('{"prompt": 5}', None),
                          ('{"prompt": "x", "max_new_tokens": -2}', "param_out_of_range")):  # fmt: skip
            socket.send(bad)
            error = json.loads(socket.recv(timeout=5))["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["code"] == code
        socket.send('{"prompt": "x", "max_new_tokens": 2}')
        assert read_all(socket)[1]["type"] == "done"


def test_a_websocket_generation_is_cancelled(running: Running) -> None:
    with ws(running) as socket:
        socket.send(json.dumps({"prompt": "x", "max_new_tokens": 900, "ignore_eos": True}))
        json.loads(socket.recv(timeout=5))
        socket.send('{"type": "cancel"}')
        assert read_all(socket)[1]["error"]["code"] == "cancelled"
        settled(running)
        socket.send('{"prompt": "x", "max_new_tokens": 2}')
        assert read_all(socket)[1]["type"] == "done"


def test_leaving_a_websocket_frees_the_blocks(running: Running) -> None:
    for how in ("politely", "abruptly", "abruptly"):
        with ws(running, close_timeout=0.2) as connection:
            connection.send(json.dumps({"prompt": "x", "max_new_tokens": 900, "ignore_eos": True}))
            connection.recv(timeout=5)
            if how == "abruptly":
                connection.socket.shutdown(socket.SHUT_RDWR)
        settled(running)


def test_a_websocket_message_over_the_limit(running: Running) -> None:
    with ws(running) as socket, pytest.raises(ConnectionClosed):
        socket.send("x" * (9 * 2**20))
        socket.recv(timeout=5)
    assert running.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.com", "null", "http://localhost.evil.com", "http://127.0.0.1:1"]
)
def test_a_websocket_from_another_origin(running: Running, origin: str) -> None:
    with pytest.raises(InvalidStatus) as caught:
        ws(running, origin=origin)
    assert caught.value.response.status_code == 403
    assert json.loads(caught.value.response.body or b"{}")["error"]["code"] == "wrong_origin"


def test_a_websocket_from_our_own_origin(running: Running) -> None:
    with ws(running, origin=f"http://127.0.0.1:{running.port}"):
        pass


def test_an_upgrade_where_there_is_no_websocket(running: Running) -> None:
    upgrade = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    reply = raw(running.port, http_request("/v1/models", b"", *upgrade, method="GET"), seconds=1)
    assert reply.startswith((b"HTTP/1.1 403", b"HTTP/1.1 404"))
