"""JSON schemas, made ready for llguidance: their depth is checked, and their objects are closed.

    schema = read_schema(text)                   raises SpecError
    close_objects(schema)                        no names beyond those that the schema gives
    has_open_names(schema)                       whether an object may still have others

JSON Schema leaves every object open: names that it does not mention may be added, with any value. A model that may invent
names does so, so objects are closed as in other servers: additionalProperties is false where a schema says nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from octavo.text.chains import Definition, chain_depths
from octavo.text.spec_errors import SpecError

# llguidance reads at most 128 levels of JSON, and puts a few of its own around a schema.
MAX_NESTING = 100
# Levels along a chain of references. A level takes up to 9 KB of the stack of the thread that compiles.
MAX_DEPTH = 2000
MAX_VISITS = 300_000  # values that are looked at to measure depth

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else",
          "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
TYPED = ("type", "$ref", "allOf", "anyOf", "oneOf", "enum", "const")  # say what a value is
BY_NAME = "by name"  # stands for all schemas that have a name
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
ANCHORS = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")

Schema = dict[str, Any]
Trail = tuple[Any, str | int] | None  # the keys that lead to a value, the last one outermost


def read_schema(text: str) -> Schema:
    """A schema whose depth the compiler can take."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise too_nested("#") from None
    except ValueError as error:
        raise SpecError(str(error)) from None
    check_depth(schema)
    return dict(schema)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def too_nested(pointer: str) -> SpecError:
    return SpecError(f"it is nested more than {MAX_NESTING} levels deep", pointer)


# ---- depth -----------------------------------------------------------------------------------------------


def check_depth(schema: Any) -> None:
    """Raise SpecError for a value that is no schema, or one that is nested too deeply, directly or by references."""
    if not isinstance(schema, dict):
        raise SpecError("a schema is an object")
    graph: dict[str, Definition] = {}
    waiting = ["#"]
    visits = 0
    while waiting:
        place = waiting.pop()
        if place in graph:
            continue
        depth = 0
        links: set[str] = set()
        if place == BY_NAME:
            links.update(
                pointer(trail) for value, trail, _ in containers(schema) if _has_name(value)
            )
        else:
            for value, _, level in containers(resolve(schema, place)):
                visits += 1
                depth = max(depth, level + 1)
                links.update(_links(value))
        if visits > MAX_VISITS:
            raise SpecError("it is too large: its references cover the same parts too often")
        graph[place] = Definition(depth, links)
        waiting += links
    depths = chain_depths(graph)
    if depths["#"] > MAX_DEPTH:
        deepest = max((link for link in graph["#"].links), key=lambda link: depths[link])
        raise SpecError(
            f"its chain of references is up to {depths['#']} levels deep, at most {MAX_DEPTH} are allowed: "
            "use fewer definitions that refer to each other",
            "" if deepest == BY_NAME else deepest,
        )


def containers(root: Any) -> Iterator[tuple[dict[str, Any] | list[Any], Trail, int]]:
    """Every object and list within a value, with the way to it and its level."""
    waiting: list[tuple[Any, Trail, int]] = [(root, None, 0)]
    while waiting:
        value, trail, level = waiting.pop()
        if level > MAX_NESTING:
            raise too_nested(pointer(trail))
        if isinstance(value, dict):
            yield value, trail, level
            waiting += [(part, (trail, key), level + 1) for key, part in value.items()]
        elif isinstance(value, list):
            yield value, trail, level
            waiting += [(part, (trail, index), level + 1) for index, part in enumerate(value)]


def pointer(trail: Trail) -> str:
    keys: list[str] = []
    while trail is not None:
        trail, key = trail
        keys.append(str(key).replace("~", "~0").replace("/", "~1"))
    return "/".join(["#", *reversed(keys)])


def resolve(schema: Schema, place: str) -> Any:
    """The value that a JSON pointer names. None: there is none."""
    value: Any = schema
    for key in place.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _has_name(value: Any) -> bool:
    return isinstance(value, dict) and any(key in value for key in ANCHORS)


