"""From the bytes of a request to a checked struct: size, time, content type, JSON, types. Refuses as early as it can."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from functools import cache
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import msgspec
from starlette.types import Receive

from octavo.serve.errors import ApiError, bad
from octavo.serve.limits import Limits

T = TypeVar("T", bound=msgspec.Struct)
BIG = 256 * 2**10  # bytes: parsing more than this takes milliseconds, and is done in a thread
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
LONG_NUMBER = re.compile(rb"\d{19}")  # it may be beyond 64 bits
SMALL = 4096  # bytes: more is rarely plain, and then is looked through twice
# seconds of an oversized body that are read, and thrown away, so that the client comes to see why
PATIENCE = 0.5


async def read(
    headers: Mapping[bytes, bytes],
    receive: Receive,
    there: bytes | None,
    kind: type[T],
    limits: Limits,
) -> tuple[T, dict[str, Any]]:
    """The request's body as `kind`, and what it holds besides. `there`: the body, if it has come already, all of it."""
    check_headers(headers)
    data = await _bytes(headers, receive, limits) if there is None else there
    if len(data) > limits.body_bytes:
        raise too_large(limits)
    value = await asyncio.to_thread(parse, data) if len(data) > BIG else parse(data)
    return convert(value, kind)


def check_headers(headers: Mapping[bytes, bytes]) -> None:
    content = headers.get(b"content-type", b"")
    if (
        content != b"application/json"
        and content.partition(b";")[0].strip().lower() != b"application/json"
    ):
        raise ApiError(
            415,
            "the body must be JSON: send the header Content-Type: application/json",
            "unsupported_media_type",
        )
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(
            415, "compressed bodies are not taken: send the JSON as it is", "unsupported_media_type"
        )


def too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes", "body_too_large")


async def _bytes(headers: Mapping[bytes, bytes], receive: Receive, limits: Limits) -> bytes:
    parts: list[bytes] = []
    size = 0
    length = headers.get(b"content-length", b"0")
    stream = _stream(receive)
    if not length.isdigit() or int(length) > limits.body_bytes:
        if b"expect" not in headers:
            await _discard(stream, 8 * limits.body_bytes)
        raise too_large(limits)
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in stream:
                size += len(part)
                if size > limits.body_bytes:
                    parts.clear()
                    await _discard(stream, 8 * limits.body_bytes)
                    raise too_large(limits)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.body_seconds:g} s", "body_timeout"
        ) from None
    return b"".join(parts)


async def _stream(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client left", "client_gone")
        more = message["more_body"]
        yield message["body"]


async def _discard(stream: AsyncIterator[bytes], most: int) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            async for part in stream:
                most -= len(part)
                if most < 0:
                    return
    except (TimeoutError, ApiError):
        return


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object, strictly: no duplicate names, no NaN, no integer beyond 64 bits."""
    if len(data) <= SMALL and (plain := _plain(data)) is not None:
        return plain
    try:
        value = _decoder.decode(data.decode())
        # half of a pair is no character, and no reply or message could hold it
        if SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except ApiError:
        raise
    except (ValueError, RecursionError) as error:
        where = (
            f" (line {error.lineno}, column {error.colno})"
            if isinstance(error, json.JSONDecodeError)
            else ""
        )
        raise bad(None, f"the body is not valid JSON{where}", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad(None, "the body must be a JSON object", "invalid_json")
    return value


def _plain(data: bytes) -> dict[str, Any] | None:
    """The same in a fifth of the time, of what is easily seen to be so: else None, and nothing is said of it.

    A name has a colon behind it. Where there are as many names as colons, those in texts counted too, none was there twice."""
    if LONG_NUMBER.search(data):
        return None
    try:
        value = _decode(data)
        return value if type(value) is dict and _names(value) == data.count(b":") else None
    except (ValueError, RecursionError):
        return None


def _names(value: dict[str, Any] | list[Any]) -> int:
    inner = value.values() if type(value) is dict else value
    return (len(value) if type(value) is dict else 0) + sum(
        [_names(v) for v in inner if type(v) is dict or type(v) is list]
    )


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise bad(twice[:64], "a name occurs twice in one object", "invalid_json")
    return found


def _constant(name: str) -> NoReturn:
    raise bad(None, f"{name} is not JSON: numbers must be finite", "invalid_json")


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise bad(None, "an integer is beyond 64 bits", "invalid_json")
    return value


_decode = msgspec.json.Decoder().decode
_decoder = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_int=_integer)


# ---- types --------------------------------------------------------------------------------------------


def convert(value: dict[str, Any], kind: type[T]) -> tuple[T, dict[str, Any]]:
    """The request as a struct, and its further fields. Types are strict, but an integer may be written as 5.0."""
    try:
        found = msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        value = {**value, **_whole_numbers(value, kind)}
        try:
            found = msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as error:
            raise type_error(str(error)) from None
    known = _fields(kind)
    return found, {
        name: given for name, given in value.items() if given is not None and name not in known
    }


def _whole_numbers(value: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, int]:
    """Integer fields that are written as floats, such as 5.0, as integers."""
    return {
        name: int(value[name])
        for name in _integer_fields(kind)
        if type(value.get(name)) is float and value[name].is_integer()
    }


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    hints = get_type_hints(kind)
    return frozenset(n for n, hint in hints.items() if int in get_args(hint))


@cache
def _fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


JSON_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "|": "or"}


def type_error(text: str) -> ApiError:
    """msgspec says "Expected `int | null`, got `str` - at `$.messages[3].content`"; here it is said in JSON's words."""
    text, _, where = text.partition(" - at ")
    path = (
        re.sub(r"\[(\d+|\.\.\.)\]", r".\1", where.strip("`"))
        .lstrip("$.")
        .replace(".....", "")
        .removesuffix("....")
    )
    # which all may be
    message = text.replace("`", "").replace("Expected", "expected", 1).replace(" | null", "", 1)
    message = re.sub(r"\b(str|int|float|bool)\b|\|", lambda word: JSON_WORDS[word.group()], message)
    return bad(path or None, f"{path or 'the body'}: {message}")
