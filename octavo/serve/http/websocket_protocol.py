"""Extends uvicorn's WebSocket protocol with limits on the work that a client can cause.

uvicorn parses all the input of one read at once, in Python, and needs about 20 microseconds per
frame. This protocol passes the input to uvicorn frame by frame, a few frames in each iteration of
the event loop (see turn_queue.py), and stops while a message waits for the application. A client
may send `websocket_small_frames` small frames (pings, pongs and small fragments) per minute. When
it sends more, the connection is closed with the code 1008. The bytes of a message are counted until
it is parsed (see body_memory.py).
"""

from __future__ import annotations

import math
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.body_memory import BodyReservation
from octavo.serve.front.keys import Bucket
from octavo.serve.http.connections import Connection, ConnectionState
from octavo.serve.http.http_request import error_response

if TYPE_CHECKING:
    from octavo.serve.http.http_protocol import ServerContext

FRAMES = 16  # The number of frames, or parts of frames, that are parsed at a time.
PART = 64 * 2**10  # The number of bytes of a frame that are parsed at a time.
MAX_BUFFERED = 64 * 2**10  # Reading stops when this many bytes are buffered unparsed.
SMALL = 1024  # A fragment with fewer bytes is a small frame.
BURST = 128  # This many small frames may arrive at once.
MAX_UNREAD = 2**20  # A client that has this many bytes to read may not send more.
LINGER_SECONDS = 1.0  # The client has this time to read the close frame.
FIN = 0x80
MASK = 0x80
OPCODE = 0x0F
MASK_BYTES = 4
EXTENDED = 127  # Eight bytes of length follow.
CONTINUATION = 0
CLOSE = 8  # This opcode and all greater ones are control frames.


