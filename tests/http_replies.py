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
    """Return all replies in these bytes. Raise HTTPException unless the bytes are whole replies and
    nothing else. Bytes after a reply 101 belong to another protocol and are not read."""
    replies = []
    file = _KeptOpen(data)
    while file.tell() < len(data):
        reply = http.client.HTTPResponse(_Socket(file))  # type: ignore[arg-type]
        reply.begin()
        body = reply.read()
        headers = {name.lower(): value for name, value in reply.getheaders()}
        replies.append(Reply(reply.status, headers, body))
        if reply.status == http.client.SWITCHING_PROTOCOLS:
            break
    return replies
