"""Bodies of requests: bounded in memory, in total and by address, and refused before they are read
where that can be."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.serve.front.body_memory import BodyMemory
from octavo.serve.limits import Limits
from tests.serve.running import Running, alive, http_request, raw, server
from tests.serve.test_streams import settled

MIB = 2**20


KIB = 2**10


def test_bytes_count_until_the_body_is_parsed() -> None:
    memory = BodyMemory(Limits(body_memory=1000 * KIB, body_memory_per_address=600 * KIB))
    with memory.reserve("10.0.0.1") as first, memory.reserve("10.0.0.2") as second:
        assert first.resize(500 * KIB) is None
        assert first.resize(600 * KIB) is None
        error = first.resize(600 * KIB + 1)
        assert error is not None and (error.status, error.code) == (503, "body_memory_exceeded")
        with memory.reserve("10.0.0.1") as third:
            assert third.resize(64 * KIB) is None, "a small body does not count"
            assert "this address" in str(third.resize(65 * KIB))
        assert "all clients" in str(second.resize(401 * KIB))
        assert second.resize(400 * KIB) is None
        assert memory.total == 1000 * KIB
    assert memory.total == 0 and not memory.by_address


def test_an_ipv6_network_counts_as_one_address() -> None:
    memory = BodyMemory(Limits(body_memory_per_address=600 * KIB))
    with memory.reserve("2001:db8::1") as first, memory.reserve("2001:db8::2") as second:
        assert first.resize(600 * KIB) is None
        assert second.resize(100 * KIB) is not None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("bodies")
    with server(folder, limits={"body_memory_per_address": 32 * MIB}) as found:
        yield found


def resident(running: Running) -> int:
    pages = Path(f"/proc/{running.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def test_unfinished_bodies_take_bounded_memory_and_give_it_back(running: Running) -> None:
    running.complete()
    before = resident(running)
    size = 8 * MIB - 10
    head = http_request("/v1/completions", b" ").replace(b"Length: 1\r", b"Length: %d\r" % size)
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            client = socket.create_connection(("127.0.0.1", running.port), timeout=10)
            stack.enter_context(client)
            client.sendall(head[:-1] + b" " * (size - 1))
        time.sleep(0.5)
        held = resident(running) - before
        assert 16 * MIB < held < 64 * MIB, held
        assert running.complete()["usage"]["completion_tokens"] == 4, "a small body is taken"
    deadline = time.monotonic() + 5
    while resident(running) - before > 8 * MIB and time.monotonic() < deadline:
        time.sleep(0.1)
    assert resident(running) - before <= 8 * MIB
    settled(running)


LARGE = {
    "token ids": b'{"prompt":[' + b"1," * (4 * MIB - 200) + b"1]}",
    "lists": b'{"prompt":[' + b"[1]," * (2 * MIB - 200) + b"[1]]}",
    "objects": b'{"prompt":"a","max_tokens":1,"x":[' + b"{}," * (2 * MIB) + b"{}]}",
    "names": b'{"prompt":"a",' + b",".join(b'"f%d":1' % i for i in range(500_000)) + b"}",
    "messages": json.dumps({"messages": [{"role": "user", "content": "x"}] * 4096}).encode(),
    "text": b'{"prompt":"' + b"a" * (8 * MIB - 200) + b'"}',
    "tokens": b'{"tokens":[' + b"1," * 500_000 + b"1]}",
    "strings": json.dumps({"prompt": "ab " * 100_000, "return_token_strs": True}).encode(),
}
PATHS = {"messages": "/v1/chat/completions", "tokens": "/detokenize", "strings": "/tokenize"}


def test_the_event_loop_goes_on_while_large_bodies_are_parsed(running: Running) -> None:
    before = resident(running)
    found: dict[str, int] = {}
    with alive(running):
        for name, data in LARGE.items():
            headers = {"content-type": "application/json"}
            reply = running.http.post(
                PATHS.get(name, "/v1/completions"), content=data, headers=headers
            )
            found[name] = reply.status_code
    expected = dict.fromkeys(LARGE, 400) | dict.fromkeys(("objects", "tokens", "strings"), 200)
    assert found == expected
    assert resident(running) - before < 32 * MIB
    settled(running)


def test_without_an_engine_no_body_is_waited_for(tmp_path: Path) -> None:
    with server(tmp_path, ready=False) as starting:
        head = http_request("/v1/completions", b" ").replace(b"Length: 1\r", b"Length: 999\r")
        begun = time.monotonic()
        reply = raw(starting.port, head, seconds=1)
        assert reply.startswith(b"HTTP/1.1 503 ") and time.monotonic() - begun < 5
