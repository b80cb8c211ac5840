"""The messages between the endpoint and a replica, and the TCP connection that carries them.

Each request has a connection of its own. The endpoint sends one RelayStart. The replica sends
either a RelayError, or a RelayHead and then RelayPart messages, and always a RelayEnd. If the
client disconnects, the endpoint closes its direction of the connection, and the replica aborts the
request. A client that reads slowly keeps the endpoint from reading, and the replica from writing.

A message is its length followed by msgpack. The first message has the secret of the replica, which
the endpoint gets from Ray, because other programs can connect to the port of a replica too.

This module must not import Ray.
"""

from __future__ import annotations

import asyncio
import struct
from typing import NamedTuple

import msgspec

from octavo.serve.api.api_errors import ApiError

LENGTH = struct.Struct("<I")
HEAD_BYTES = 2**20  # The bytes of a message besides the body of a request.


class Placement(NamedTuple):
    """The target of a request."""

    replica: str  # The name of the replica.
    host: str
    port: int
    secret: str
    lease: str  # The lease that counts the request, or "".


class RelayedIdentity(msgspec.Struct, array_like=True):
    """The API key of a client, without the key itself and its limits."""

    name: str = ""
    priority: int = 0
    admin: bool = False
    salt: str = ""


class RelayStart(msgspec.Struct, tag=True, array_like=True):
    """A request. The endpoint has checked its key, its limits and its Host header."""

    secret: str
    lease: str  # The lease that counts this request, or "".
    request_id: str
    elapsed: float  # The seconds since the request arrived.
    timeout: float | None
    identity: RelayedIdentity
    client: str  # The address of the client.
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


class RelayHead(msgspec.Struct, tag=True, array_like=True):
    """The reply begins. The replica sends this together with the first text of the reply."""

    status: int
    headers: list[tuple[bytes, bytes]]


class RelayPart(msgspec.Struct, tag=True, array_like=True):
    data: bytes
    last: bool


class RelayError(msgspec.Struct, tag=True, array_like=True):
    """The request has failed before its reply began."""

    status: int
    message: str
    code: str | None
    param: str | None
    error_type: str
    retry_after: float | None
    allow: str | None
    sent: bool  # The request had been sent to the engine.


class RelayEnd(msgspec.Struct, tag=True, array_like=True):
    """The last message, also after the client has disconnected."""

    tokens: int  # The tokens of the prompts and replies.
    sent: bool  # The request had been sent to the engine.


FromReplica = RelayHead | RelayPart | RelayError | RelayEnd
encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(RelayStart).decode
decode_reply = msgspec.msgpack.Decoder(FromReplica).decode


def frame_message(message: RelayStart | FromReplica) -> bytes:
    encoded = encode(message)
    return LENGTH.pack(len(encoded)) + encoded


async def read_message(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Return the next message. Raises EOFError or OSError if the other side is lost."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > limit:
        raise ConnectionError(f"a message of {length} bytes is longer than {limit}")
    return await reader.readexactly(length)


def relayed_error(error: ApiError, sent: bool) -> RelayError:
    return RelayError(
        status=error.status,
        message=error.message,
        code=error.code,
        param=error.param,
        error_type=error.type,
        retry_after=error.retry_after,
        allow=error.allow,
        sent=sent,
    )


def api_error_of(relayed: RelayError) -> ApiError:
    return ApiError(
        relayed.status,
        relayed.message,
        relayed.code,
        relayed.param,
        type=relayed.error_type,
        retry_after=relayed.retry_after,
        allow=relayed.allow,
    )


def replica_lost() -> ApiError:
    return ApiError(
        503,
        "the replica that computed this reply has failed: send the request again",
        "replica_lost",
        retry_after=1.0,
    )


def no_replica() -> ApiError:
    return ApiError(
        503, "no replica can take this request now: try again soon", "no_replica", retry_after=2.0
    )
