"""Between the front and the engine process: one pair of connected sockets, each message its length and then msgpack.

    FrontLink    the front's end, in its event loop
    EngineLink   the engine's, through which two threads send: the one that steps, and the heartbeat

The pair has no name that anybody else could connect to; the engine inherits its end. Each engine process has a new one, so that
nothing one engine said is taken for another's. Sending never waits: what the socket has no room for is kept, and goes when it
has. Bytes go from process to process without a thread in between: two of ZeroMQ's took 0.2 ms on the way to an idle engine and
0.1 ms on the way back (docs/LOG.md, "The link").

Knows bytes, order and turns of the loop; what messages mean is others' business.
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
READ = 2**18  # bytes at a time
SMALL = 2**16  # bytes: a smaller message is copied, so that fewer parts are sent
LONGEST_WAIT = 0.001  # seconds for which what is said waits at most for others to go with it
LAST_WORDS = 0.5  # seconds that an engine that ends waits for its last message to leave


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def frames(*messages: bytes | bytearray) -> list[bytes | bytearray]:
    """Several messages as parts to send. Large ones are not copied."""
    parts: list[bytes | bytearray] = []
    small = b""
    for message in messages:
        small += LENGTH.pack(len(message))
        if len(message) <= SMALL:
            small += message
        else:
            parts += (small, message)
            small = b""
    return [*parts, small]


class Pipe:
    """One end: whole messages in, bytes out as far as there is room."""

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self.socket = end
        self.closed = False  # by the other side
        self._in = bytearray()
        self._large: bytearray | None = None  # a message of more than READ bytes, so far
        self._filled = 0  # bytes of it
        self._out: deque[memoryview] = deque()

    def receive(self) -> list[bytes | bytearray] | None:
        """The messages that are complete after one more read; None: there is nothing to read now."""
        try:
            if self._large is not None:
                return self._receive_large(self._large)
            data = self.socket.recv(READ)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self.closed = not data
        self._in += data
        found: list[bytes | bytearray] = []
        start = 0
        while len(self._in) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._in, start)
            end = start + LENGTH.size + length
            if end > len(self._in):
                if length > READ:
                    self._begin_large(start, length)
                    return found
                break
            found.append(bytes(self._in[start + LENGTH.size : end]))
            start = end
        del self._in[:start]
        return found

    def _begin_large(self, start: int, length: int) -> None:
        """A message of which only the first bytes are there. It is received in place, since copying it takes milliseconds."""
        part = self._in[start + LENGTH.size :]
        self._in.clear()
        self._large = bytearray(length)
        self._large[: len(part)] = part
        self._filled = len(part)

    def _receive_large(self, message: bytearray) -> list[bytes | bytearray]:
        end = min(self._filled + READ, len(message))
        count = self.socket.recv_into(memoryview(message)[self._filled : end])
        self.closed = not count
        self._filled += count
        if self._filled < len(message):
            return []
        self._large = None
        return [message]

    def send(self, *parts: bytes | bytearray) -> bool:
        """Whether all has left, these and what was kept before."""
        self._out.extend(memoryview(part) for part in parts if part)
        try:
            while self._out:
                first = self._out.popleft()
                sent = self.socket.send(first)
                if sent < len(first):
                    self._out.appendleft(first[sent:])
        except BlockingIOError:
            self._out.appendleft(first)
        except OSError as error:
            if error.errno in (errno.ENOBUFS, errno.ENOMEM):  # the system has no room just now
                self._out.appendleft(first)
            else:  # nobody is there any more, which is noticed elsewhere
                self._out.clear()
        return not self._out


class FrontLink:
    """While the engine has nothing to do, what is said in turns of the event loop that follow each other goes out together, when
    a turn brings nothing more or the first has waited for long enough: requests that came together then reach the engine
    together. Else it would begin with the first alone, the others would wait for that step, and the front would share its cores
    with it while it still reads. An engine that is at work is told at once: it takes up what has come with its next step."""

    def __init__(self, deliver: Callable[[ToFront], None], asked: Callable[[], float] = lambda: 0):
        """`asked`: how many requests the engine is to have, those said and not sent among them."""
        mine, self.other = socket.socketpair()
        self._pipe = Pipe(mine)
        self._number = mine.fileno()
        self._deliver = deliver
        self._asked = asked
        self._said: list[ToEngine] = []
        self._told: list[Callable[[], None]] = []  # who is to hear when they have left
        self._since = 0.0  # when the first of those came
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._number, self._readable)

    def given(self) -> None:
        """The engine has its end: ours of it is closed, so that its death is seen."""
        self.other.close()

    def send(self, message: ToEngine, told: Callable[[], None] | None = None) -> None:
        """`told` is called when it has left."""
        now = time.monotonic()
        if not self._said:
            self._since = now
            self._loop.call_soon(self._turn, 0)
        self._said.append(message)
        if told is not None:
            self._told.append(told)
        if self._asked() > len(self._said) or now - self._since > LONGEST_WAIT:
            self._flush()

    def _turn(self, before: int) -> None:
        """A turn is over, at whose beginning so much had been said."""
        if len(self._said) > before and time.monotonic() - self._since < LONGEST_WAIT:
            self._loop.call_soon(self._turn, len(self._said))
        else:
            self._flush()

    def _flush(self) -> None:
        if not self._said or not self._open:
            return
        (said, self._said) = (self._said, [])
        (told, self._told) = (self._told, [])
        now = time.monotonic()
        frames: list[bytes] = []
        for message in said:
            if type(message) is Add:
                message.submitted = now
            try:
                frames.append(frame(encode(message)))
            except Exception:  # one that cannot be said takes no other with it
                log.exception("a message to the engine could not be encoded")
                if type(message) is Add:
                    self._loop.call_soon(
                        self._deliver,
                        Refused(message.id, "this request cannot be told to the engine"),
                    )
        if not self._pipe.send(b"".join(frames)):
            self._loop.add_writer(self._number, self._writable)
        for callback in told:
            self._loop.call_soon(callback)

    def _writable(self) -> None:
        if self._pipe.send():
            self._loop.remove_writer(self._number)

    def _readable(self) -> bool:
        """Whether there was something."""
        found = self._pipe.receive()
        for data in found or ():
            try:
                self._deliver(decode_to_front(data))
            except Exception:  # what cannot be used takes nothing else with it
                log.exception("a message of the engine's could not be used")
        if self._pipe.closed:
            self._loop.remove_reader(self._number)
        return found is not None

    def close(self) -> None:
        """What the engine said last is heard."""
        while not self._pipe.closed and self._readable():
            pass
        self._open = False
        self._loop.remove_reader(self._number)
        self._loop.remove_writer(self._number)
        self._pipe.socket.close()
        self.other.close()


class EngineLink:
    """Only the thread that steps receives."""

    def __init__(self, end: socket.socket):
        self._pipe = Pipe(end)
        self._lock = threading.Lock()
        self._messages: deque[bytes | bytearray] = deque()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self.stuck = threading.Event()  # there was no room for all: push() is to be called

    def send(self, message: ToFront) -> None:
        data = frame(encode(message))
        with self._lock:
            if not self._pipe.send(data):
                self.stuck.set()

    def push(self, seconds: float) -> None:
        """Wait so long for room, and go on with what is stuck."""
        room = select.poll()
        room.register(self._pipe.socket, select.POLLOUT)
        room.poll(max(seconds, 0) * 1000)
        with self._lock:
            if self._pipe.send():
                self.stuck.clear()

    def receive(self, seconds: float | None) -> ToEngine | None:
        """The next message; None if none comes for so long. `seconds` None: there is time. Shutdown when the front is gone."""
        while True:
            if not self._messages:
                if seconds != 0 and not self._poll.poll(
                    None if seconds is None else seconds * 1000
                ):
                    return None
                self._messages.extend(self._pipe.receive() or ())
                if not self._messages:
                    if self._pipe.closed:
                        return Shutdown()
                    if seconds == 0:
                        return None
                    continue
            data = self._messages.popleft()
            try:
                return decode_to_engine(data)
            except (
                msgspec.ValidationError
            ) as error:  # the front checks first, so this is its mistake and not the client's
                log.error("a message that the engine cannot use: %s", error)
                fields: list[Any] = msgspec.msgpack.decode(data, type=list)
                if fields[0] == "Add":
                    self.send(Refused(str(fields[1]), "the engine cannot use this request"))

    def close(self) -> None:
        end = time.monotonic() + LAST_WORDS
        while self.stuck.is_set() and time.monotonic() < end:
            self.push(end - time.monotonic())
