"""Reads the spec of structured output from a request, in the forms of several APIs.

response_format       OpenAI: {"type": "text" | "json_object" | "json_schema", "json_schema":
                      {"name", "schema", "strict"}}. Clients of other servers send a schema as
                      `schema` or `value`, and the types json, regex, grammar and
                      structural_tag (octavo/text/structural_tags.py).
structured_outputs    vLLM: {"json" | "regex" | "choice" | "grammar" | "json_object": ...}
guided_json, ...      the same in the form of older clients of vLLM
json_schema, ...      the same in the form of clients of llama.cpp, SGLang and TGI

The result is one StructuredOutputs. Nothing is compiled here.
"""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any

from octavo.errors import InvalidRequest
from octavo.params import KINDS, StructuredOutputs
from octavo.serve.api.api_errors import invalid_field, unsupported
from octavo.serve.api.protocol import Common
from octavo.serve.limits import Limits
from octavo.text.structural_tags import grammar_of_tags

# The fields that may contain a spec -> the kind of the spec, or None if the value states the kind.
FIELDS: dict[str, str | None] = {
    "response_format": None,
    "structured_outputs": None,
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
OPTIONS = (
    "disable_additional_properties",
    "disable_any_whitespace",
    "disable_fallback",
    "whitespace_pattern",
)
TYPES = "text, json_object, json_schema, json, regex, grammar or structural_tag"

_values = attrgetter(*FIELDS)
_NONE = (None,) * len(FIELDS)


def field(body: Common) -> str | None:
    """Return the first field that contains a spec, or None."""
    return next(iter(fields(body)), None)


def fields(body: Common) -> list[str]:
    """Return the fields that contain a spec."""
    values = _values(body)
    if values == _NONE:  # Most requests have none.
        return []
    return [name for name, value in zip(FIELDS, values, strict=True) if _is_given(name, value)]


def _is_given(name: str, value: Any) -> bool:
    return value is not None and not (name == "response_format" and value.get("type") == "text")


def read(body: Common, limits: Limits) -> StructuredOutputs | None:
    """Return the spec of a request, or None.

    Several fields may contain the same spec. Raises ApiError if they contain different ones.
    """
    if body.guided_whitespace_pattern == "":
        raise invalid_field(
            "guided_whitespace_pattern", "guided_whitespace_pattern must be a non-empty regex"
        )
    combined: StructuredOutputs | None = None
    names = fields(body)
    for name in names:
        spec = _read_field(name, getattr(body, name), body.guided_whitespace_pattern, limits)
        if combined is not None and not _is_same(combined, spec):
            raise invalid_field(
                name, f"{name} and {names[0]} specify different outputs: remove one of them"
            )
        combined = combined or spec
    return combined


def _read_field(name: str, value: Any, whitespace: str | None, limits: Limits) -> StructuredOutputs:
    limit = limits.structure_bytes
    if larger_than(value, limit):
        message = f"{name} can have at most {limit} characters as JSON: shorten it"
        raise invalid_field(name, message, "param_out_of_range")
    kind = FIELDS[name]
    if name == "structured_outputs":
        options = {key: part for key, part in value.items() if part is not None}
        for key in options:
            if key not in KINDS and key not in OPTIONS:
                raise unsupported(f"{name}.{key[:64]}", f"use one of {', '.join(KINDS)}")
    elif kind is None or (name == "grammar" and isinstance(value, dict)):
        options = _typed(name, value)
    else:
        options = {kind: value}
    if whitespace is not None and ("json" in options or "json_object" in options):
        options.setdefault("whitespace_pattern", whitespace)
    try:
        return StructuredOutputs(**options)
    except InvalidRequest as error:
        raise invalid_field(name, str(error)) from None


def larger_than(value: Any, limit: int) -> bool:
    """Return whether a JSON value has more than `limit` characters. Stops counting at the limit."""
    size = 0
    uncounted = [value]
    while uncounted and size <= limit:
        part = uncounted.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            size += 2 + sum(map(len, part)) + 3 * len(part)
            uncounted += part.values() if size <= limit else ()
        elif isinstance(part, list):
            size += 2 + len(part)
            uncounted += part if size <= limit else ()
        else:
            size += 1
    return size > limit


def _typed(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return the spec in a value that has a `type`.

    `strict` has no effect: the reply always matches a schema, and an unsupported schema is refused.
    """
    kind = value.get("type")
    if kind == "regex":
        return {"regex": _content(name, value, "regex", "value", "pattern")}
    if kind == "grammar":
        return {"grammar": _content(name, value, "grammar", "value")}
    if kind == "structural_tag":
        return {"grammar": _tag_grammar(name, value)}
    if kind == "json_object":
        schema = _first_member(value, "schema", "value")
        return {"json_object": True} if schema is None else {"json": schema}
    if kind == "json":
        return {"json": _content(name, value, "schema", "value")}
    if kind != "json_schema":
        raise invalid_field(f"{name}.type", f"{name}.type must be {TYPES}, got {kind!r:.64}")
    outer = value.get("json_schema", value.get("value"))
    inner = outer.get("schema") if isinstance(outer, dict) else None
    if outer is None:
        inner = value.get("schema")
    if not isinstance(inner, dict):
        raise invalid_field(
            f"{name}.json_schema.schema",
            f"{name} needs a JSON schema: json_schema.schema must be an object",
        )
    return {"json": inner}


def _tag_grammar(name: str, value: dict[str, Any]) -> str:
    try:
        return grammar_of_tags(value.get("structures"), value.get("triggers"))
    except InvalidRequest as error:
        raise invalid_field(name, f"{name}: {error}") from None


def _first_member(value: dict[str, Any], *keys: str) -> Any:
    """Return the first of these members that is not null, or None."""
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _content(name: str, value: dict[str, Any], *keys: str) -> Any:
    """Return the spec, which is the first of these members. Raises ApiError if there is none."""
    content = _first_member(value, *keys)
    if content is None:
        raise invalid_field(
            f"{name}.{keys[0]}", f"{name} of type {value['type']} needs {' or '.join(keys)}"
        )
    return content


def _is_same(first: StructuredOutputs, second: StructuredOutputs) -> bool:
    """Return whether two specs are equal. Schemas are compared as values, with ordered keys."""
    if first.key == second.key:
        return True
    if first.json is None or second.json is None or first.key[2:] != second.key[2:]:
        return False
    try:
        first_schema = json.loads(str(first.json))
        second_schema = json.loads(str(second.json))
        return json.dumps(first_schema) == json.dumps(second_schema)
    except (ValueError, RecursionError):
        return False