def _links(value: Any) -> Iterator[str]:
    """The places that a schema refers to. A reference by name may mean any schema that has one."""
    for key in REFERENCES if isinstance(value, dict) else ():
        reference = value.get(key)
        if isinstance(reference, str):
            by_place = reference == "#" or reference.startswith("#/")
            yield unquote(reference) if by_place else BY_NAME


# ---- open and closed objects --------------------------------------------------------------------------------


def close_objects(schema: Schema) -> None:
    """Change a schema: objects with named properties take no others, unless the schema says so itself.

    Objects that are composed stay as they are: where several parts of allOf, anyOf, oneOf or $ref name properties of the same
    object, each part would exclude the names of the others.
    """
    every = list(subschemas(schema))
    parts = _composed(schema)
    limited = {inner for part in every for inner in _ids(part.get("allOf"))}
    for part in every:
        if id(part) not in parts and names_properties(part):
            _close(part, untyped=id(part) in limited)


def _composed(root: Schema) -> set[int]:
    """The schemas that name properties of an object together with other schemas, by identity."""
    groups = {id(part): _groups(root, part) for part in subschemas(root)}
    within: dict[int, list[int]] = {}
    for outer, members in groups.items():
        for group in members:
            for inner in group:
                within.setdefault(inner, []).append(outer)
    own = {id(part) for part in subschemas(root) if names_properties(part)}
    naming = _reachable(own, within)
    shared: set[int] = set()
    for outer, members in groups.items():
        if (outer in own) + sum(not naming.isdisjoint(group) for group in members) > 1:
            shared.update([outer], *members)
    below = {
        outer: [inner for group in members for inner in group] for outer, members in groups.items()
    }
    return _reachable(shared, below)


def _groups(root: Schema, schema: Schema) -> list[list[int]]:
    """The schemas that describe the same value as `schema` does: those of anyOf, those of oneOf, each of allOf, the one it refers
    to. Of a group only one member needs to match."""
    found = [_ids(schema.get("anyOf")), _ids(schema.get("oneOf")), _ids([referred(root, schema)])]
    return found + [[inner] for inner in _ids(schema.get("allOf"))]


def _ids(members: Any) -> list[int]:
    return (
        [id(one) for one in members if isinstance(one, dict)] if isinstance(members, list) else []
    )


def _reachable(start: set[int], links: dict[int, list[int]]) -> set[int]:
    found = set(start)
    waiting = list(start)
    while waiting:
        following = [one for one in links.get(waiting.pop(), ()) if one not in found]
        found.update(following)
        waiting += following
    return found


def _close(schema: Schema, untyped: bool) -> None:
    """`untyped`: the value may turn out to be no object, for other schemas describe it too."""
    properties: dict[str, Any] = schema.get("properties", {})
    required = schema.get("required", [])
    least = schema.get("minProperties", 0)
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return
    if not isinstance(required, list) or not isinstance(least, int):
        return
    for name in required:
        if isinstance(name, str):
            properties.setdefault(name, True)
    if least > len(properties) and "patternProperties" not in schema:
        return
    if properties:
        schema["properties"] = properties
    schema["additionalProperties"] = False
    if not untyped and not any(key in schema for key in TYPED):
        schema["type"] = "object"


def names_properties(schema: Any) -> bool:
    return isinstance(schema, dict) and any(
        isinstance(schema.get(key), dict) for key in ("properties", "patternProperties")
    )


def subschemas(schema: Schema) -> Iterator[Schema]:
    """Every schema within a schema, references followed, each once."""
    seen: set[int] = set()
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for key, value in part.items():
            if key in MAPS and isinstance(value, dict):
                waiting += value.values()
            elif (key in LISTS or key == "items") and isinstance(value, list):
                waiting += value
            elif key in SINGLE:
                waiting.append(value)
        waiting.append(referred(schema, part))


def referred(root: Schema, schema: Schema) -> Any:
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    return resolve(root, unquote(reference))


def has_open_names(schema: Schema) -> bool:
    """Whether an object takes names beyond those that the schema describes, so that one of these could be spelled in another
    way: "a" as "\\u0061"."""
    return any(
        names_properties(part) and part.get("additionalProperties", True) is not False
        for part in subschemas(schema)
    )
