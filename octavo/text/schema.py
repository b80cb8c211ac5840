"""Prepares JSON schemas for llguidance: checks their depth and closes their objects.

    schema = read_schema(text)       raises SpecError
    close_objects(schema)            allows only the property names that the schema lists
    has_open_names(schema)           returns whether an object may still have other names

JSON Schema leaves every object open: an object may have properties that the schema does not
mention. A model that may invent properties does so. Therefore, as in other servers,
additionalProperties is false where a schema does not set it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from octavo.text.definition_depth import Definition, chain_depths
from octavo.text.spec_errors import SpecError

# llguidance reads at most 128 levels of JSON, and adds a few levels around a schema.
MAX_NESTING = 100
# Levels along a chain of references. One level takes up to 9 KB of stack in the compiling thread.
MAX_DEPTH = 2000
MAX_VISITS = 300_000  # containers that are visited to measure the depth

SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE_SCHEMAS = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
TYPE_KEYWORDS = ("type", "$ref", "allOf", "anyOf", "oneOf", "enum", "const")  # restrict the type
ANY_NAMED_SCHEMA = "by name"  # stands for all schemas that have a name
REFERENCE_KEYWORDS = ("$ref", "$dynamicRef", "$recursiveRef")
NAMING_KEYWORDS = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")

Schema = dict[str, Any]
KeyTrail = tuple[Any, str | int] | None  # (trail of the container, key in it), or None at the root


def read_schema(text: str) -> Schema:
    """Parse a schema and check that it is not nested too deeply for the compiler."""
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


# ---- depth ---------------------------------------------------------------------------------------


def check_depth(schema: Any) -> None:
    """Raise SpecError if the value is not an object, or is nested too deeply (with references)."""
    if not isinstance(schema, dict):
        raise SpecError("a schema must be an object")
    definitions: dict[str, Definition] = {}
    pending_locations = ["#"]
    visits = 0
    while pending_locations:
        location = pending_locations.pop()
        if location in definitions:
            continue
        nesting = 0
        references: set[str] = set()
        if location == ANY_NAMED_SCHEMA:
            references.update(
                json_pointer_of(container_trail)
                for container, container_trail, _ in nested_containers(schema)
                if _has_name(container)
            )
        else:
            target = resolve_pointer(schema, location)
            for container, _, container_level in nested_containers(target):
                visits += 1
                nesting = max(nesting, container_level + 1)
                references.update(_reference_targets(container))
        if visits > MAX_VISITS:
            raise SpecError("it is too large: its references cover the same parts too often")
        definitions[location] = Definition(nesting, references)
        pending_locations += references
    depths = chain_depths(definitions)
    if depths["#"] > MAX_DEPTH:
        deepest_reference = max(
            (reference for reference in definitions["#"].links),
            key=lambda reference: depths[reference],
        )
        raise SpecError(
            f"its chain of references is up to {depths['#']} levels deep, at most {MAX_DEPTH} are "
            "allowed: use fewer definitions that refer to each other",
            "" if deepest_reference == ANY_NAMED_SCHEMA else deepest_reference,
        )


def nested_containers(root: Any) -> Iterator[tuple[dict[str, Any] | list[Any], KeyTrail, int]]:
    """Yield every object and list inside a value, with its trail and its level."""
    pending: list[tuple[Any, KeyTrail, int]] = [(root, None, 0)]
    while pending:
        container, trail, level = pending.pop()
        if level > MAX_NESTING:
            raise too_nested(json_pointer_of(trail))
        if isinstance(container, dict):
            yield container, trail, level
            pending += [(child, (trail, key), level + 1) for key, child in container.items()]
        elif isinstance(container, list):
            yield container, trail, level
            pending += [(child, (trail, index), level + 1) for index, child in enumerate(container)]


def json_pointer_of(trail: KeyTrail) -> str:
    escaped_keys: list[str] = []
    while trail is not None:
        trail, key = trail
        escaped_keys.append(str(key).replace("~", "~0").replace("/", "~1"))
    return "/".join(["#", *reversed(escaped_keys)])


def resolve_pointer(schema: Schema, json_pointer: str) -> Any:
    """Return the value that a JSON pointer names, or None if there is none."""
    value: Any = schema
    for key in json_pointer.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _has_name(subschema: Any) -> bool:
    return isinstance(subschema, dict) and any(key in subschema for key in NAMING_KEYWORDS)


def _reference_targets(subschema: Any) -> Iterator[str]:
    """Yield the locations that a schema refers to. A name may refer to any named schema."""
    for keyword in REFERENCE_KEYWORDS if isinstance(subschema, dict) else ():
        reference = subschema.get(keyword)
        if isinstance(reference, str):
            is_pointer = reference == "#" or reference.startswith("#/")
            yield unquote(reference) if is_pointer else ANY_NAMED_SCHEMA


# ---- open and closed objects ---------------------------------------------------------------------


def close_objects(schema: Schema) -> None:
    """Set additionalProperties to false in objects that list properties and do not set it.

    Composed objects stay as they are: if several parts of allOf, anyOf, oneOf or $ref list
    properties of the same object, each part would exclude the properties of the others.
    """
    all_subschemas = list(subschemas(schema))
    composed_ids = _composed_schema_ids(schema)
    all_of_members = {
        member_id
        for subschema in all_subschemas
        for member_id in _object_ids(subschema.get("allOf"))
    }
    for subschema in all_subschemas:
        if id(subschema) not in composed_ids and names_properties(subschema):
            _close_object(subschema, may_be_other_type=id(subschema) in all_of_members)


def _composed_schema_ids(root: Schema) -> set[int]:
    """Return the ids of the schemas that share an object with other schemas."""
    member_groups = {
        id(subschema): _same_value_groups(root, subschema) for subschema in subschemas(root)
    }
    containing_schemas: dict[int, list[int]] = {}
    for outer_id, groups_of_schema in member_groups.items():
        for member_ids in groups_of_schema:
            for inner_id in member_ids:
                containing_schemas.setdefault(inner_id, []).append(outer_id)
    naming_ids = {id(subschema) for subschema in subschemas(root) if names_properties(subschema)}
    reaching_ids = _reachable(naming_ids, containing_schemas)
    shared_ids: set[int] = set()
    for outer_id, groups_of_schema in member_groups.items():
        naming_groups = sum(
            not reaching_ids.isdisjoint(member_ids) for member_ids in groups_of_schema
        )
        if naming_groups + (outer_id in naming_ids) > 1:
            shared_ids.update([outer_id], *groups_of_schema)
    members_below = {
        outer_id: [inner_id for member_ids in groups_of_schema for inner_id in member_ids]
        for outer_id, groups_of_schema in member_groups.items()
    }
    return _reachable(shared_ids, members_below)


def _same_value_groups(root: Schema, schema: Schema) -> list[list[int]]:
    """Return the ids of the schemas that describe the same value as `schema`, in groups.

    The members of anyOf are one group, so are those of oneOf. Each member of allOf and the target
    of $ref are groups of their own. A value needs to match one member of each group.
    """
    groups = [
        _object_ids(schema.get("anyOf")),
        _object_ids(schema.get("oneOf")),
        _object_ids([referenced_schema(root, schema)]),
    ]
    return groups + [[member_id] for member_id in _object_ids(schema.get("allOf"))]


def _object_ids(members: Any) -> list[int]:
    if not isinstance(members, list):
        return []
    return [id(member) for member in members if isinstance(member, dict)]


def _reachable(start_ids: set[int], links: dict[int, list[int]]) -> set[int]:
    reached = set(start_ids)
    pending = list(start_ids)
    while pending:
        following = [linked for linked in links.get(pending.pop(), ()) if linked not in reached]
        reached.update(following)
        pending += following
    return reached


def _close_object(schema: Schema, may_be_other_type: bool) -> None:
    """Close one object. With `may_be_other_type` the schema does not become `type: object`."""
    properties: dict[str, Any] = schema.get("properties", {})
    required = schema.get("required", [])
    min_properties = schema.get("minProperties", 0)
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return
    if not isinstance(required, list) or not isinstance(min_properties, int):
        return
    for property_name in required:
        if isinstance(property_name, str):
            properties.setdefault(property_name, True)
    if min_properties > len(properties) and "patternProperties" not in schema:
        return
    if properties:
        schema["properties"] = properties
    schema["additionalProperties"] = False
    if not may_be_other_type and not any(keyword in schema for keyword in TYPE_KEYWORDS):
        schema["type"] = "object"


def names_properties(schema: Any) -> bool:
    return isinstance(schema, dict) and any(
        isinstance(schema.get(keyword), dict) for keyword in ("properties", "patternProperties")
    )


def subschemas(schema: Schema) -> Iterator[Schema]:
    """Yield every schema inside a schema once, including the targets of references."""
    visited_ids: set[int] = set()
    pending: list[Any] = [schema]
    while pending:
        subschema = pending.pop()
        if not isinstance(subschema, dict) or id(subschema) in visited_ids:
            continue
        visited_ids.add(id(subschema))
        yield subschema
        for keyword, value in subschema.items():
            if keyword in SCHEMA_MAPS and isinstance(value, dict):
                pending += value.values()
            elif (keyword in SCHEMA_LISTS or keyword == "items") and isinstance(value, list):
                pending += value
            elif keyword in SINGLE_SCHEMAS:
                pending.append(value)
        pending.append(referenced_schema(schema, subschema))


def referenced_schema(root: Schema, schema: Schema) -> Any:
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    return resolve_pointer(root, unquote(reference))


def has_open_names(schema: Schema) -> bool:
    """Return whether an object may have names that the schema does not list.

    Then a listed name could be written in another way: "a" as "\\u0061".
    """
    return any(
        names_properties(subschema) and subschema.get("additionalProperties", True) is not False
        for subschema in subschemas(schema)
    )
