"""JSON schemas before they are compiled: how deep they may be, and which of their objects are
closed."""

from __future__ import annotations

import copy
import json
import random
import time
from typing import Any

import pytest

from octavo.text.definition_depth import Definition, chain_depths
from octavo.text.schema import (
    MAX_DEPTH,
    MAX_NESTING,
    close_objects,
    has_open_names,
    read_schema,
)
from octavo.text.spec_errors import SpecError

NULL = {"type": "null"}


def chain(length: int, link: Any, last: Any = NULL) -> str:
    """Definitions that refer to the next one each, in the way that `link` makes of a reference."""
    definitions = {f"r{i}": link({"$ref": f"#/$defs/r{i + 1}"}) for i in range(length)}
    return json.dumps({"$ref": "#/$defs/r0", "$defs": {**definitions, f"r{length}": last}})


LINKS: dict[str, Any] = {
    "properties": lambda ref: {"type": "object", "properties": {"a": ref}},
    "items": lambda ref: {"type": "array", "items": ref},
    "bare references": lambda ref: ref,
    "allOf": lambda ref: {"allOf": [ref, {"type": "object"}]},
    "anyOf": lambda ref: {"anyOf": [ref, NULL]},
    "nested": lambda ref: {"items": {"items": {"items": {"items": ref}}}},
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
def test_a_chain_of_references_has_a_limit(link: Any) -> None:
    read_schema(chain(200, link))
    with pytest.raises(SpecError, match=f"at most {MAX_DEPTH}") as caught:
        read_schema(chain(MAX_DEPTH, link))
    assert caught.value.pointer == "#/$defs/r0"


def test_references_by_anchor_count_too() -> None:
    definitions = {
        f"r{i}": {"$anchor": f"a{i}", "items": {"$ref": f"#a{i + 1}"}} for i in range(1500)
    }
    with pytest.raises(SpecError, match="chain of references"):
        read_schema(json.dumps({"$ref": "#a0", "$defs": definitions}))


def test_recursive_schemas_of_ordinary_size_are_read() -> None:
    """Every definition refers to every other one: a walk may meet them all in one chain."""
    count = 60
    every = [{"$ref": f"#/$defs/r{i}"} for i in range(count)]
    schema = {
        "$defs": {f"r{i}": {"type": "array", "items": {"anyOf": every}} for i in range(count)}
    }
    assert (
        read_schema(json.dumps({**schema, "$ref": "#/$defs/r0"}))["$defs"].keys()
        == schema["$defs"].keys()
    )


@pytest.mark.parametrize("size", [500, 50_000])
def test_nesting_has_a_limit(size: int) -> None:
    for text in (
        '{"items":' * size + "{}" + "}" * size,
        '{"enum":' + "[" * size + "]" * size + "}",
    ):
        with pytest.raises(SpecError, match=f"more than {MAX_NESTING} levels"):
            read_schema(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [("[]", "an object"), ("{x", "line 1 column 2"), ('{"const": NaN}', "NaN is not")],
)
def test_what_is_no_schema_is_refused(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        read_schema(text)


def test_references_that_overlap_do_not_take_long() -> None:
    """Each of the nested parts is referred to, so that each would be measured again and again."""
    deep: dict[str, Any] = {"anyOf": [NULL] * 3000}
    for _ in range(45):
        deep = {"items": deep, "anyOf": [NULL] * 20}
    places = ["#" + "/items" * i for i in range(45)]
    begun = time.monotonic()
    text = json.dumps({**deep, "allOf": [{"$ref": place} for place in places * 20]})
    try:
        read_schema(text)
    except SpecError as error:
        assert "too large" in str(error)
    assert time.monotonic() - begun < 5


def test_chain_depths_bound_every_walk() -> None:
    """Against all simple paths of random small graphs."""
    chance = random.Random(1)
    for _ in range(200):
        names = [str(i) for i in range(chance.randrange(1, 7))]
        graph = {
            name: Definition(
                chance.randrange(1, 5), set(chance.choices(names, k=chance.randrange(3)))
            )
            for name in names
        }

        def longest(name: str, seen: frozenset[str], graph: Any = graph) -> int:
            below = [
                longest(link, seen | {name})
                for link in graph[name].links
                if link not in seen | {name}
            ]
            return int(graph[name].depth) + max(below, default=0)

        depths = chain_depths(graph)
        for name in names:
            assert (
                longest(name, frozenset())
                <= depths[name]
                <= sum(one.depth for one in graph.values())
            )


# ---- closing -------------------------------------------------------------------------------------


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    schema = copy.deepcopy(schema)
    close_objects(schema)
    return schema


SHUT = {"additionalProperties": False}
A = {"type": "object", "properties": {"a": NULL}}
B = {"type": "object", "properties": {"b": NULL}}
CLOSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an object": (A, {**A, **SHUT}),
    "one that does not say that it is an object": ({"properties": {"a": NULL}}, {**A, **SHUT}),
    "objects within": ({"items": {"anyOf": [A, NULL]}}, {"items": {"anyOf": [{**A, **SHUT}, NULL]}}),
    "required names that are not described": (
        {**A, "required": ["a", "z"]},
        {**A, "properties": {"a": NULL, "z": True}, "required": ["a", "z"], **SHUT},
    ),
    "patterns of names": (
        {"type": "object", "patternProperties": {"^x": NULL}},
        {"type": "object", "patternProperties": {"^x": NULL}, **SHUT},
    ),
    "alternatives that only require": (
        {**A, "anyOf": [{"required": ["a"]}, {}]},
        {**A, "anyOf": [{"required": ["a"]}, {}], **SHUT},
    ),
    "a reference in a list of one": (
        {"properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}], "default": {}}}, "$defs": {"A": A}},
        {"properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}], "default": {}}}, "$defs": {"A": {**A, **SHUT}},
         **SHUT, "type": "object"},
    ),
    "a part that may be no object": (
        {"allOf": [{"properties": {"a": NULL}}, NULL]}, {"allOf": [{"properties": {"a": NULL}, **SHUT}, NULL]}
    ),
    "a definition elsewhere": (
        {"$ref": "#/components/A", "components": {"A": A}},
        {"$ref": "#/components/A", "components": {"A": {**A, **SHUT}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), CLOSED.values(), ids=CLOSED.keys())
def test_objects_with_named_properties_are_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected and not has_open_names(closed(schema))


OPEN: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "one that says so": {**A, "additionalProperties": True},
    "a map": {"type": "object", "additionalProperties": NULL},
    "one that needs more names than it has": {**A, "minProperties": 2},
    "parts of allOf": {"allOf": [A, B]},
    "a part by reference": {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
    "a reference and properties": {"$ref": "#/$defs/A", **B, "$defs": {"A": A}},
    "properties and alternatives": {**A, "oneOf": [B, {"properties": {"c": NULL}}]},
    "parts of parts": {"allOf": [{"anyOf": [A, {"$ref": "#/$defs/B"}]}, {"properties": {"c": NULL}}], "$defs": {"B": B}},
    "a value that looks like a schema": {"const": A},
}  # fmt: skip


@pytest.mark.parametrize("schema", OPEN.values(), ids=OPEN.keys())
def test_other_objects_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_objects_within_a_composed_object_are_closed() -> None:
    found = closed({"allOf": [{"properties": {"in": A}}, B]})
    assert found == {"allOf": [{"properties": {"in": {**A, **SHUT}}}, B]}


def test_closing_takes_time_in_proportion() -> None:
    schema = json.loads(chain(600, LINKS["allOf"], A))
    schema["$defs"].update({f"s{i}": {"allOf": [{"$ref": "#/$defs/r0"}, A]} for i in range(2000)})
    begun = time.monotonic()
    close_objects(schema)
    assert time.monotonic() - begun < 2
