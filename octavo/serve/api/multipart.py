"""Reads a form of the type multipart/form-data, which is stored in a file.

The content of a part is not read into memory. A FormPart holds its position in the file.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from octavo.serve.api.api_errors import ApiError, invalid_field

MAX_PARTS = 64
HEAD_BYTES = 8192  # The headers of one part.
FIELD_BYTES = 65_536  # A field that is no file.
COPY_BYTES = 2**20
BOUNDARY = re.compile(
    rb'multipart/form-data\s*;.*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.I
)
DISPOSITION = re.compile(rb"^content-disposition:\s*form-data\s*;(.*)$", re.I | re.M)
NAME = re.compile(rb'(?:^|[;\s])name="((?:[^"\\]|\\.)*)"')
FILENAME = re.compile(rb'(?:^|[;\s])filename="((?:[^"\\]|\\.)*)"')


class FormPart(NamedTuple):
    """A field of a form, with the position of its content in the file."""

    start: int
    end: int
    filename: str | None

    def text(self, path: Path) -> str:
        if self.end - self.start > FIELD_BYTES:
            raise invalid_field(None, f"a field of the form has more than {FIELD_BYTES} bytes")
        with path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.end - self.start).decode("utf-8", "replace")

    def copy(self, path: Path, target: Path) -> None:
        """Write the content to another file."""
        bytes_left = self.end - self.start
        with path.open("rb") as source, target.open("wb") as copy:
            source.seek(self.start)
            while bytes_left > 0:
                data = source.read(min(COPY_BYTES, bytes_left))
                if not data:
                    break
                copy.write(data)
                bytes_left -= len(data)


def boundary_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the boundary between the parts of a form."""
    match = BOUNDARY.match(headers.get(b"content-type", b""))
    if match is None:
        raise ApiError(
            415,
            "the body must be a form with a file: send it as multipart/form-data",
            "unsupported_media_type",
        )
    return match[1] or match[2]


def read_parts(path: Path, boundary: bytes) -> dict[str, FormPart]:
    """Return the parts of a form by their names."""
    if not path.stat().st_size:
        raise bad_form("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse_parts(data, b"--" + boundary)


def _parse_parts(data: mmap.mmap, delimiter: bytes) -> dict[str, FormPart]:
    if data[: len(delimiter)] != delimiter:
        raise bad_form("it does not begin with its boundary")
    parts: dict[str, FormPart] = {}
    position = len(delimiter)
    while data[position : position + 2] != b"--":
        if data[position : position + 2] != b"\r\n" or len(parts) >= MAX_PARTS:
            raise bad_form("a boundary is malformed, or it has too many parts")
        head_end = data.find(b"\r\n\r\n", position, position + HEAD_BYTES)
        if head_end < 0:
            raise bad_form("a part has no headers")
        end = _next_boundary(data, delimiter, head_end + 4)
        name, filename = names_of(data[position:head_end])
        parts[name] = FormPart(head_end + 4, end, filename)
        position = end + 2 + len(delimiter)
    return parts


def _next_boundary(data: mmap.mmap, delimiter: bytes, position: int) -> int:
    """Return the position of the next boundary. The same bytes in a longer line are content."""
    while (position := data.find(b"\r\n" + delimiter, position)) >= 0:
        line_end = position + 2 + len(delimiter)
        if data[line_end : line_end + 2] in (b"\r\n", b"--"):
            return position
        position = line_end
    raise bad_form("a part has no end")


def names_of(head: bytes) -> tuple[str, str | None]:
    """Return the name of a field, and the name of its file if it is one."""
    disposition = DISPOSITION.search(head.replace(b"\r\n", b"\n"))
    name = NAME.search(disposition[1]) if disposition is not None else None
    if disposition is None or name is None:
        raise bad_form("a part has no name")
    filename = FILENAME.search(disposition[1])
    filename_text = None if filename is None else filename[1].decode("utf-8", "replace")
    return name[1].decode("utf-8", "replace"), filename_text


def bad_form(reason: str) -> ApiError:
    return invalid_field(None, f"the form cannot be read: {reason}", "invalid_form")
