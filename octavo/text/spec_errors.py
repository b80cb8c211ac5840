"""Error messages for structured output specs: the reason, and the location in a schema."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from octavo.errors import InvalidRequest
from octavo.params import StructuredOutputs

SPEC_NAMES = {
    "json": "the JSON schema",
    "regex": "the regex",
    "choice": "the choice",
    "grammar": "the grammar",
    "json_object": "JSON",
}


class SpecError(ValueError):
    """A spec cannot be used. `pointer` is the JSON pointer to the cause, if it is known."""

    def __init__(self, message: str, pointer: str = ""):
        super().__init__(message)
        self.pointer = pointer


def compilation_timed_out(spec: StructuredOutputs, seconds: float) -> InvalidRequest:
    return InvalidRequest(
        f"{SPEC_NAMES[spec.kind]} was not compiled within {seconds:g} s: simplify it",
        "structured_outputs",
        "structured_output_timeout",
    )


def unusable_spec(spec: StructuredOutputs, reason: str, pointer: str = "") -> InvalidRequest:
    if not pointer and spec.json is not None:
        with suppress(ValueError, RecursionError):
            schema = json.loads(str(spec.json))
            pointer = locate_error(schema, reason.replace("Pointer '", "Pointer '#"))
    if "Enable 'coerce_one_of'" in reason:
        reason = "oneOf whose branches could match at the same time is not supported: use anyOf"
    elif reason.startswith("panic"):
        reason = "it is too large"
    elif reason.startswith("Expecting object schema"):
        reason = "a schema must be an object"
    reason = reason.replace("Unimplemented keys:", "not supported:")
    if len(pointer) > 200:
        pointer = f"{pointer[:100]} ... {pointer[-80:]}"
    location = f" (at {pointer})" if pointer else ""
    return InvalidRequest(
        f"{SPEC_NAMES[spec.kind]} cannot be used: {shorten(reason)}{location}",
        "structured_outputs",
        "invalid_structured_output",
    )


def shorten(message: str) -> str:
    message = message.replace("<non-verbose/>", "").strip()
    return message if len(message) <= 600 else f"{message[:500]} ... {message[-80:]}"


# Messages of llguidance quote the value of a keyword in this form.
QUOTED_VALUES = {"type": "type: {}", "format": "format: {}", "pattern": "{}\n", "$ref": "'{}'"}
NAME_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")  # map names to schemas
VALUE_KEYWORDS = ("enum", "const", "default", "examples")  # contain values, not schemas


def locate_error(
    schema: Any, message: str, pointer: str = "#", keys_are_names: bool = False
) -> str:
    """Return the JSON pointer to the first location that an error message names, or "".

    `keys_are_names` says that the keys at this level are names of properties, not keywords.
    """
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            location = locate_error(item, message, f"{pointer}/{index}")
            if location:
                return location
    if not isinstance(schema, dict):
        return ""
    if not keys_are_names:
        for keyword, value in schema.items():
            if _is_quoted(keyword, value, message):
                return f"{pointer}/{keyword}"
    for key, value in schema.items():
        if keys_are_names or key not in VALUE_KEYWORDS:
            holds_names = not keys_are_names and key in NAME_KEYWORDS
            escaped_key = key.replace("~", "~0").replace("/", "~1")
            location = locate_error(value, message, f"{pointer}/{escaped_key}", holds_names)
            if location:
                return location
    return ""


def _is_quoted(keyword: str, value: Any, message: str) -> bool:
    """Return whether an error message quotes a keyword or its value."""
    if f'"{keyword}"' in message:
        return True
    if keyword not in QUOTED_VALUES or not isinstance(value, str):
        return False
    return QUOTED_VALUES[keyword].format(value) in message
