"""Replies of HTTP/1.1 in bytes that a server wrote, read strictly."""

from __future__ import annotations

import http.client
import io
from typing import NamedTuple


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class _KeptOpen(io.BytesIO):
    """http.client closes a reply's file at its end, where the next reply begins."""

    def close(self) -> None:
        pass


class _Socket:
    def __init__(self, file: io.BytesIO):
        self.file = file

    def makefile(self, mode: str) -> io.BytesIO:
        return self.file


def read_replies(data: bytes) -> list[Reply]:
    """All replies in these bytes. Raises HTTPException unless the bytes are whole replies and
    nothing else.

    What follows a reply 101 belongs to another protocol and is not read."""
    found = []
    file = _KeptOpen(data)
    while file.tell() < len(data):
        reply = http.client.HTTPResponse(_Socket(file))  # type: ignore[arg-type]
        reply.begin()
        body = reply.read()
        headers = {name.lower(): value for name, value in reply.getheaders()}
        found.append(Reply(reply.status, headers, body))
        if reply.status == http.client.SWITCHING_PROTOCOLS:
            break
    return found
