"""Checks the messages of a chat request and converts them to the form that chat templates expect.

A template gets plain copies: strings, numbers, booleans, lists and objects. The rules are those of
vLLM and transformers:

- `content` is one string. Parts of text are joined. Missing content, as beside tool calls, is "".
- The arguments of a tool call are an object. The API sends them as JSON. Arguments that are not a
  JSON object stay unchanged.
- A `function_call`, the form of a call before 2023, is a tool call.
- Reasoning is present as `reasoning_content` and as `thinking`, whichever name the client used.
- Members that are null are removed, and so is an empty list of tool calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from octavo.errors import InvalidRequest

MAX_DEPTH = 100  # nested lists and objects
ROLE_PATTERN = re.compile(r"[A-Za-z0-9_ .-]{1,64}")
# A message with one of these roles must have content.
ROLES_WITH_CONTENT = ("system", "developer", "user")
# The types of text parts, and the member that holds the text.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
# The names under which clients send reasoning, the usual one first.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return copies of the messages in the form that templates expect."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(
            'messages must be a non-empty list of {"role": ..., "content": ...}', "messages"
        )
    return [
        _checked_message(message, f"messages.{index}") for index, message in enumerate(messages)
    ]


def _checked_message(message: Any, location: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(
            f"{location} must be an object with role and content, got {_type_name(message)}",
            location,
        )
    role = message.get("role")
    if not isinstance(role, str) or not ROLE_PATTERN.fullmatch(role):
        raise InvalidRequest(
            f"{location}.role must be a name of 1 to 64 letters, digits, spaces or . _ - (such as "
            f"system, user, assistant or tool), got {role!r:.40}",
            f"{location}.role",
        )
    plain_message = to_plain(message, location)
    checked = {member: value for member, value in plain_message.items() if value is not None}
    tool_calls = checked.pop("tool_calls", None)
    function_call = checked.pop("function_call", None)
    if role == "assistant" and function_call is not None and not tool_calls:
        tool_calls = [{"id": "call00000", "type": "function", "function": function_call}]
    if role == "assistant" and tool_calls is not None:
        parsed_calls = _parsed_calls(tool_calls, f"{location}.tool_calls")
        if parsed_calls:
            checked["tool_calls"] = parsed_calls
    elif tool_calls:
        checked["tool_calls"] = tool_calls
    checked["content"] = _joined_content(checked.get("content"), role, f"{location}.content")
    reasoning = next((checked[name] for name in REASONING_FIELDS if name in checked), None)
    if reasoning is None:
        return checked
    return {"thinking": reasoning, **checked, "reasoning_content": reasoning}


def _joined_content(content: Any, role: str, location: str) -> str:
    """Return the content as one string."""
    if isinstance(content, str):
        return content
    if content is None and role not in ROLES_WITH_CONTENT:
        return ""
    if not isinstance(content, list):
        part_form = '{"type": "text", "text": ...}'
        raise InvalidRequest(
            f"{location} must be a string or a list of {part_form}, got {_type_name(content)}",
            location,
        )
    return "".join(_part_text(part, f"{location}.{index}") for index, part in enumerate(content))


def _part_text(part: Any, location: str) -> str:
    if isinstance(part, str):
        return part
    text = None
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        text = part.get(TEXT_PARTS.get(part["type"], ""))
    if not isinstance(text, str):
        raise InvalidRequest(
            f'{location} must be {{"type": "text", "text": ...}}: this model takes text only',
            location,
        )
    return text


def _parsed_calls(tool_calls: Any, location: str) -> list[dict[str, Any]]:
    """Return the tool calls with parsed arguments. A call may lack the "function" around it."""
    call_form = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
    if not isinstance(tool_calls, list) or not all(
        isinstance(tool_call, dict) for tool_call in tool_calls
    ):
        raise InvalidRequest(f"{location} must be a list of {call_form}", location)
    parsed_calls = []
    for tool_call in tool_calls:
        function = tool_call.get("function", tool_call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{location} must be a list of {call_form}", location)
        if "function" in tool_call:
            arguments = _parsed_arguments(function.get("arguments"))
            tool_call = {**tool_call, "function": {**function, "arguments": arguments}}
        parsed_calls.append(tool_call)
    return parsed_calls


def _parsed_arguments(arguments: Any) -> Any:
    """Return the object that the arguments encode.

    Arguments of another kind, such as truncated JSON, stay unchanged. They are part of the
    conversation, and a request that repeats them must not fail.
    """
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
    """Return the messages with the arguments of calls in each form that a template may need.

    The usual form comes first. The forms are: unchanged (objects, or text that is not a JSON
    object); only objects, with an empty one instead of each text; only text.
    """
    all_arguments = [
        tool_call["function"]["arguments"]
        for message in messages
        if message["role"] == "assistant"
        for tool_call in message.get("tool_calls", [])
        if "function" in tool_call
    ]
    forms = [messages]
    if not all(isinstance(arguments, dict) for arguments in all_arguments):
        forms.append(_with_arguments(messages, _as_object))
    if all_arguments:
        forms.append(_with_arguments(messages, _as_text))
    return forms


def _as_object(arguments: Any) -> dict[str, Any]:
    return arguments if isinstance(arguments, dict) else {}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_arguments(
    messages: list[dict[str, Any]], convert: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """Return copies of the messages with converted arguments in every call."""

    def converted_call(tool_call: dict[str, Any]) -> dict[str, Any]:
        if "function" not in tool_call:
            return tool_call
        function = tool_call["function"]
        return {**tool_call, "function": {**function, "arguments": convert(function["arguments"])}}

    return [
        {
            **message,
            "tool_calls": [converted_call(tool_call) for tool_call in message["tool_calls"]],
        }
        if message["role"] == "assistant" and "tool_calls" in message
        else message
        for message in messages
    ]


def to_plain(value: Any, location: str, depth: int = 0) -> Any:
    """Return a copy that consists of the types of JSON.

    A template must not get an object that has methods of its own.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{location} is nested more than {MAX_DEPTH} levels deep", location)
    if isinstance(value, (list, tuple)):
        return [to_plain(item, location, depth + 1) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: to_plain(item, location, depth + 1) for key, item in value.items()}
    raise InvalidRequest(
        f"{location} must be made of strings, numbers, booleans, lists and objects, got "
        f"{_type_name(value)}",
        location,
    )


def _type_name(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