class WebSocketProtocol(WebSocketsSansIOProtocol):
    queued = False  # TurnQueue sets this.

    def __init__(self, context: ServerContext, connection: Connection):
        super().__init__(context.uvicorn, context.state, {})
        self.context = context
        self.connection = connection
        self._input = bytearray()
        self._payload_left = 0  # The bytes of the current frame that are not parsed yet.
        self._small_frames = Bucket(context.limits.websocket_small_frames, BURST)
        # The first byte and the mask of the large frame that is being split.
        self._fragment_head: tuple[int, bytes] | None = None
        self._in_message = False  # The current frame is part of a message.
        self._message_bytes = 0
        self._memory: BodyReservation | None = None  # It counts the bytes of the message.
        self._reading = True
        self._failed = False

    def open(self, head: bytes, following: bytes) -> None:
        """Start with the head of the upgrade request and the input that follows it."""
        self.connection.owner = self
        self.connection.deadline = math.inf
        self.connection.enter(ConnectionState.BUSY)
        super().data_received(head)
        if following:
            self.data_received(following)

    def handle_connect(self, event: Request) -> None:
        if self.conn.accept(event).status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._refuse_handshake()
            return
        super().handle_connect(event)
        self.scope["octavo.connection"] = self.connection  # type: ignore[typeddict-unknown-key]

    def _refuse_handshake(self) -> None:
        error = ApiError(
            400,
            "this is not a valid WebSocket handshake: check the Sec-WebSocket headers",
            "invalid_http",
        )
        self._failed = True
        self.handshake_complete = True
        self.close_sent = True
        self.transport.write(error_response(error, {"sec-websocket-version": "13"}))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._failed = True
        self._input.clear()
        self.frames = []
        self.conn.reader.discard()
        self._memory = None
        self.context.table.remove(self.connection)
        self.connection.owner = None
        super().connection_lost(exc)

    # ---- input -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._failed:
            return
        if self.transport.get_write_buffer_size() > MAX_UNREAD:
            self.transport.abort()  # The client sends pings and does not read the pongs.
            return
        self._input += data
        if self.queued:
            # Otherwise libuv reads from a socket up to 32 times in one iteration.
            self._update_reading()
        elif self.parse_slice():
            self.context.turns.add(self)

    def parse_slice(self) -> bool:
        for _ in range(FRAMES):
            piece = b"" if self._must_wait() else self._next_piece()
            if not piece:
                break
            super().data_received(piece)
        self._update_reading()
        return bool(piece) and not self._must_wait()

    def _must_wait(self) -> bool:
        """Return whether a message waits for the application, or there is nothing to parse.

        The socket is read meanwhile, so that a disconnect is detected.
        """
        return self._failed or self.read_paused or not self._input or not self.handshake_complete

    def _next_piece(self) -> bytes:
        """Return one frame or a part of a large frame, or no bytes if it has not arrived yet."""
        if self._payload_left == 0:
            head = self._frame_head()
            if head is None or not self._begin_frame(*head):
                return b""
        available = min(len(self._input), self._payload_left, PART)
        if self._fragment_head is not None and available < self._payload_left:
            available -= available % MASK_BYTES  # The mask restarts with each fragment.
            if available < SMALL:
                return b""
        piece = bytes(self._input[:available])
        del self._input[:available]
        self._payload_left -= available
        if self._in_message and not self._count(available):
            return b""
        return piece if self._fragment_head is None else self._fragment(piece)

    def _begin_frame(self, head_size: int, length: int) -> bool:
        """Prepare for the frame whose head was read. Returns False if the head is not complete.

        A large frame is passed to the parser as several fragments, because the parser would copy
        a whole frame twice at once. A frame that the parser will refuse is passed on unchanged.
        """
        is_masked = bool(self._input[1] & MASK)
        is_valid = is_masked and self._message_bytes + length <= self.context.limits.body_bytes
        self._fragment_head = None
        self._payload_left = head_size + length
        is_split = self._in_message and is_valid and length > PART
        if not is_split:
            return True
        if len(self._input) < head_size:
            self._payload_left = 0
            return False
        self._fragment_head = self._input[0], bytes(self._input[head_size - MASK_BYTES : head_size])
        del self._input[:head_size]
        self._payload_left = length
        return True

    def _fragment(self, payload: bytes) -> bytes:
        """Return a part of a large frame as a separate frame."""
        assert self._fragment_head is not None
        first, mask = self._fragment_head
        self._fragment_head = first & FIN | CONTINUATION, mask
        if self._payload_left > 0:
            first &= ~FIN
        return bytes([first, MASK | EXTENDED]) + len(payload).to_bytes(8, "big") + mask + payload

    def handle_cont(self, event: Frame) -> None:
        """Collect a message in one buffer, which grows in place."""
        if not isinstance(self.frames[0], bytearray):
            self.frames = [bytearray(self.frames[0])]  # type: ignore[list-item]
        self.frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def _count(self, size: int) -> bool:
        """Count `size` more bytes of the message.

        If they use too much memory, close the connection and return False.
        """
        if self._memory is None:
            client = self.scope["client"]
            self._memory = self.context.bodies.reserve(client[0] if client else "")
        self._message_bytes += size
        refusal = self._memory.resize(self._message_bytes)
        if refusal is not None:
            self.fail(CloseCode.TRY_AGAIN_LATER, refusal.message)
        return refusal is None

    def _frame_head(self) -> tuple[int, int] | None:
        """Return the sizes of a frame's head and payload.

        Returns None if the head is not complete, or if the client has sent too many small frames.
        """
        head = self._input
        if len(head) < 2:
            return None
        length = head[1] & 0x7F
        extended_bytes = {126: 2, 127: 8}.get(length, 0)
        if len(head) < 2 + extended_bytes:
            return None
        if extended_bytes:
            length = int.from_bytes(head[2 : 2 + extended_bytes], "big")
        opcode = head[0] & OPCODE
        is_fragment = opcode == CONTINUATION or not head[0] & FIN
        if opcode > CLOSE or (is_fragment and length < SMALL) or self.close_sent:
            if self._small_frames.wait() > 0:
                self.fail(CloseCode.POLICY_VIOLATION, "too many pings, pongs or small fragments")
                return None
            self._small_frames.take()
        self._in_message = opcode < CLOSE
        if opcode < CLOSE and self.connection.deadline == math.inf:
            # This is the first frame of a message. The whole message must arrive before a deadline.
            self.connection.deadline = time.monotonic() + self.context.limits.body_seconds
        mask_bytes = MASK_BYTES if head[1] & MASK else 0
        return 2 + extended_bytes + mask_bytes, length

    def send_receive_event_to_app(self) -> None:
        """Pass on a complete message, and stop parsing until the application has received it."""
        self.connection.deadline = math.inf
        data = self.frames[0]
        self.frames = []
        memory = self._memory
        self._memory = None
        self._message_bytes = 0
        if self.close_sent:
            return
        message: Any = {"type": "websocket.receive", "octavo.memory": memory}
        # A large text is passed on as bytes. Decoding would take milliseconds here, and the JSON
        # parser checks UTF-8 later.
        if self.curr_msg_data_type == "text" and len(data) <= PART:
            try:
                message["text"] = data.decode()
            except UnicodeDecodeError:
                self.fail(CloseCode.INVALID_DATA, "a text message is not valid UTF-8")
                return
        else:
            message["bytes"] = data
        self.queue.put_nowait(message)
        self.read_paused = True

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self.proceed()
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "websocket.close":
            self.read_paused = False  # Parse up to the close frame without waiting for receives.
        await super().send(message)
        if message["type"] in ("websocket.accept", "websocket.close"):
            self.proceed()
        elif message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # Otherwise uvicorn logs an error about the refusal.

    def proceed(self) -> None:
        """Parse the buffered input, and resume reading."""
        if self._input:
            self.context.turns.add(self)
        self._update_reading()

    def _update_reading(self) -> None:
        reading = len(self._input) <= MAX_BUFFERED and not self._failed
        if reading == self._reading:
            return
        self._reading = reading
        if reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    # ---- the end ---------------------------------------------------------------------------------

    def fail(self, code: int, reason: str) -> None:
        """Send a close frame with this code and reason, and close the connection."""
        if not self._failed and self.handshake_complete:
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """Write the close frame, and give the client a moment to read it.

        uvicorn would close the socket at once. If the client has sent more, the system then resets
        the connection, and the close frame is lost.
        """
        self._failed = True
        self._input.clear()
        close = self.conn.close_sent
        code = close.code if close is not None else CloseCode.ABNORMAL_CLOSURE
        reason = close.reason if close is not None else ""
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.stop_keepalive()
        self._update_reading()
        self.connection.enter(ConnectionState.SILENT)
        self.connection.deadline = math.inf
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def evict(self) -> None:
        self.fail(CloseCode.TRY_AGAIN_LATER, "the server is full and closes idle connections")
        self.transport.close()

    def deadline_passed(self) -> None:
        self.fail(CloseCode.POLICY_VIOLATION, "the message did not arrive in time")
