"""Parses the bytes of a body into a request with the right types.

Parsing is strict: duplicate names, NaN and integers beyond 64 bits are errors. The event loop
parses small bodies. A worker process parses the others and returns a request of bounded size, so
that the event loop never creates millions of objects.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import msgspec

from octavo.serve.api.api_errors import ApiError, invalid_field
from octavo.serve.limits import Limits

RequestType = TypeVar("RequestType", bound=msgspec.Struct)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
LONG_NUMBER = re.compile(rb"\d{19}")  # Such a number may exceed 64 bits.
SMALL_BODY = 4096  # bytes
MAX_BRIEF_VALUES = 64
MAX_BRIEF_BYTES = 1024
MAX_NAMED_FIELDS = 3  # in an error about a missing field
ESCAPED_COLON = b"\\u003"
# A body is parsed within 2 ms if it has at most INLINE_BYTES, or if it is mostly text. Then it has
# at most LONG_TEXT bytes and few commas, which limit the number of values.
INLINE_BYTES = 32 * 2**10
LONG_TEXT = 512 * 2**10
INLINE_COMMAS = 4096
Bytes = bytes | bytearray
SCALARS = (str, bytes, int, float, bool)


def is_quick(data: Bytes) -> bool:
    """Return whether the event loop may parse this body itself."""
    return len(data) <= INLINE_BYTES or (
        len(data) <= LONG_TEXT and data.count(b",") <= INLINE_COMMAS
    )


def read_request(
    data: Bytes, kind: type[RequestType], limits: Limits
) -> tuple[RequestType, dict[str, Any]]:
    """Return the body as a `kind`, and the fields that `kind` does not have.

    Callers compare unknown values only with small values, so a large one is replaced by True.
    """
    request, unknown = convert(parse(data), kind)
    check_unknown(unknown, limits)
    return request, {name: brief(value) for name, value in unknown.items()}


def check_unknown(unknown: dict[str, Any], limits: Limits) -> None:
    if len(unknown) > limits.unknown_fields:
        raise invalid_field(
            None,
            f"the request has {len(unknown)} unknown fields, but at most {limits.unknown_fields} "
            "are allowed: remove them",
            "param_out_of_range",
        )


def brief(value: Any) -> Any:
    """Return the value if it is small, or else True."""
    is_small = (
        count_values(value, MAX_BRIEF_VALUES) <= MAX_BRIEF_VALUES
        and len(msgspec.json.encode(value)) <= MAX_BRIEF_BYTES
    )
    return value if is_small else True


def count_values(value: Any, limit: int) -> int:
    """Return the number of values in `value`, including itself. Stops soon after `limit`."""
    if value is None or isinstance(value, SCALARS):
        return 1
    items = value.values() if isinstance(value, dict) else value
    count = 1 + len(items)
    for item in items:
        if count > limit:
            break
        if not isinstance(item, SCALARS) and item is not None:
            count += count_values(item, limit - count) - 1
    return count


def name_unknown_fields(
    error: ApiError, request: msgspec.Struct, unknown: dict[str, Any]
) -> ApiError:
    """Return an error about a field that a request lacks, which names the unknown fields.

    One of them may be the field with a typing error. Other errors are returned unchanged.
    """
    is_missing = error.param is not None and getattr(request, error.param, False) is None
    if is_missing and unknown:
        names = [name[:64] for name in unknown][:MAX_NAMED_FIELDS]
        fields = "field" if len(names) == 1 else "fields"
        error.message += f"; the request has the unknown {fields} {', '.join(names)}"
    return error


# ---- JSON ----------------------------------------------------------------------------------------


def parse(data: Bytes) -> dict[str, Any]:
    """Parse a JSON object strictly."""
    has_many_values = len(data) <= SMALL_BODY or data.count(b",") > len(data) // 32
    if has_many_values:
        value = _parse_fast(data)
        if value is not None:
            return value
    return _parse_strict(data)


def _parse_strict(data: Bytes) -> dict[str, Any]:
    try:
        value = _decoder.decode(data.decode())
        # Half of a surrogate pair is not a character, and cannot be encoded in a reply.
        if SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except ApiError:
        raise
    except (ValueError, RecursionError) as error:
        position = ""
        if isinstance(error, json.JSONDecodeError):
            position = f" (line {error.lineno}, column {error.colno})"
        raise invalid_field(None, f"the body is not valid JSON{position}", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid_field(None, "the body must be a JSON object", "invalid_json")
    return value


def _parse_fast(data: Bytes) -> dict[str, Any] | None:
    """Parse a JSON object much faster than `parse` can, or return None if it may break a rule.

    A colon follows each name. If the encoded value has as many colons as the input, the parser
    dropped no duplicate name. Colons in strings occur in both, unless they are escaped.
    """
    if LONG_NUMBER.search(data) or ESCAPED_COLON in data:
        return None
    try:
        value = _decode(data)
        is_same = type(value) is dict and _encode(value).count(b":") == data.count(b":")
        return value if is_same else None
    except (ValueError, RecursionError):
        return None


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        previous_names: set[str] = set()
        for name, _ in pairs:
            if name in previous_names:
                raise invalid_field(name[:64], "a name occurs twice in one object", "invalid_json")
            previous_names.add(name)
    return unique


def _refuse_constant(name: str) -> NoReturn:
    raise invalid_field(None, f"{name} is not valid JSON: numbers must be finite", "invalid_json")


def _bounded_integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise invalid_field(None, "an integer does not fit in 64 bits", "invalid_json")
    return value


_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_decoder = json.JSONDecoder(
    object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant, parse_int=_bounded_integer
)


# ---- types ---------------------------------------------------------------------------------------


def convert(value: dict[str, Any], kind: type[RequestType]) -> tuple[RequestType, dict[str, Any]]:
    """Return the object as a `kind`, and its unknown fields.

    Types are strict, but an integer may be written as 5.0.
    """
    try:
        request = msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        value = {**value, **_whole_numbers(value, kind)}
        try:
            request = msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as error:
            raise type_error(str(error)) from None
    known = _fields(kind)
    unknown = {
        name: field_value
        for name, field_value in value.items()
        if field_value is not None and name not in known
    }
    return request, unknown


def _whole_numbers(value: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, int]:
    """Return the integer fields that are written as floats, such as 5.0, as integers."""
    return {
        name: int(value[name])
        for name in _integer_fields(kind)
        if type(value.get(name)) is float and value[name].is_integer()
    }


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    hints = get_type_hints(kind)
    return frozenset(name for name, hint in hints.items() if int in get_args(hint))


@cache
def _fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


JSON_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "|": "or"}


def type_error(message_text: str) -> ApiError:
    """Translate an error of msgspec to the terms of JSON.

    An example is "Expected `int | null`, got `str` - at `$.messages[3].content`".
    """
    message_text, _, location = message_text.partition(" - at ")
    path = (
        re.sub(r"\[(\d+|\.\.\.)\]", r".\1", location.strip("`"))
        .lstrip("$.")
        .replace(".....", "")
        .removesuffix("....")
    )
    # Every field may be null, so the message need not mention it.
    message = (
        message_text.replace("`", "").replace("Expected", "expected", 1).replace(" | null", "", 1)
    )
    message = re.sub(
        r"\b(str|int|float|bool)\b|\|", lambda match: JSON_WORDS[match.group()], message
    )
    return invalid_field(path or None, f"{path or 'the body'}: {message}")
