"""Bodies that are large: to parse, to check, or to hold while they arrive."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import cache

from tests.attacks import replies
from tests.attacks.clients import JSON, connect, head, read_all
from tests.attacks.target import ALICE, CHAT, COMPLETIONS, HELLO, Target, bearer

SIZE = 8 * 2**20 - 300  # just below the limit
MESSAGE = b'{"role":"user","content":"x"}'
START = b'{"max_tokens":1,"prompt":"a",'


def array(item: bytes, most: int = SIZE) -> bytes:
    """A JSON array of this item, of the largest size or with so many items."""
    count = min(most, SIZE // (len(item) + 1))
    return b"[" + b",".join([item] * count) + b"]"


@cache
def names() -> bytes:
    """The inside of an object that has very many names."""
    return b",".join(b'"f%d":1' % i for i in range(600_000))


def field(name: bytes, value: bytes) -> bytes:
    return START + b'"' + name + b'":' + value + b"}"


# Route and body of each; bodies are made when they are needed.
LARGE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "token ids": (COMPLETIONS, lambda: b'{"max_tokens":1,"prompt":' + array(b"1") + b"}"),
    "many names": (COMPLETIONS, lambda: START + names() + b"}"),
    "lists of ids": (COMPLETIONS, lambda: b'{"max_tokens":1,"prompt":' + array(b"[1]") + b"}"),
    "an unknown field": (COMPLETIONS, lambda: field(b"x", array(b"1"))),
    "objects": (COMPLETIONS, lambda: field(b"x", array(b"{}"))),
    "messages": (CHAT, lambda: b'{"max_tokens":1,"messages":' + array(MESSAGE, 4096) + b"}"),
    "metadata": (COMPLETIONS, lambda: field(b"metadata", b"{" + names() + b"}")),
    "detokenize": ("/detokenize", lambda: b'{"tokens":' + array(b"1") + b"}"),
    "tokenize": (
        "/tokenize",
        lambda: b'{"return_token_strs":true,"prompt":"' + b"ab " * 700_000 + b'"}',
    ),
    "stop ids": (COMPLETIONS, lambda: field(b"stop_token_ids", array(b"1"))),
    "choices": (COMPLETIONS, lambda: field(b"guided_choice", array(b'"a"'))),
    "one text": (COMPLETIONS, lambda: b'{"max_tokens":1,"prompt":"' + b"a" * SIZE + b'"}'),
    "surrogates": (
        COMPLETIONS,
        lambda: b'{"max_tokens":1,"prompt":"' + b"\\ud83d\\ude00" * (SIZE // 12) + b'"}',
    ),
}


def send(target: Target, chosen: list[str], at_once: int = 1) -> None:
    """Each is answered, or refused with a proper error; 503 only says that too much is on its way
    at once."""
    for name in chosen:
        path, make = LARGE[name]
        body = make()
        failed: list[str] = []

        def one(path: str = path, body: bytes = body, failed: list[str] = failed) -> None:
            try:
                replies.check(target.post(path, body), {*range(400, 500), 503})
            except Exception as error:
                failed.append(repr(error))

        threads = [threading.Thread(target=one) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, (name, failed)


def unfinished(target: Target, count: int, seconds: float) -> None:
    """Connections that send all but the last byte of a body and wait. A good request is served
    meanwhile."""
    body = b" " * SIZE
    start = head("POST", COMPLETIONS, JSON, f"Content-Length: {SIZE}", bearer(ALICE)) + b"\r\n"
    with contextlib.ExitStack() as stack:
        connections = []
        end = time.monotonic() + seconds
        for _ in range(count):
            connection = stack.enter_context(connect(target.port))
            connections.append(connection)
            connection.settimeout(1)
            with contextlib.suppress(OSError):  # the server need not take it
                connection.sendall(start)
                connection.sendall(body[:-1])
        reply = target.post(CHAT, {"messages": HELLO, "max_tokens": 1}, ALICE)
        assert reply.status_code == 200, reply.text
        time.sleep(max(0.0, end - time.monotonic()))
        for connection in connections[:3]:
            read_all(connection, 0.1)
