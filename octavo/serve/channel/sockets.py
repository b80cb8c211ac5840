"""The sockets between the front process and the engine process.

    FrontLink    is the end of the front process, used by its event loop
    EngineLink   is the end of the engine process, used by its main and heartbeat threads

A message is its length followed by msgpack. The two sockets are a connected pair without a name,
so no other process can connect to them. The engine process inherits its end. Each engine process
gets a new pair, so that a message from an earlier engine process cannot be mistaken for a new one.
Sending never blocks: data for which the socket has no room is buffered and sent later. There is no
extra thread between the processes. With the two threads of ZeroMQ, a message to an idle engine took
0.2 ms longer, and a reply 0.1 ms (docs/LOG.md, "The link").

This module handles bytes and their order. It does not interpret messages.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.serve.channel.messages import (
    Add,
    Refused,
    Shutdown,
    ToEngine,
    ToFront,
    decode_to_engine,
    decode_to_front,
    encode,
)

log = logging.getLogger(__name__)
LENGTH = struct.Struct("<I")
READ_SIZE = 2**18  # The number of bytes that are read at a time.
SMALL_MESSAGE = 2**16  # Messages with fewer bytes are joined, so that fewer parts are sent.
LONGEST_WAIT = 0.001  # A message waits at most this many seconds for others to be sent with it.
CLOSE_SECONDS = 0.5  # An engine process that ends has this time to send its last message.


def frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def frames(*messages: bytes | bytearray) -> list[bytes | bytearray]:
    """Return the parts to send for several messages. Large messages are not copied."""
    parts: list[bytes | bytearray] = []
    joined = b""
    for message in messages:
        joined += LENGTH.pack(len(message))
        if len(message) <= SMALL_MESSAGE:
            joined += message
        else:
            parts += (joined, message)
            joined = b""
    return [*parts, joined]


class Pipe:
    """One end of a socket pair.

    It receives whole messages, and sends as many bytes as the socket has room for.
    """

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self.socket = end
        self.closed = False  # True means that the other process has closed its end.
        self._received = bytearray()
        # An incomplete message of more than READ_SIZE bytes, and how many of them have arrived.
        self._large: bytearray | None = None
        self._large_received = 0
        self._unsent_parts: deque[memoryview] = deque()
        # Read into the same memory again and again: the C library maps new memory for each block of
        # this size (return_large_blocks), which would cost a fifth of the time of a small request.
        self._buffer = memoryview(bytearray(READ_SIZE))

    def receive(self) -> list[bytes | bytearray] | None:
        """Read once. Returns the complete messages, or None if there is nothing to read."""
        try:
            if self._large is not None:
                return self._receive_large(self._large)
            count = self.socket.recv_into(self._buffer)
        except BlockingIOError:
            return None
        except OSError:
            count = 0
        self.closed = not count
        self._received += self._buffer[:count]
        messages: list[bytes | bytearray] = []
        start = 0
        while len(self._received) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received, start)
            end = start + LENGTH.size + length
            if end > len(self._received):
                if length > READ_SIZE:
                    self._begin_large(start, length)
                    return messages
                break
            messages.append(bytes(self._received[start + LENGTH.size : end]))
            start = end
        del self._received[:start]
        return messages

    def _begin_large(self, start: int, length: int) -> None:
        """Prepare to receive a large message in place, because a copy would take milliseconds."""
        beginning = self._received[start + LENGTH.size :]
        self._received.clear()
        self._large = bytearray(length)
        self._large[: len(beginning)] = beginning
        self._large_received = len(beginning)

    def _receive_large(self, message: bytearray) -> list[bytes | bytearray]:
        end = min(self._large_received + READ_SIZE, len(message))
        count = self.socket.recv_into(memoryview(message)[self._large_received : end])
        self.closed = not count
        self._large_received += count
        if self._large_received < len(message):
            return []
        self._large = None
        return [message]

    def send(self, *parts: bytes | bytearray) -> bool:
        """Send these parts after the unsent ones. Returns whether all parts are sent."""
        self._unsent_parts.extend(memoryview(part) for part in parts if part)
        try:
            while self._unsent_parts:
                part = self._unsent_parts.popleft()
                num_sent = self.socket.send(part)
                if num_sent < len(part):
                    self._unsent_parts.appendleft(part[num_sent:])
        except BlockingIOError:
            self._unsent_parts.appendleft(part)
        except OSError as error:
            if error.errno in (errno.ENOBUFS, errno.ENOMEM):  # The system is short of memory.
                self._unsent_parts.appendleft(part)
            else:  # The other process has ended. The supervisor detects that.
                self._unsent_parts.clear()
        return not self._unsent_parts


class FrontLink:
    """The end of the channel in the front process.

    While the engine is idle, messages are collected until an iteration of the event loop adds none,
    or until the first one has waited for LONGEST_WAIT. Requests that arrive together then reach
    the engine together. Otherwise the engine would start a step with the first request alone, and
    the others would wait for that step. A busy engine receives each message at once and handles
    it before its next step.
    """

    def __init__(
        self,
        on_message: Callable[[ToFront], None],
        count_requested: Callable[[], float] = lambda: 0,
    ):
        """Create the link.

        `on_message` is called with each message of the engine. `count_requested` returns the
        number of open requests, sent or unsent.
        """
        front_end, self.engine_end = socket.socketpair()
        self._pipe = Pipe(front_end)
        self._descriptor = front_end.fileno()
        self._on_message = on_message
        self._count_requested = count_requested
        self._unsent_messages: list[ToEngine] = []
        self._sent_callbacks: list[Callable[[], None]] = []  # They run when the messages are sent.
        self._first_added = 0.0  # The time at which the first unsent message was added.
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._readable)

    def close_engine_end(self) -> None:
        """Close this process's copy of the engine's end, after the engine process inherited it.

        This process can then detect that the engine process closes its end.
        """
        self.engine_end.close()

    def send(self, message: ToEngine, on_sent: Callable[[], None] | None = None) -> None:
        """Send a message, and call `on_sent` afterwards."""
        now = time.monotonic()
        if not self._unsent_messages:
            self._first_added = now
            self._loop.call_soon(self._flush_when_quiet, 0)
        self._unsent_messages.append(message)
        if on_sent is not None:
            self._sent_callbacks.append(on_sent)
        has_sent_requests = self._count_requested() > len(self._unsent_messages)
        if has_sent_requests or now - self._first_added > LONGEST_WAIT:
            self._flush()

    def _flush_when_quiet(self, count_before: int) -> None:
        """Send the messages if there are still `count_before`, or if they have waited too long."""
        waited = time.monotonic() - self._first_added
        if len(self._unsent_messages) > count_before and waited < LONGEST_WAIT:
            self._loop.call_soon(self._flush_when_quiet, len(self._unsent_messages))
        else:
            self._flush()

    def _flush(self) -> None:
        if not self._unsent_messages or not self._is_open:
            return
        messages = self._unsent_messages
        self._unsent_messages = []
        callbacks = self._sent_callbacks
        self._sent_callbacks = []
        now = time.monotonic()
        encoded: list[bytes] = []
        for message in messages:
            if type(message) is Add:
                message.submitted = now
            try:
                encoded.append(frame(encode(message)))
            except Exception:  # The other messages must be sent all the same.
                log.exception("cannot encode a message to the engine")
                if type(message) is Add:
                    refusal = Refused(message.id, "the request cannot be sent to the engine")
                    self._loop.call_soon(self._on_message, refusal)
        if not self._pipe.send(b"".join(encoded)):
            self._loop.add_writer(self._descriptor, self._writable)
        for callback in callbacks:
            self._loop.call_soon(callback)

    def _writable(self) -> None:
        if self._pipe.send():
            self._loop.remove_writer(self._descriptor)

    def _readable(self) -> bool:
        """Read once and deliver the complete messages. Returns whether anything was read."""
        messages = self._pipe.receive()
        for message in messages or ():
            try:
                self._on_message(decode_to_front(message))
            except Exception:  # The other messages must be delivered all the same.
                log.exception("cannot process a message from the engine")
        if self._pipe.closed:
            self._loop.remove_reader(self._descriptor)
        return messages is not None

    def close(self) -> None:
        """Deliver the last messages of the engine, then close both ends."""
        while not self._pipe.closed and self._readable():
            pass
        self._is_open = False
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._pipe.socket.close()
        self.engine_end.close()


class EngineLink:
    """The engine's end of the channel. Only the thread that runs steps receives messages."""

    def __init__(self, end: socket.socket):
        self._pipe = Pipe(end)
        self._lock = threading.Lock()
        self._messages: deque[bytes | bytearray] = deque()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        # This is set while some data is unsent. The heartbeat thread then calls push().
        self.has_unsent = threading.Event()

    def send(self, message: ToFront) -> None:
        framed = frame(encode(message))
        with self._lock:
            if not self._pipe.send(framed):
                self.has_unsent.set()

    def push(self, seconds: float) -> None:
        """Wait until the socket has room, at most `seconds`, and send the unsent data."""
        writable = select.poll()
        writable.register(self._pipe.socket, select.POLLOUT)
        writable.poll(max(seconds, 0) * 1000)
        with self._lock:
            if self._pipe.send():
                self.has_unsent.clear()

    def receive(self, seconds: float | None) -> ToEngine | None:
        """Return the next message, or None if none arrives within `seconds`.

        Without a limit (None), wait until a message arrives. Returns Shutdown if the front process
        has ended.
        """
        while True:
            if not self._messages:
                timeout = None if seconds is None else seconds * 1000
                if seconds != 0 and not self._poll.poll(timeout):
                    return None
                self._messages.extend(self._pipe.receive() or ())
                if not self._messages:
                    if self._pipe.closed:
                        return Shutdown()
                    if seconds == 0:
                        return None
                    continue
            message = self._messages.popleft()
            try:
                return decode_to_engine(message)
            except msgspec.ValidationError as error:
                # The front process validates requests, so only a bug there can cause this.
                log.error("cannot decode a message to the engine: %s", error)
                fields: list[Any] = msgspec.msgpack.decode(message, type=list)
                if fields[0] == "Add":
                    self.send(Refused(str(fields[1]), "the engine cannot decode this request"))

    def close(self) -> None:
        """Send the unsent data, for at most CLOSE_SECONDS."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self.has_unsent.is_set() and time.monotonic() < deadline:
            self.push(deadline - time.monotonic())
