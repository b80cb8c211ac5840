"""Converts values in other notations to JSON: Python's literals, Gemma's notation, text in tags.

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
TYPES_BY_NAME: dict[str, tuple[type, ...]] = {
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
    """A text is not a value in the notation that was expected."""


class LiteralReader:
    """Parses values in Python's notation. With a `quote`, strings stand between two `quote`s, and
    the keys of objects have no quotation marks."""

    def __init__(self, text: str, quote: str = ""):
        self._text = text
        self._quote = quote
        self._pos = 0

    def value(self) -> Any:
        """Parse the text as one value."""
        value = self._read_value(0)
        self._check_end()
        return value

    def members(self, separator: str) -> dict[str, Any]:
        """Parse the text as names and values: `name=value, ...` or `name: value, ...`. A value that
        is not a literal is a string without quotation marks."""
        return self._read_members(separator, "", 0)

    # ---- reading one part of the text ----

    def _peek_character(self) -> str:
        """Skip white space and return the next character, or "" at the end of the text."""
        space = _SPACE.match(self._text, self._pos)
        assert space is not None
        self._pos = space.end()
        return self._text[self._pos : self._pos + 1]

    def _read_mark(self, mark: str) -> bool:
        """Read this character and return True if it comes next. "" means the end of the text."""
        if self._peek_character() != mark:
            return False
        self._pos += len(mark)
        return True

    def _check_end(self) -> None:
        if self._peek_character():
            raise NotALiteral

    def _read_members(self, separator: str, closing_mark: str, depth: int) -> dict[str, Any]:
        """Read members up to the closing mark, or up to the end of the text without one."""
        members: dict[str, Any] = {}
        while not self._read_mark(closing_mark):
            key = self._read_string()
            if key is None:
                key = self._read_word()
            if not self._read_mark(separator):
                raise NotALiteral
            members[key] = (
                self._read_value(depth + 1) if closing_mark else self._read_value_or_text()
            )
            if not self._read_mark(",") and self._peek_character() != closing_mark:
                raise NotALiteral
        return members

    def _read_value_or_text(self) -> Any:
        """Read a literal, or the plain text up to the next comma or the end."""
        start = self._pos
        try:
            value = self._read_value(1)
            if self._peek_character() in ("", ","):
                return value
        except NotALiteral:
            pass
        end = self._text.find(",", start)
        self._pos = end if end >= 0 else len(self._text)
        return self._text[start : self._pos].strip()

    def _read_items(self, closing_mark: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._read_mark(closing_mark):
            items.append(self._read_value(depth + 1))
            if not self._read_mark(",") and self._peek_character() != closing_mark:
                raise NotALiteral
        return items

    def _read_value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NotALiteral
        text = self._read_string()
        if text is not None:
            return text
        mark = self._peek_character()
        if mark in CLOSING:
            self._pos += 1
            if mark == "{":
                return self._read_members(":", "}", depth)
            return self._read_items(CLOSING[mark], depth)
        number = _NUMBER.match(self._text, self._pos)
        if number is not None:
            self._pos = number.end()
            return _number(number[0])
        word = self._read_word()
        if word not in WORDS:
            raise NotALiteral
        return WORDS[word]

    def _read_word(self) -> str:
        self._peek_character()
        match = _WORD.match(self._text, self._pos)
        if match is None:
            raise NotALiteral
        self._pos = match.end()
        return match[0]

    def _read_string(self) -> str | None:
        """Read a quoted string, if one comes next."""
        self._peek_character()
        if self._quote:
            if not self._text.startswith(self._quote, self._pos):
                return None
            start = self._pos + len(self._quote)
            end = self._text.find(self._quote, start)
            if end < 0:
                raise NotALiteral
            self._pos = end + len(self._quote)
            return self._text[start:end]
        match = _QUOTED.match(self._text, self._pos)
        if match is None:
            return None
        self._pos = match.end()
        text = next(group for group in match.groups() if group is not None)
        return _without_surrogates(_ESCAPE.sub(_unescaped, text))


def _number(text: str) -> int | float:
    if len(text) > 300:
        raise NotALiteral
    try:
        return int(text)
    except ValueError:
        return float(text)


def _unescaped(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits:
        code = int(digits, 16)
        return chr(code) if code < 0x110000 else escape[0]
    character = escape[4]
    if character in ESCAPES:
        return ESCAPES[character]
    return character if character in "\\'\"" else escape[0]


# ---- as JSON ----


def keywords_as_json(text: str) -> str | None:
    """Convert Python's keyword arguments to a JSON object. Return None for any other text."""
    return _object(text, "", "=")


def members_as_json(text: str, quote: str) -> str | None:
    """Convert the members of an object, whose strings are between two `quote`s, to a JSON object.
    Return None for any other text."""
    return _object(text, quote, ":")


def _object(text: str, quote: str, separator: str) -> str | None:
    reader = LiteralReader(text, quote)
    try:
        return to_json(reader.members(separator))
    except ValueError:
        return None


def to_json(value: Any) -> str:
    """Return JSON that can be encoded as UTF-8. A lone surrogate becomes U+FFFD."""
    return _without_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _without_surrogates(text: str) -> str:
    """Replace each pair of surrogates by its character, and each lone surrogate by U+FFFD."""
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
        if not types or _has_type(value, types):
            return to_json(value)
    return to_json(text)


def parameters_of(schema: Any) -> dict[str, Any]:
    """Return the schemas of an object's properties by name. References to definitions are
    resolved."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {
        name: _dereferenced(property_schema, schema) for name, property_schema in properties.items()
    }


def _dereferenced(schema: Any, root: dict[str, Any]) -> Any:
    for _ in range(5):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        path = reference.split("/") if isinstance(reference, str) else []
        if len(path) != 3 or path[0] != "#":
            break
        definitions = root.get(path[1])
        if not isinstance(definitions, dict) or path[2] not in definitions:
            break
        schema = definitions[path[2]]
    return schema


def is_string_schema(schema: Any) -> bool:
    """Return whether a schema allows only strings."""
    return _types(schema) == {"string"}


def _read_json(text: str) -> Any:
    def refuse(word: str) -> None:
        raise NotALiteral

    return json.loads(text, parse_constant=refuse)


def _read_python(text: str) -> Any:
    value = LiteralReader(text.strip()).value()
    if isinstance(value, str):
        raise NotALiteral  # The quotation marks are part of the parameter's text.
    return value


def _has_type(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, TYPES_BY_NAME[name]) for name in types)


def _types(schema: Any, depth: int = 0) -> set[str]:
    """Return the types that a schema allows. The set is empty if the schema names no type."""
    if not isinstance(schema, dict) or depth > 5:
        return set()
    type_names = schema.get("type")
    if isinstance(type_names, str):
        type_names = [type_names]
    if isinstance(type_names, list):
        return {name for name in type_names if isinstance(name, str) and name in TYPES_BY_NAME}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            branch_types = [_types(branch, depth + 1) for branch in schema[name]]
            return set().union(*branch_types) if all(branch_types) else set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return {"string"}
    return set()
