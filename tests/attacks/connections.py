"""Many connections that do nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from tests.attacks.clients import HOST, allow_descriptors, connect, head, read_all
from tests.attacks.target import ALICE, COMPLETIONS, Target


class Idle:
    """Keeps many connections open, without a key and without a request, and opens new ones in place
    of those that the server closes. They come from several addresses of the loopback, because one
    address cannot fill the table of connections."""

    def __init__(self, target: Target, count: int, addresses: int):
        allow_descriptors(count + 1000)
        self.target = target
        self.count = count
        self.addresses = [(f"127.0.0.{2 + index}", 0) for index in range(addresses)]
        self.connections: list[socket.socket] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)

    def __enter__(self) -> Idle:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)
        for connection in self.connections:
            connection.close()

    def _hold(self) -> None:
        while not self._over.wait(0.05):
            self.connections = [one for one in self.connections if _is_open(one)]
            while len(self.connections) < self.count and not self._over.is_set():
                source = self.addresses[len(self.connections) % len(self.addresses)]
                server = (HOST, self.target.port)
                try:
                    self.connections.append(socket.create_connection(server, 5, source))
                except OSError:
                    break


def _is_open(connection: socket.socket) -> bool:
    """Closes it if the server has closed it."""
    try:
        connection.recv(100, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


def hold_idle(target: Target, count: int, addresses: int, seconds: float) -> None:
    """Good requests are served while a client without a key holds very many connections."""
    with Idle(target, count, addresses):
        time.sleep(min(4.0, seconds / 2))
        end = time.monotonic() + seconds
        served = 0
        while time.monotonic() < end or served < 5:
            reply = target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, ALICE)
            assert reply.status_code == 200, reply.text
            served += 1


def keep_alive(target: Target, count: int) -> None:
    """Connections that have each made a request and stay open do not shut out new ones."""
    allow_descriptors(count + 1000)
    request = head("GET", "/livez") + b"\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(connect(target.port))
            connection.sendall(request)
            reply = read_all(connection, 30, until=b"}")
            assert reply.startswith(b"HTTP/1.1 200"), reply[:200]
        for _ in range(5):
            begun = time.monotonic()
            reply = target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, ALICE)
            assert reply.status_code == 200, reply.text
            assert time.monotonic() - begun < 5
