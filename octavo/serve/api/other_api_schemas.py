"""The OpenAPI description of fields and errors that only the APIs of other vendors have."""

from __future__ import annotations

import msgspec

from octavo.serve.api.anthropic_messages import CHOICES, THINKING
from octavo.serve.api.batch_lines import BATCH_URLS
from octavo.serve.api.embeddings import SCORE_SIDES
from octavo.serve.api.message_schemas import (
    ANTHROPIC_MESSAGE,
    CUSTOM_TOOL,
    FLAT_TOOL,
    INPUT_ITEM,
    MESSAGE,
    MODES,
    NAMED,
    NULL,
    OBJECT,
    OLLAMA_MESSAGE,
    OPTIONAL_TEXT,
    SWITCH,
    TEXT,
    TEXT_BLOCK,
    TOOL,
    Schema,
    one_of_types,
    one_or_many,
    optional,
    typed_object,
)
from octavo.serve.api.ollama_api import OPTIONS
from octavo.serve.api.openai_responses import (
    IGNORED_TOOL_TYPES,
    METADATA_NAME,
    METADATA_PAIRS,
    METADATA_VALUE,
)
from octavo.serve.api.protocol import (
    BatchChatRequest,
    BatchRequest,
    CompletionRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
)
from octavo.serve.limits import Limits

EFFORT: Schema = {"effort": OPTIONAL_TEXT}
# Ollama has two values that stand for as many tokens as fit.
NUM_PREDICT: Schema = {
    "anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**63 - 1}, {"enum": [-1, -2, None]}]
}


def other_api_bounds(
    limits: Limits, general: dict[str, Schema]
) -> dict[type[msgspec.Struct], dict[str, Schema]]:
    """Return the schemas of fields that the chat API does not have, or has in another form.

    `general` has the limits of the fields of a chat.
    """
    messages = {"minItems": 1, "maxItems": limits.messages}
    texts = {"minItems": 1, "maxItems": limits.prompts - 1}
    document = {"anyOf": [TEXT, typed_object({"text": TEXT}, "text")]}
    metadata = {
        "maxProperties": METADATA_PAIRS,
        "propertyNames": {"maxLength": METADATA_NAME},
        "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE},
    }
    count_of_logprobs = {"type": "integer", "minimum": 0, "maximum": limits.completion_logprobs}
    return {
        BatchChatRequest: {
            "messages": {
                "minItems": 1,
                "maxItems": limits.prompts,
                "items": {"type": "array", "items": MESSAGE, **messages},
            },
            "stream": {"enum": [False, None]},
            "tools": {"anyOf": [NULL]},
            "functions": {"anyOf": [NULL]},
        },
        CompletionRequest: {"logprobs": {"anyOf": [count_of_logprobs, {"enum": [False, None]}]}},
        BatchRequest: {
            "endpoint": {"enum": list(BATCH_URLS)},
            "completion_window": {"enum": ["24h", None]},
            "metadata": metadata,
        },
        MessagesRequest: anthropic_bounds(limits),
        ResponsesRequest: {**responses_bounds(limits, general), "metadata": metadata},
        **ollama_bounds(limits, general),
        RerankRequest: {
            "query": document,
            "documents": {**texts, "items": document},
            "top_n": {"minimum": 0},
        },
        ScoreRequest: {name: texts for pair in SCORE_SIDES for name in pair},
    }


def anthropic_bounds(limits: Limits) -> dict[str, Schema]:
    stop_string = {"minLength": 1, "maxLength": limits.stop_chars, "pattern": "^[^\\u0000]+$"}
    format = one_of_types({"schema": OBJECT}, "json_schema") | {"required": ["type", "schema"]}
    budget = {"type": ["integer", "null"], "minimum": -1, "maximum": 2**63 - 1}
    parallel_switch = {"disable_parallel_tool_use": SWITCH}
    return {
        "messages": {"minItems": 1, "maxItems": limits.messages, "items": ANTHROPIC_MESSAGE},
        "system": one_or_many(TEXT_BLOCK, NULL),
        "stop_sequences": {"maxItems": limits.stops, "items": stop_string},
        "tools": {"maxItems": limits.tools, "items": CUSTOM_TOOL},
        "tool_choice": {
            "anyOf": [
                NULL,
                one_of_types(parallel_switch, *CHOICES),
                one_of_types({"name": TEXT, **parallel_switch}, "tool")
                | {"required": ["type", "name"]},
            ]
        },
        "thinking": optional(one_of_types({"budget_tokens": budget}, *THINKING)),
        "output_config": optional(typed_object({**EFFORT, "format": optional(format)})),
    }


def responses_bounds(limits: Limits, general: dict[str, Schema]) -> dict[str, Schema]:
    schema = typed_object({"type": {"const": "json_schema"}, "schema": OBJECT}, "type", "schema")
    other_formats = [
        form
        for form in general["response_format"]["anyOf"]
        if form.get("properties", {}).get("type") != {"const": "json_schema"}
    ]
    ignored_tool = typed_object({"type": {"enum": list(IGNORED_TOOL_TYPES)}}, "type")
    named_tools = {"type": "array", "minItems": 1, "items": NAMED}
    choices = [
        {"enum": MODES},
        one_of_types({"name": TEXT}, "function") | {"required": ["type", "name"]},
        one_of_types({"tools": named_tools, "mode": {"enum": MODES}}, "allowed_tools")
        | {"required": ["type", "tools"]},
    ]
    return {
        "input": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "maxItems": limits.parts, "items": INPUT_ITEM},
            ]
        },
        "tools": {"maxItems": limits.tools, "items": {"anyOf": [FLAT_TOOL, ignored_tool]}},
        "tool_choice": {"anyOf": choices},
        "text": optional(typed_object({"format": {"anyOf": [schema, *other_formats]}})),
        "reasoning": optional(typed_object(EFFORT)),
        "truncation": {"enum": ["auto", "disabled", None]},
    }


def ollama_bounds(
    limits: Limits, general: dict[str, Schema]
) -> dict[type[msgspec.Struct], dict[str, Schema]]:
    shared: dict[str, Schema] = {
        "format": {"anyOf": [{"enum": ["", "json", None]}, OBJECT]},
        "options": optional(ollama_options(general)),
    }
    text: Schema = {"type": "string", "minLength": 1}
    texts = {"type": "array", "minItems": 1, "maxItems": limits.prompts, "items": TEXT}
    return {
        OllamaChatRequest: {
            **shared,
            "messages": {"maxItems": limits.messages, "items": OLLAMA_MESSAGE},
            "tools": {"maxItems": limits.tools, "items": TOOL},
        },
        OllamaGenerateRequest: shared,
        OllamaEmbedRequest: {"input": {"anyOf": [text, texts]}},
        OllamaEmbeddingRequest: {"prompt": text},
    }


def ollama_options(general: dict[str, Schema]) -> Schema:
    """Return the schema of Ollama's options, with the limits of the fields of a chat."""
    schema = msgspec.json.schema(OllamaOptions)["$defs"][OllamaOptions.__name__]
    properties: dict[str, Schema] = schema["properties"]
    for option, chat_field in OPTIONS.items():
        properties[option] |= general[chat_field]
    properties["num_predict"] = NUM_PREDICT
    return typed_object(properties)


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
