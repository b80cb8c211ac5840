"""Encodes messages between processes of the engine as bytes. Nothing is pickled.

    encode(message)          message -> bytes
    decode(data, Plan)       bytes -> message, which must be a Plan

A message is a NamedTuple or a dataclass. The declared types of its fields decide how it is encoded.
A value of another type is a MessageError that names the field. A field may have these types:

    bool, int, float, str, bytes, None, array, Path, enums
    list, tuple, set, frozenset, dict      of declared types
    NamedTuples and dataclasses            with such fields
    A | B                                  one of these types
    Any                                    what JSON can express

The server does not need this module: it encodes its messages with msgspec (octavo/serve/channel).

The encoding is JSON, followed by the bytes of bytes and arrays. All values of a field are a column:
the slots of all items of a plan are one list. So the number of calls depends on the number of
fields, and not on the number of items.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from enum import EnumMeta
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from octavo.errors import MessageError

JSON_TYPES = {bool, int, float, str, NoneType}
# Python 3.11 cannot evaluate array[int], which declarations contain.
ARRAY_HINTS = {"array": {int: array, float: array}}


def encode(message: Any) -> bytes:
    """Return a message as bytes: the length of the JSON, the JSON, and the buffers."""
    message_class: Any = type(message)
    buffers: list[bytes] = []
    content = message_codec(message_class).write([message], buffers)
    header = json.dumps([message_class.__name__, content, list(map(len, buffers))]).encode()
    return b"".join([len(header).to_bytes(4, "little"), header, *buffers])


def decode(data: bytes, *classes: type) -> Any:
    """Return the message. It must belong to one of the classes."""
    start = 4 + int.from_bytes(data[:4], "little")
    try:
        name, content, sizes = json.loads(data[4:start])
        buffers = iter(slices(data[start:], sizes))
    except (ValueError, TypeError) as error:
        raise MessageError(f"this is not a message: {error}") from None
    for message_class in classes:
        if message_class.__name__ == name:
            (message,) = message_codec(message_class).read(content, buffers)
            return message
    names = " or ".join(message_class.__name__ for message_class in classes)
    raise MessageError(f"{names} was expected, not {name!r:.60}")


def slices(joined: Any, sizes: Iterable[int]) -> list[Any]:
    """Divide a sequence into parts of these sizes."""
    parts = []
    start = 0
    for size in sizes:
        parts.append(joined[start : start + size])
        start += size
    if start != len(joined):
        raise ValueError(f"{start} values were expected, not {len(joined)}")
    return parts


@dataclass
class Codec:
    """Encodes and decodes a column. The base class is for values that JSON has."""

    field: str
    kinds: tuple[type, ...]

    def write(self, column: Sequence[Any], buffers: list[bytes]) -> Any:
        """Return the column as JSON. Bytes are added to the buffers."""
        self.check(column)
        try:
            return self.to_json(column, buffers)
        except (ValueError, TypeError, RecursionError) as error:
            raise MessageError(f"{self.field} cannot be encoded: {error}") from None

    def read(self, content: Any, buffers: Iterator[bytes]) -> list[Any]:
        """Return the column."""
        try:
            column = self.from_json(content, buffers)
        except (ValueError, TypeError, LookupError, StopIteration) as error:
            raise MessageError(f"{self.field} cannot be decoded: {error!r}") from None
        self.check(column)
        return column

    def check(self, column: Sequence[Any]) -> None:
        for found in set(map(type, column)):
            if not self.accepts(found):
                raise MessageError(f"{self.field} cannot be of the type {found.__name__}")

    def accepts(self, found: type) -> bool:
        if found is bool:
            return bool in self.kinds or object in self.kinds
        return issubclass(found, self.kinds) or (found is int and float in self.kinds)

    def to_json(self, column: Sequence[Any], buffers: list[bytes]) -> Any:
        return list(column)

    def from_json(self, content: Any, buffers: Iterator[bytes]) -> list[Any]:
        return list(content)


class BytesCodec(Codec):
    def to_json(self, column: Sequence[Any], buffers: list[bytes]) -> Any:
        buffers.append(b"".join(column))
        return list(map(len, column))

    def from_json(self, content: Any, buffers: Iterator[bytes]) -> list[Any]:
        return slices(next(buffers), content)


@dataclass
class ListCodec(Codec):
    element: Codec

    def to_json(self, column: Sequence[Any], buffers: list[bytes]) -> Any:
        elements = list(chain.from_iterable(column))
        return list(map(len, column)), elements and self.element.write(elements, buffers)

    def from_json(self, content: Any, buffers: Iterator[bytes]) -> list[Any]:
        sizes, elements = content
        return slices(elements and self.element.read(elements, buffers), sizes)


@dataclass
class TupleCodec(Codec):
    members: list[Codec]

    def to_json(self, column: Sequence[Any], buffers: list[bytes]) -> Any:
        if set(map(len, column)) != {len(self.members)}:
            raise ValueError(f"a tuple does not have {len(self.members)} values")
        columns = zip(*column, strict=True)
        pairs = zip(self.members, columns, strict=True)
        return [codec.write(values, buffers) for codec, values in pairs]

    def from_json(self, content: Any, buffers: Iterator[bytes]) -> list[Any]:
        pairs = zip(self.members, content, strict=True)
        columns = [codec.read(values, buffers) for codec, values in pairs]
        return list(zip(*columns, strict=True))


@dataclass
class UnionCodec(Codec):
    """The index of the member to which each value belongs, and a column for each member."""

    members: list[Codec]

    def accepts(self, found: type) -> bool:
        return any(member.accepts(found) for member in self.members)

    def to_json(self, column: Sequence[Any], buffers: list[bytes]) -> Any:
        types = list(map(type, column))
        index_of = {
            found: [member.accepts(found) for member in self.members].index(True)
            for found in set(types)
        }
        indexes = [index_of[found] for found in types]
        columns: list[list[Any]] = [[] for _ in self.members]
        for index, value in zip(indexes, column, strict=True):
            columns[index].append(value)
        pairs = zip(self.members, columns, strict=True)
        return indexes, [values and codec.write(values, buffers) for codec, values in pairs]

    def from_json(self, content: Any, buffers: Iterator[bytes]) -> list[Any]:
        indexes, columns = content
        pairs = zip(self.members, columns, strict=True)
        values = [iter(column and codec.read(column, buffers)) for codec, column in pairs]
        return [next(values[index]) for index in indexes]


@dataclass
class ConvertedCodec(Codec):
    """Encodes values as values of another type, and converts each of them."""

    other: Codec
    convert: Callable[[Any], Any]
    restore: Callable[[Any], Any]

    def to_json(self, column: Sequence[Any], buffers: list[bytes]) -> Any:
        return self.other.write(list(map(self.convert, column)), buffers)

    def from_json(self, content: Any, buffers: Iterator[bytes]) -> list[Any]:
        return list(map(self.restore, self.other.read(content, buffers)))


@cache
def message_codec(message_class: Any) -> Codec:
    return codec_of(message_class, message_class.__name__)


def codec_of(hint: Any, field: str) -> Codec:
    """Return the codec for a declared type."""
    kind = get_origin(hint) or hint
    arguments = get_args(hint)
    if kind in (Union, UnionType):
        if JSON_TYPES.issuperset(arguments):
            return Codec(field, arguments)
        return UnionCodec(field, (), [codec_of(argument, field) for argument in arguments])
    if kind in JSON_TYPES:
        return Codec(field, (kind,))
    if kind is bytes:
        return BytesCodec(field, (kind,))
    if kind is list:
        return ListCodec(field, (kind,), codec_of(arguments[0], field))
    if kind is tuple and arguments[1:] != (...,):
        return TupleCodec(field, (tuple,), [codec_of(each, field) for each in arguments])
    return ConvertedCodec(field, (object if kind is Any else kind,), *conversion(hint, field))


def conversion(hint: Any, field: str) -> tuple[Codec, Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the codec of another type, and the functions that convert values to it and back."""
    kind: Any = get_origin(hint) or hint
    arguments = get_args(hint)
    if kind is Any:
        return codec_of(str, field), json.dumps, json.loads
    if kind is Path:
        return codec_of(str, field), str, Path
    if isinstance(kind, EnumMeta):
        return codec_of(str, field), lambda member: member.name, kind.__getitem__
    if kind is array:
        pairs = codec_of(tuple[str, bytes], field)
        return pairs, typed_bytes, lambda pair: array(*pair)
    if kind is dict:
        entry = TupleCodec(field, (tuple,), [codec_of(each, field) for each in arguments])
        return ListCodec(field, (list,), entry), lambda entries: list(entries.items()), dict
    if kind in (set, frozenset, tuple):
        return ListCodec(field, (list,), codec_of(arguments[0], field)), list, kind
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = get_type_hints(kind, localns=ARRAY_HINTS)
        members = [codec_of(own, f"{field}.{name}") for name, own in hints.items()]
        values = TupleCodec(field, (tuple,), members)
        if is_dataclass(kind):
            names = list(hints)
            return values, partial(field_values, names), partial(restore_dataclass, kind, names)
        return values, tuple, kind._make
    raise TypeError(f"{field} is declared as {hint}, which a message cannot contain")


def typed_bytes(numbers: array[Any]) -> tuple[str, bytes]:
    return numbers.typecode, numbers.tobytes()


def field_values(names: list[str], record: Any) -> tuple[Any, ...]:
    return tuple([getattr(record, name) for name in names])


def restore_dataclass(kind: Any, names: list[str], values: tuple[Any, ...]) -> Any:
    """Return a dataclass without calling __init__, because its sender has validated it."""
    record: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)
    return record
