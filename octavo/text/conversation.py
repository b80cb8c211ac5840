"""The messages of a chat request, checked and brought into the form that chat templates expect.

A template gets plain copies: strings, numbers, booleans, lists and objects. The rules are those of
vLLM and transformers:

- `content` is one string. Parts of text are joined. Where there is no content, as beside tool
  calls, it is "".
- The arguments of a tool call are an object. The API sends them as JSON; what is not a JSON object
  stays as it came.
- Reasoning is there as `reasoning_content` and as `thinking`, whichever name it was sent under.
- Members that are null are left out, and so is an empty list of tool calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from octavo.errors import InvalidRequest

MAX_DEPTH = 100  # of lists and objects within each other
ROLE = re.compile(r"[\w .-]{1,64}")
# A message of these roles has something to say; without content it is a mistake.
SPEAKERS = ("system", "developer", "user")
# The types of parts that are text, each with the member that holds it.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
# The names under which clients send reasoning, the usual one first.
REASONING = ("reasoning_content", "thinking", "reasoning")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of the messages, as templates expect them."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(
            'messages must be a non-empty list of {"role": ..., "content": ...}', "messages"
        )
    return [_checked(message, f"messages.{i}") for i, message in enumerate(messages)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(
            f"{where} must be an object with role and content, got {_kind(message)}", where
        )
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise InvalidRequest(
            f"{where}.role must be a name of 1 to 64 letters, digits, spaces or . _ - (such as "
            f"system, user, assistant or tool), got {role!r:.40}",
            f"{where}.role",
        )
    plain = to_plain(message, where)
    found = {key: value for key, value in plain.items() if value is not None}
    calls = found.pop("tool_calls", None)
    if role == "assistant" and calls:
        found["tool_calls"] = _parsed_calls(calls, f"{where}.tool_calls")
    elif calls:
        found["tool_calls"] = calls
    found["content"] = _joined(found.get("content"), role, f"{where}.content")
    reasoning = next((found[name] for name in REASONING if name in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _joined(content: Any, role: str, where: str) -> str:
    """The content as one string."""
    if isinstance(content, str):
        return content
    if content is None and role not in SPEAKERS:
        return ""
    if not isinstance(content, list):
        parts = '{"type": "text", "text": ...}'
        raise InvalidRequest(
            f"{where} must be a string or a list of {parts}, got {_kind(content)}", where
        )
    return "".join(_part(part, f"{where}.{i}") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    text = None
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        text = part.get(TEXT_PARTS.get(part["type"], ""))
    if not isinstance(text, str):
        raise InvalidRequest(
            f'{where} must be {{"type": "text", "text": ...}}: this model takes text only', where
        )
    return text


def _parsed_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The tool calls with their arguments parsed. A call may lack the "function" around it."""
    wanted = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(f"{where} must be a list of {wanted}", where)
    parsed = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where} must be a list of {wanted}", where)
        if "function" in call:
            arguments = _parsed_arguments(function.get("arguments"))
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return parsed


def _parsed_arguments(arguments: Any) -> Any:
    """The object that the arguments say. Arguments of another kind, such as JSON that was cut, stay
    as they are: they are part of the conversation, and a request that repeats them must not fail
    for it."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = to_plain(json.loads(arguments), "arguments")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def argument_forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages with the arguments of calls in each form that a template may need, the usual
    form first.

    The forms are: as they are, which is objects, and text where it is no JSON object; objects
    alone, with an empty one for each text; text alone.
    """
    given = [
        call["function"]["arguments"]
        for message in messages
        if message["role"] == "assistant"
        for call in message.get("tool_calls", [])
        if "function" in call
    ]
    forms = [messages]
    if not all(isinstance(arguments, dict) for arguments in given):
        forms.append(_with_arguments(messages, _as_object))
    if given:
        forms.append(_with_arguments(messages, _as_text))
    return forms


def _as_object(arguments: Any) -> dict[str, Any]:
    return arguments if isinstance(arguments, dict) else {}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_arguments(
    messages: list[dict[str, Any]], change: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """Copies of the messages with the arguments of every call changed."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        if "function" not in call:
            return call
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if message["role"] == "assistant" and "tool_calls" in message
        else message
        for message in messages
    ]


def to_plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON's types alone: a template must not get hold of an object that has methods
    of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} levels deep", where)
    if isinstance(value, (list, tuple)):
        return [to_plain(item, where, depth + 1) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: to_plain(item, where, depth + 1) for key, item in value.items()}
    raise InvalidRequest(
        f"{where} must be made of strings, numbers, booleans, lists and objects, got "
        f"{_kind(value)}",
        where,
    )


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
