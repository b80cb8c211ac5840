"""The OpenAPI description of fields and errors that only the APIs of other vendors have."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.serve.api.anthropic_messages import THINKING
from octavo.serve.api.batch_lines import BATCH_URLS
from octavo.serve.api.openai_responses import METADATA_NAME, METADATA_PAIRS, METADATA_VALUE
from octavo.serve.api.protocol import (
    BatchChatRequest,
    BatchRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ResponsesRequest,
)
from octavo.serve.limits import Limits

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
PARAMETERS: Schema = {"type": "object", "properties": {"type": {"const": "object"}}}
EFFORT: Schema = {"type": "object", "properties": {"effort": {"type": ["string", "null"]}}}


def one_of_types(members: dict[str, Schema], *types: str) -> Schema:
    """Return the schema of an object with one of these types, or null."""
    properties = {"type": {"enum": list(types)}, **members}
    return {"anyOf": [{"type": "null"}, typed_object(properties, "type")]}


def typed_object(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def message(*roles: str) -> Schema:
    return {
        **typed_object({"role": {"enum": list(roles)}, "content": TEXT}, "role", "content"),
        "additionalProperties": False,
    }


def other_api_bounds(limits: Limits) -> dict[type[msgspec.Struct], dict[str, Schema]]:
    """Return the schemas of fields that the chat API does not have, or has in another form."""
    messages = {"minItems": 1, "maxItems": limits.messages}
    tools = {"maxItems": limits.tools}
    tool_type = {"type": ["string", "null"], "enum": ["custom", None]}
    anthropic_tool = {"name": NAME, "type": tool_type, "input_schema": PARAMETERS}
    function = {"type": {"const": "function"}, "name": NAME, "parameters": PARAMETERS}
    ollama_function = typed_object({"name": NAME, "parameters": PARAMETERS}, "name")
    ollama_tool = {"type": {"const": "function"}, "function": ollama_function}
    stop = {"minLength": 1, "maxLength": limits.stop_chars, "pattern": "^[^\\u0000]+$"}
    ollama: dict[str, Schema] = {
        "format": {"anyOf": [{"enum": ["", "json", None]}, {"type": "object"}]},
        "options": one_of_options(),
    }
    return {
        BatchChatRequest: {
            "messages": {
                "minItems": 1,
                "items": {"type": "array", "minItems": 1, "items": message("user", "assistant")},
            },
        },
        BatchRequest: {
            "endpoint": {"enum": list(BATCH_URLS)},
            "completion_window": {"enum": ["24h", None]},
        },
        MessagesRequest: {
            "messages": {**messages, "items": message("user", "assistant")},
            "system": {"anyOf": [TEXT, {"type": "null"}]},
            "stop_sequences": {"maxItems": limits.stops, "items": stop},
            "tools": {**tools, "items": typed_object(anthropic_tool, "name", "input_schema")},
            "tool_choice": one_of_types({}, "auto", "any", "none"),
            "thinking": one_of_types({}, *THINKING),
            "output_config": {
                "anyOf": [{"type": "null"}, EFFORT | {"additionalProperties": False}]
            },
        },
        ResponsesRequest: {
            "input": {"anyOf": [{"type": "string", "minLength": 1}, items(message("user"))]},
            "tools": {**tools, "items": typed_object(function, "type", "name")},
            "tool_choice": {"enum": ["none", "auto", "required", None]},
            "text": {"anyOf": [{"type": "null"}, typed_object({"format": {"type": "null"}})]},
            "reasoning": {"anyOf": [{"type": "null"}, EFFORT]},
            "truncation": {"enum": ["auto", "disabled", None]},
            "metadata": {
                "maxProperties": METADATA_PAIRS,
                "propertyNames": {"maxLength": METADATA_NAME},
                "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE},
            },
        },
        OllamaChatRequest: {
            **ollama,
            "messages": {**messages, "items": message("system", "user", "assistant")},
            "tools": {**tools, "items": typed_object(ollama_tool, "type", "function")},
        },
        OllamaGenerateRequest: ollama,
    }


def items(schema: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": schema}


def one_of_options() -> Schema:
    """Return the schema of Ollama's options."""
    number = {"type": "number", "minimum": 0, "maximum": 1}
    options: dict[str, Schema] = {
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": number,
        "min_p": number,
        "num_predict": {"type": "integer", "minimum": 1, "maximum": 2**31},
        "seed": {"type": "integer", "minimum": 0, "maximum": 2**31},
    }
    described = {**typed_object(options), "additionalProperties": False}
    return {"anyOf": [{"type": "null"}, described]}


# ---- errors --------------------------------------------------------------------------------------

ANTHROPIC_ERROR = typed_object(
    {
        "type": {"const": "error"},
        "error": typed_object({"type": TEXT, "message": TEXT}, "type", "message"),
        "request_id": TEXT,
    },
    "type",
    "error",
)
OLLAMA_ERROR = typed_object({"error": TEXT}, "error")


def error_name(path: str) -> str:
    """Return the name of the schema of a route's errors."""
    if path.startswith("/v1/messages"):
        return "AnthropicError"
    return "OllamaError" if path.startswith("/api/") else "Error"
