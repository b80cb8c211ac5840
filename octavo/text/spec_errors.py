"""What is wrong with a spec of structured output, said so that its author can mend it: the reason, and the place in a schema."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from octavo.errors import InvalidRequest
from octavo.params import StructuredOutputs

NAMES = {
    "json": "the JSON schema",
    "regex": "the regex",
    "choice": "the choice",
    "grammar": "the grammar",
    "json_object": "JSON",
}


class SpecError(ValueError):
    """A spec that cannot be followed, and the JSON pointer to the place, if known."""

    def __init__(self, message: str, pointer: str = ""):
        super().__init__(message)
        self.pointer = pointer


def timed_out(spec: StructuredOutputs, seconds: float) -> InvalidRequest:
    return InvalidRequest(
        f"{NAMES[spec.kind]} was not compiled within {seconds:g} s: simplify it",
        "structured_outputs",
        "structured_output_timeout",
    )


def refused(spec: StructuredOutputs, why: str, pointer: str = "") -> InvalidRequest:
    if not pointer and spec.json is not None:
        with suppress(ValueError, RecursionError):
            pointer = locate(json.loads(str(spec.json)), why.replace("Pointer '", "Pointer '#"))
    if "Enable 'coerce_one_of'" in why:
        why = "oneOf whose branches could match at the same time is not supported: use anyOf"
    elif why.startswith("panic"):
        why = "it is too large"
    elif why.startswith("Expecting object schema"):
        why = "a schema is an object"
    why = why.replace("Unimplemented keys:", "not supported:")
    if len(pointer) > 200:
        pointer = f"{pointer[:100]} ... {pointer[-80:]}"
    at = f" (at {pointer})" if pointer else ""
    return InvalidRequest(
        f"{NAMES[spec.kind]} cannot be used: {shorten(why)}{at}",
        "structured_outputs",
        "invalid_structured_output",
    )


def shorten(text: str) -> str:
    text = text.replace("<non-verbose/>", "").strip()
    return text if len(text) <= 600 else f"{text[:500]} ... {text[-80:]}"


# How llguidance's messages quote the value of a keyword.
QUOTED = {"type": "type: {}", "format": "format: {}", "pattern": "{}\n", "$ref": "'{}'"}


def locate(schema: Any, error: str, path: str = "#", names: bool = False) -> str:
    """JSON pointer to the first place in a schema that an error message speaks of, or nothing. `names`: the keys at this
    level are a client's names and no keywords."""
    if isinstance(schema, list):
        return next(
            (
                found
                for i, part in enumerate(schema)
                if (found := locate(part, error, f"{path}/{i}"))
            ),
            "",
        )
    if not isinstance(schema, dict):
        return ""
    for name, value in schema.items() if not names else ():
        if f'"{name}"' in error or (
            name in QUOTED and isinstance(value, str) and QUOTED[name].format(value) in error
        ):
            return f"{path}/{name}"
    for name, value in schema.items():
        if names or name not in ("enum", "const", "default", "examples"):
            held = not names and name in ("properties", "patternProperties", "$defs", "definitions")
            if found := locate(
                value, error, f"{path}/{name.replace('~', '~0').replace('/', '~1')}", held
            ):
                return found
    return ""
