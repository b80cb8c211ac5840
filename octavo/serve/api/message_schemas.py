"""The OpenAPI description of messages, tools and calls, in the forms of every API.

The names and types come from the modules that check these values. Members that a schema does not
name are allowed: chat templates may use them.
"""

from __future__ import annotations

from typing import Any

from octavo.serve.api.request_tools import NAME
from octavo.serve.api.translation import TEXT_BLOCKS
from octavo.text.conversation import ROLE_PATTERN, ROLES_WITH_CONTENT, TEXT_PARTS

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}
SWITCH: Schema = {"type": ["boolean", "null"]}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
ASSISTANT: Schema = {"const": "assistant"}


def typed_object(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def one_of_types(members: dict[str, Schema], *types: str) -> Schema:
    """Return the schema of an object with one of these types."""
    return typed_object({"type": {"enum": list(types)}, **members}, "type")


def optional(schema: Schema) -> Schema:
    return {"anyOf": [NULL, schema]}


def one_or_many(item: Schema, *alternatives: Schema) -> Schema:
    """Return the schema of a text, of a list of items, or of an alternative."""
    return {"anyOf": [TEXT, {"type": "array", "items": item}, *alternatives]}


def without(schema: Schema, member: str) -> Schema:
    """Return the schema of objects that lack a member."""
    return {**schema, "not": {"required": [member]}}


# ---- chats ---------------------------------------------------------------------------------------


def text_part(member: str) -> Schema:
    kinds = [kind for kind, text_member in TEXT_PARTS.items() if text_member == member]
    return typed_object({"type": {"enum": kinds}, member: TEXT}, "type", member)


PART: Schema = {"anyOf": [TEXT, *map(text_part, dict.fromkeys(TEXT_PARTS.values()))]}
CONTENT = one_or_many(PART)
NAMED = typed_object({"name": TEXT}, "name")
# A call, or a tool of allowed_tools, may have its members outside the object "function".
NAMED_FUNCTION: Schema = {
    "anyOf": [typed_object({"function": NAMED}, "function"), without(NAMED, "function")]
}
CALLS: Schema = {"type": ["array", "null"], "items": NAMED_FUNCTION}
OTHER_ROLE: Schema = {
    "type": "string",
    "pattern": f"^{ROLE_PATTERN.pattern}$",
    "not": {"enum": [*ROLES_WITH_CONTENT, "assistant"]},
}
OPTIONAL_CONTENT: Schema = one_or_many(PART, NULL)
WITH_CONTENT: Schema = {"role": {"enum": list(ROLES_WITH_CONTENT)}, "content": CONTENT}
FROM_ASSISTANT = {"role": ASSISTANT, "content": OPTIONAL_CONTENT, "tool_calls": CALLS}
MESSAGE: Schema = {
    "anyOf": [
        typed_object(WITH_CONTENT, "role", "content"),
        typed_object(FROM_ASSISTANT, "role"),
        typed_object({"role": OTHER_ROLE, "content": OPTIONAL_CONTENT}, "role"),
    ]
}

TOOL_NAME: Schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}
PARAMETERS: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "object"},
        "properties": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}},
        "required": {"type": "array", "items": TEXT},
    },
}
FUNCTION_MEMBERS: dict[str, Schema] = {
    "name": TOOL_NAME,
    "description": OPTIONAL_TEXT,
    "strict": SWITCH,
    "parameters": optional(PARAMETERS),
}
FUNCTION = typed_object(FUNCTION_MEMBERS, "name")
TOOL = typed_object({"type": {"const": "function"}, "function": FUNCTION}, "type", "function")
MODES = ["none", "auto", "required", None]
ALLOWED_TOOLS: dict[str, Schema] = {
    "mode": {"enum": ["auto", "required"]},
    "tools": {"type": "array", "minItems": 1, "items": NAMED_FUNCTION},
}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": MODES},
        typed_object({"type": {"enum": ["function", None]}, "function": NAMED}, "function"),
        one_of_types({"allowed_tools": typed_object(ALLOWED_TOOLS, "tools")}, "allowed_tools")
        | {"required": ["type", "allowed_tools"]},
        without(one_of_types(ALLOWED_TOOLS, "allowed_tools"), "allowed_tools")
        | {"required": ["type", "tools"]},
    ]
}
FUNCTION_CALL: Schema = {"anyOf": [{"enum": ["none", "auto", None]}, NAMED]}

# ---- other APIs ----------------------------------------------------------------------------------

TEXT_BLOCK = typed_object({"type": {"enum": [*TEXT_BLOCKS, None]}, "text": TEXT}, "text")
# The contents of blocks and items: a text, blocks of text, or nothing.
TEXTS = one_or_many(TEXT_BLOCK, NULL)
TOOL_RESULT = one_of_types(
    {"tool_use_id": OPTIONAL_TEXT, "content": TEXTS, "is_error": SWITCH}, "tool_result"
)
TOOL_USE = one_of_types(
    {"id": OPTIONAL_TEXT, "name": OPTIONAL_TEXT, "input": {"type": ["object", "null"]}}, "tool_use"
)
THINKING_BLOCK = one_of_types({"thinking": OPTIONAL_TEXT}, "thinking")
REDACTED = one_of_types({}, "redacted_thinking")


def blocks(*kinds: Schema) -> Schema:
    return one_or_many({"anyOf": [TEXT_BLOCK, *kinds]})


def message_of(role: str, content: Schema) -> Schema:
    return typed_object({"role": {"const": role}, "content": content}, "role", "content")


# A message of Anthropic's API.
ANTHROPIC_MESSAGE: Schema = {
    "anyOf": [
        message_of("user", blocks(TOOL_RESULT)),
        message_of("assistant", blocks(TOOL_USE, THINKING_BLOCK, REDACTED)),
        message_of("system", blocks()),
    ]
}
CUSTOM_TOOL = typed_object(
    {
        **{name: FUNCTION_MEMBERS[name] for name in ("name", "description", "strict")},
        "type": {"enum": ["custom", None]},
        "input_schema": PARAMETERS,
    },
    "name",
    "input_schema",
)


def item(kind: str, **members: Schema) -> Schema:
    return one_of_types(members, kind)


def message_item(schema: Schema) -> Schema:
    """Return a message as an item of Responses, whose type may be missing."""
    return {**schema, "properties": {**schema["properties"], "type": {"const": "message"}}}


# An item of the input of OpenAI's Responses.
INPUT_ITEM: Schema = {
    "anyOf": [
        message_item(typed_object({"role": ASSISTANT, "content": TEXTS}, "role")),
        message_item(MESSAGE["anyOf"][0]),
        message_item(MESSAGE["anyOf"][2]),
        item("function_call", call_id=OPTIONAL_TEXT, name=OPTIONAL_TEXT, arguments=OPTIONAL_TEXT),
        item("function_call_output", call_id=OPTIONAL_TEXT, output=TEXTS),
        item("reasoning", content=TEXTS, summary=TEXTS),
    ]
}
FLAT_TOOL = typed_object({"type": {"const": "function"}, **FUNCTION_MEMBERS}, "type", "name")
# A message of Ollama's API.
OLLAMA_MEMBERS: dict[str, Schema] = {
    "images": {"type": ["array", "null"], "maxItems": 0},
    "tool_name": OPTIONAL_TEXT,
}
OLLAMA_MESSAGE: Schema = {
    "anyOf": [
        {**form, "properties": {**form["properties"], **OLLAMA_MEMBERS}}
        for form in MESSAGE["anyOf"]
    ]
}
