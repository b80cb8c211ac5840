"""Converts values that are not JSON to JSON: Python's literals, Gemma's notation, text in tags.

Nothing here runs code. The time is linear in the text, and nesting is bounded.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 100
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
CLOSING = {"[": "]", "(": ")", "{": "}"}
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[^\W\d][\w.-]*")
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_QUOTED = re.compile(r"\"((?:[^\"\\]|\\.)*+)\"|'((?:[^'\\]|\\.)*+)'", re.DOTALL)


class NotALiteral(ValueError):
    """The text is not a value in this notation."""


class LiteralReader:
    """Reads values from a text. `quote` replaces Python's quotation marks. The keys of objects then
    have no quotation marks."""

    def __init__(self, text: str, quote: str = ""):
        self._text = text
        self._quote = quote
        self._pos = 0

    def value(self) -> Any:
        """Read the whole text as one value."""
        found = self._value(0)
        self._end()
        return found

    def members(self, between: str) -> dict[str, Any]:
        """Read the whole text as names and values: `name=value, ...` or `name: value, ...`. A value
        that is not a literal is a string without quotation marks."""
        return self._members(between, "", 0)

    # ---- pieces ----

    def _peek(self) -> str:
        found = _SPACE.match(self._text, self._pos)
        assert found is not None
        self._pos = found.end()
        return self._text[self._pos : self._pos + 1]

    def _take(self, mark: str) -> bool:
        if self._peek() != mark:
            return False
        self._pos += 1
        return True

    def _end(self) -> None:
        if self._peek():
            raise NotALiteral

    def _members(self, between: str, close: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._closed(close):
            key = self._string()
            if key is None:
                key = self._word()
            if not self._take(between):
                raise NotALiteral
            found[key] = self._value(depth + 1) if close else self._value_or_text()
            if not self._take(",") and not self._closed(close, keep=True):
                raise NotALiteral
        return found

    def _value_or_text(self) -> Any:
        """Read a value up to a comma or the end."""
        begin = self._pos
        try:
            value = self._value(1)
            if self._peek() in ("", ","):
                return value
        except NotALiteral:
            pass
        end = self._text.find(",", begin)
        self._pos = end if end >= 0 else len(self._text)
        return self._text[begin : self._pos].strip()

    def _items(self, close: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._closed(close):
            found.append(self._value(depth + 1))
            if not self._take(",") and not self._closed(close, keep=True):
                raise NotALiteral
        return found

    def _closed(self, close: str, keep: bool = False) -> bool:
        """Whether the closing mark comes next. Without a mark, the end of the text closes."""
        if self._peek() != close:
            return False
        if not keep:
            self._pos += len(close)
        return True

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NotALiteral
        text = self._string()
        if text is not None:
            return text
        mark = self._peek()
        if mark in CLOSING:
            self._pos += 1
            if mark == "{":
                return self._members(":", "}", depth)
            return self._items(CLOSING[mark], depth)
        number = _NUMBER.match(self._text, self._pos)
        if number is not None:
            self._pos = number.end()
            return _number(number[0])
        word = self._word()
        if word not in WORDS:
            raise NotALiteral
        return WORDS[word]

    def _word(self) -> str:
        self._peek()
        found = _WORD.match(self._text, self._pos)
        if found is None:
            raise NotALiteral
        self._pos = found.end()
        return found[0]

    def _string(self) -> str | None:
        """Read a quoted string, if one comes next."""
        self._peek()
        if self._quote:
            if not self._text.startswith(self._quote, self._pos):
                return None
            begin = self._pos + len(self._quote)
            end = self._text.find(self._quote, begin)
            if end < 0:
                raise NotALiteral
            self._pos = end + len(self._quote)
            return self._text[begin:end]
        found = _QUOTED.match(self._text, self._pos)
        if found is None:
            return None
        self._pos = found.end()
        text = next(group for group in found.groups() if group is not None)
        return _with_whole_characters(_ESCAPE.sub(_unescaped, text))


def _number(text: str) -> int | float:
    if len(text) > 300:
        raise NotALiteral
    try:
        return int(text)
    except ValueError:
        return float(text)


def _unescaped(found: re.Match[str]) -> str:
    digits = found[1] or found[2] or found[3]
    if digits:
        code = int(digits, 16)
        return chr(code) if code < 0x110000 else found[0]
    return ESCAPES.get(found[4], found[4] if found[4] in "\\'\"" else found[0])


# ---- as JSON ----


def keywords_as_json(text: str) -> str | None:
    """Convert Python's keyword arguments to a JSON object. Return None for any other text."""
    return _object(text, "", "=")


def members_as_json(text: str, quote: str) -> str | None:
    """Convert the members of an object, whose strings are between two `quote`s, to a JSON object.
    Return None for any other text."""
    return _object(text, quote, ":")


def _object(text: str, quote: str, between: str) -> str | None:
    reader = LiteralReader(text, quote)
    try:
        return to_json(reader.members(between))
    except ValueError:
        return None


def to_json(value: Any) -> str:
    """Return JSON that can be sent. A lone surrogate becomes U+FFFD."""
    return _with_whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _with_whole_characters(text: str) -> str:
    """Replace each pair of surrogates by its character."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_as_json(text: str, schema: Any) -> str:
    """Convert a parameter in plain text to JSON of the type in the schema. Without a schema, a text
    that is JSON or a Python literal becomes that value, and any other text becomes a string."""
    types = _types(schema)
    if is_string_schema(schema):
        return to_json(text)
    for read in (_read_json, _read_python):
        try:
            value = read(text)
        except (ValueError, RecursionError):
            continue
        if not types or _is_any(value, types):
            return to_json(value)
    return to_json(text)


def parameters_of(schema: Any) -> dict[str, Any]:
    """Return the schemas of an object's properties by name. A definition replaces each reference to
    it."""
    found = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(found, dict):
        return {}
    return {name: _dereferenced(own, schema) for name, own in found.items()}


def _dereferenced(schema: Any, root: dict[str, Any]) -> Any:
    for _ in range(5):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        parts = reference.split("/") if isinstance(reference, str) else []
        if len(parts) != 3 or parts[0] != "#":
            break
        definitions = root.get(parts[1])
        if not isinstance(definitions, dict) or parts[2] not in definitions:
            break
        schema = definitions[parts[2]]
    return schema


def is_string_schema(schema: Any) -> bool:
    """Whether a schema allows nothing but strings."""
    return _types(schema) == {"string"}


def _read_json(text: str) -> Any:
    def refuse(word: str) -> None:
        raise NotALiteral

    return json.loads(text, parse_constant=refuse)


def _read_python(text: str) -> Any:
    value = LiteralReader(text.strip()).value()
    if isinstance(value, str):
        raise NotALiteral  # quotation marks belong to a text
    return value


def _is_any(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, KINDS[name]) for name in types)


def _types(schema: Any, depth: int = 0) -> set[str]:
    """Return the types that a schema allows. The set is empty if the schema names no type."""
    if not isinstance(schema, dict) or depth > 5:
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list):
        return {name for name in given if isinstance(name, str) and name in KINDS}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found = [_types(one, depth + 1) for one in schema[name]]
            return set().union(*found) if all(found) else set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return {"string"}
    return set()
