"""What a client says its text must match, in OpenAI's words or in vLLM's, as one StructuredOutputs. Compiles nothing.

response_format       {"type": "text" | "json_object" | "json_schema", "json_schema": {"name", "schema", "strict"}}
structured_outputs    {"json" | "regex" | "choice" | "grammar" | "json_object": ...}
guided_json, ...      the same, as older clients say it
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from octavo.errors import InvalidRequest
from octavo.params import KINDS, StructuredOutputs
from octavo.serve.errors import bad, unsupported
from octavo.serve.limits import Limits
from octavo.serve.protocol import Common

FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
# What vLLM's structured_outputs has besides, at the values that ask for nothing: whitespace is never free here.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (True, False),
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (False,),
}


_values = attrgetter(*FIELDS)
_NONE = (None,) * len(FIELDS)


def field(body: Common) -> str | None:
    """The field that asks for a structure."""
    if _values(body) == _NONE:  # most
        return None
    return next((name for name in FIELDS if _asks(name, getattr(body, name))), None)


def _asks(name: str, value: Any) -> bool:
    return value is not None and not (name == "response_format" and value.get("type") == "text")


def read(body: Common, limits: Limits) -> StructuredOutputs | None:
    if _values(body) == _NONE:
        return None
    given = [name for name in FIELDS if _asks(name, getattr(body, name))]
    if not given:
        return None
    name = given[0]
    if len(given) > 1:
        raise bad(given[1], f"{given[1]} and {name} both say what the text must match: give one")
    value = getattr(body, name)
    if name == "response_format":
        found = _response_format(value)
    elif name == "structured_outputs":
        found = {key: given for key, given in value.items() if given is not None}
    else:
        found = {name.removeprefix("guided_"): value}
    for key in [key for key in found if key not in KINDS]:
        if found.pop(key) not in HARMLESS.get(key, ()):
            raise unsupported(f"{name}.{key[:64]}", f"use one of {', '.join(KINDS)}")
    try:
        spec = StructuredOutputs(**found)
    except InvalidRequest as error:
        raise bad(name, str(error)) from None
    size = sum(map(len, spec.choice or ())) + sum(
        len(str(text)) for text in (spec.json, spec.regex, spec.grammar) if text
    )
    if size > limits.structure_bytes:
        raise bad(
            name,
            f"{name} has {size} characters, but at most {limits.structure_bytes} are taken",
            "param_out_of_range",
        )
    return spec


def _response_format(value: dict[str, Any]) -> dict[str, Any]:
    """`strict` changes nothing: a schema is always followed, and one that cannot be is refused."""
    kind = value.get("type")
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise bad(
            "response_format.type",
            f"response_format.type must be text, json_object or json_schema, got {kind!r:.64}",
        )
    schema = value.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise bad(
            "response_format.json_schema.schema",
            "response_format needs a JSON schema in json_schema.schema: an object",
        )
    return {"json": schema["schema"]}
