"""Random JSON schemas whose texts are short, and whether a value is valid under one."""

from __future__ import annotations

import random
import re
from typing import Any

WORDS = ["name", "a b", "café", 'quo"te', "back\\slash", "x/y", "日本", "e\u0301", "not", "type"]


def random_schema(g: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = g.choice(
        ["object", "object", "array", "anyOf"]
        if depth == 2
        else ["object", "array", "leaf", "leaf"]
        if depth
        else ["leaf"]
    )
    if kind == "object":
        names = g.sample(WORDS, g.randrange(1, 4))
        properties = {name: random_schema(g, depth - 1) for name in names}
        required = [name for name in names if g.random() < 0.7]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        min_items = g.randrange(0, 2)
        return {
            "type": "array",
            "items": random_schema(g, depth - 1),
            "minItems": min_items,
            "maxItems": min_items + g.randrange(0, 3),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(g, depth - 1) for _ in range(2)]}
    return g.choice(
        [
            {"type": "string", "maxLength": g.randrange(0, 8)},
            {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"},
            {"type": "integer", "minimum": -5, "maximum": g.randrange(10, 10_000)},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": g.sample(WORDS, 3)},
            {"const": {"k": [1, None, g.choice(WORDS)]}},
        ]
    )


def valid(schema: dict[str, Any], value: Any) -> bool:
    """Return whether a value is valid under one of the schemas above."""
    if "anyOf" in schema:
        return any(valid(option, value) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(properties)
            and all(valid(properties[name], part) for name, part in value.items())
        )
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(valid(schema["items"], part) for part in value)
    if kind == "string":
        fits = isinstance(value, str) and len(value) <= schema.get("maxLength", 1000)
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return type(value) is bool if kind == "boolean" else value is None
