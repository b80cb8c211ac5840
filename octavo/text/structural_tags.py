"""Structural tags: free text in which a trigger begins a part with a fixed form.

A request names structures, such as {"begin": "<function=add>", "schema": {...}, "end":
"</function>"}, and triggers, such as "<function=". Text without a trigger is free. After a trigger
the reply continues with one of the structures that begin with it. The result is a grammar in
llguidance's dialect of Lark.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import InvalidRequest

FREE_TEXT = "/(.|\\n)*/"


def grammar_of_tags(structures: Any, triggers: Any) -> str:
    """Return the grammar. Raises InvalidRequest if the tags are not what the API defines."""
    if not _is_list_of(triggers, str) or "" in triggers:
        raise InvalidRequest("triggers must be a list of non-empty strings, at least one")
    if not _is_list_of(structures, dict):
        raise InvalidRequest("structures must be a list of objects, at least one")
    rules = [_rule(number, tag, triggers) for number, tag in enumerate(structures)]
    names = " | ".join(f"tag_{number}" for number in range(len(rules)))
    start = [f"start: ({names})* rest", "rest: FREE", f"FREE: {FREE_TEXT}"]
    return "\n".join([*start, *rules]) + "\n"


def _rule(number: int, tag: dict[str, Any], triggers: list[str]) -> str:
    """Return the rules of one structure: free text up to its trigger, then its fixed form."""
    begin = tag.get("begin")
    end = tag.get("end")
    schema = tag.get("schema")
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise InvalidRequest(
            f"structures.{number} must have the strings begin and end, and the object schema"
        )
    trigger = next((text for text in triggers if begin.startswith(text)), None)
    if trigger is None:
        raise InvalidRequest(f"structures.{number}.begin must start with one of the triggers")
    following = [begin.removeprefix(trigger), end]
    before, after = (json.dumps(text) if text else "" for text in following)
    return (
        f"open_{number}[lazy]: FREE {json.dumps(trigger)}\n"
        f"tag_{number}: open_{number} {before} %json {json.dumps(schema)} {after}"
    )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)
