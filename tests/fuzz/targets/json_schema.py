"""JSON schemas for structured output."""

from __future__ import annotations

import json

from tests.fuzz.specs import MAX_BYTES, check

__all__ = ["MAX_BYTES", "SEEDS", "WORDS", "one_input"]

SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9.5}, "minItems": 1, "maxItems": 3},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"anyOf": [{"const": "x"}, {"type": "boolean"}, {"type": "null"}]},
    {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}},
    {"allOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 5, "pattern": "^[a-f]+$"}]},
    {"type": "string", "format": "date-time"},
    {"type": "integer", "multipleOf": 3, "exclusiveMinimum": 5, "exclusiveMaximum": 50},
    {"type": "object", "additionalProperties": {"type": "string"}, "patternProperties": {"^x-": {"type": "integer"}}},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "uniqueItems": False},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}}, {"type": "object", "properties": {"k": {"const": "b"}}}]},
    {"type": ["string", "null"], "default": "x", "title": "t", "description": "d", "examples": ["a"]},
    {"$id": "https://x/y", "$anchor": "here", "properties": {"a": {"$ref": "#here"}}, "minProperties": 1},
]  # fmt: skip
SEEDS = [json.dumps(schema).encode() for schema in SCHEMAS]
WORDS = [
    b"type", b"object", b"array", b"string", b"number", b"integer", b"boolean", b"null", b"properties", b"required", b"items", b"prefixItems",
    b"additionalProperties", b"patternProperties", b"propertyNames", b"minItems", b"maxItems", b"minLength", b"maxLength", b"pattern", b"format",
    b"enum", b"const", b"anyOf", b"allOf", b"oneOf", b"not", b"if", b"then", b"else", b"$ref", b"#", b"#/$defs/a", b"#/properties/a", b"$defs",
    b"$id", b"$anchor", b"$dynamicRef", b"$schema", b"minimum", b"maximum", b"exclusiveMinimum", b"multipleOf", b"uniqueItems", b"contains",
    b"minProperties", b"maxProperties", b"unevaluatedProperties", b"x-guidance", b"whitespace_flexible", b"date", b"uuid", b"email", b"ipv6",
    b"^(a|b)*$", b"[a-z]{1,1000}", b"\\\\d+", b"(?=a)", b"true", b"false", b"1e308", b"-1", b"99999999",
]  # fmt: skip


def one_input(data: bytes) -> object:
    return check(json=data.decode(errors="replace"))
