"""Generates the OpenAPI description from the structs of requests and the limits on their values."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from octavo import __version__
from octavo.params import MAX_LOGPROB_IDS, MAX_PATTERN_COUNT, MAX_PATTERN_SIZE
from octavo.serve.api.embeddings import SCORE_SIDES
from octavo.serve.api.message_schemas import (
    FUNCTION,
    FUNCTION_CALL,
    MESSAGE,
    NULL,
    OBJECT,
    SWITCH,
    TEXT,
    TOOL,
    TOOL_CHOICE,
    Schema,
    optional,
    typed_object,
)
from octavo.serve.api.other_api_schemas import (
    ANTHROPIC_ERROR,
    OLLAMA_ERROR,
    error_name,
    other_api_bounds,
)
from octavo.serve.api.protocol import (
    BatchChatRequest,
    BatchGenerateRequest,
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerateRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    PoolingRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
    TokensRequest,
)
from octavo.serve.limits import Limits

POSTS: dict[str, tuple[type[msgspec.Struct], str, tuple[str, ...]]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation.", ("messages",)),
    "/invocations": (
        ChatRequest,
        "Pass the request on to the route that its fields belong to (SageMaker): a chat, or a body "
        "of completions, embeddings, rerank or score.",
        ("messages",),
    ),
    "/v1/chat/completions/render": (
        ChatRequest,
        "Render the prompt of a conversation.",
        ("messages",),
    ),
    "/v1/chat/completions/batch": (
        BatchChatRequest,
        "Answer several conversations.",
        ("messages",),
    ),
    "/v1/batches": (BatchRequest, "Create a batch.", ("input_file_id", "endpoint")),
    "/v1/completions": (CompletionRequest, "Continue a text.", ("prompt",)),
    "/v1/completions/render": (CompletionRequest, "Tokenise prompts.", ("prompt",)),
    "/inference/v1/generate": (TokensRequest, "Continue token ids.", ("token_ids",)),
    "/v1/messages": (MessagesRequest, "Answer a conversation (Anthropic).", ("messages",)),
    "/v1/messages/count_tokens": (
        MessagesRequest,
        "Count the tokens of a conversation (Anthropic).",
        ("messages",),
    ),
    "/v1/responses": (ResponsesRequest, "Create a response (OpenAI).", ("input",)),
    "/api/chat": (OllamaChatRequest, "Answer a conversation (Ollama).", ()),
    "/api/generate": (OllamaGenerateRequest, "Answer a prompt (Ollama).", ()),
    "/api/embed": (OllamaEmbedRequest, "Return the embeddings of texts (Ollama).", ("input",)),
    "/api/embeddings": (
        OllamaEmbeddingRequest,
        "Return the embedding of a text (Ollama).",
        ("prompt",),
    ),
    "/v1/embeddings": (EmbeddingRequest, "Return the embeddings of texts.", ()),
    "/pooling": (PoolingRequest, "Return embeddings or hidden states of texts.", ()),
    "/rerank": (RerankRequest, "Order documents by relevance.", ("query", "documents")),
    "/v1/rerank": (RerankRequest, "Do the same as /rerank.", ("query", "documents")),
    "/v2/rerank": (RerankRequest, "Do the same as /rerank.", ("query", "documents")),
    "/score": (ScoreRequest, "Compare texts.", ()),
    "/v1/score": (ScoreRequest, "Do the same as /score.", ()),
    "/api/show": (OllamaShowRequest, "Describe the model (Ollama).", ()),
    "/generate": (GenerateRequest, "Continue a text, and reply with text only.", ("prompt",)),
    "/batch_generate": (BatchGenerateRequest, "Continue several texts.", ("prompts",)),
    "/tokenize": (TokenizeRequest, "Convert text to token ids.", ()),
    "/detokenize": (DetokenizeRequest, "Convert token ids to text.", ("tokens",)),
}
# The routes that reply with a stream if the request says so, and the content type of the stream.
STREAMED = {
    "/v1/chat/completions": "text/event-stream",
    "/invocations": "text/event-stream",
    "/v1/completions": "text/event-stream",
    "/inference/v1/generate": "text/event-stream",
    "/v1/messages": "text/event-stream",
    "/v1/responses": "text/event-stream",
    "/api/chat": "application/x-ndjson",
    "/api/generate": "application/x-ndjson",
}
# The routes that reply with bytes if encoding_format says so.
BINARY = ("/v1/embeddings", "/pooling")
GETS = {
    "/v1/models": "List the model.",
    "/tokenizer_info": "Describe the tokenizer.",
    "/v1/limits": "List the limits of requests.",
    "/v1/dumps": "Return the state of the engine when it hung, for administrators only.",
    "/version": "Return the version of the server.",
    "/livez": "Return status 200 while the event loop of the server runs.",
    "/readyz": "Return status 200 while the server accepts requests.",
    "/startupz": "Return status 200 after the model is loaded, and the progress before.",
    "/health": "Return the same as /readyz.",
    "/api/tags": "List the model (Ollama).",
    "/api/ps": "List the model, which is always loaded (Ollama).",
    "/api/version": "Return the version of the server (Ollama).",
    "/metrics": "Return the metrics in the text format of Prometheus.",
    "/server_info": "Describe the engine and its limits.",
    "/get_server_info": "Return the same as /server_info.",
    "/model_info": "Describe the model.",
    "/get_model_info": "Return the same as /model_info.",
    "/get_load": "Return the number of requests and tokens in the engine.",
    "/v1/files": "List the files.",
    "/v1/batches": "List the batches.",
    "/load": "Return the number of open requests.",
    "/ping": "Return the same as /readyz.",
    "/is_sleeping": "Return whether the engine sleeps.",
    "/health_generate": "Return status 200 after the engine has generated one token.",
}
POSTS_WITHOUT_BODY = {
    "/flush_cache": "Empty the prefix cache, for administrators only if there are API keys.",
    "/reset_prefix_cache": "Do the same as /flush_cache.",
    "/live/settings": "Change settings of the running engine. This needs --live-controls.",
    "/live/crash": "Kill the engine process. This needs --live-controls.",
    "/live/what-if": "Simulate requests under other settings. This needs --live-controls.",
    "/ping": "Return the same as /readyz.",
    "/sleep": "End the engine process until /wake_up, for administrators only if there are keys.",
    "/wake_up": "Start the engine process again.",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS = {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR, "OllamaError": OLLAMA_ERROR}
ERROR_CODES = [
    *("400", "401", "403", "404", "408", "413", "415"),
    *("421", "424", "429", "500", "503", "504"),
]

# A number of tokens. -1 stands for as many as fit.
LENGTH = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": 2**63 - 1},
        {"const": -1},
        {"type": "null"},
    ]
}
STREAM_OPTIONS = {
    name: {"type": ["boolean", "null"]} for name in ("include_usage", "continuous_usage_stats")
}
INTEGER: Schema = {"type": ["integer", "null"]}
SIZE = {"type": "integer", "minimum": 1, "maximum": MAX_PATTERN_SIZE}
LEAST_SIZE = {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_PATTERN_SIZE}
COUNT = {"type": "integer", "minimum": 2, "maximum": MAX_PATTERN_COUNT}
# The size 0 turns the detection off, and then the other values do not matter.
OFF: dict[str, Schema] = {
    "max_pattern_size": {"enum": [0, None]},
    "min_pattern_size": INTEGER,
    "min_count": INTEGER,
}
ON: dict[str, Schema] = {
    "max_pattern_size": SIZE,
    "min_pattern_size": LEAST_SIZE,
    "min_count": COUNT,
}
REPETITION_DETECTION = {
    "anyOf": [
        NULL,
        {**typed_object(OFF), "additionalProperties": False},
        {**typed_object(ON, "max_pattern_size", "min_count"), "additionalProperties": False},
    ]
}
STRUCTURE_TAG = typed_object(
    {"begin": TEXT, "end": TEXT, "schema": OBJECT}, "begin", "end", "schema"
)
ABSENT_SWITCH: Schema = {"enum": [False, None]}
STRUCTURAL_TAGS: dict[str, Schema] = {
    "type": {"const": "structural_tag"},
    "structures": {"type": "array", "minItems": 1, "items": STRUCTURE_TAG},
    "triggers": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
}


def text_of(limits: Limits) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": limits.structure_bytes}


def structure(limits: Limits) -> dict[str, Any]:
    """Return the schema of structured_outputs, which has exactly one kind of spec."""
    text = text_of(limits)
    kinds: dict[str, Schema] = {
        "json": {"anyOf": [OBJECT, text]},
        "regex": text,
        "choice": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        "grammar": text,
        "json_object": {"const": True},
    }
    absent: dict[str, Schema] = {name: NULL for name in kinds} | {"json_object": ABSENT_SWITCH}
    switches = ("disable_additional_properties", "disable_any_whitespace", "disable_fallback")
    options: dict[str, Schema] = dict.fromkeys(switches, SWITCH)
    pattern = optional({"type": "string", "minLength": 1})
    alternatives = []
    for kind, schema in kinds.items():
        whitespace = pattern if kind in ("json", "json_object") else NULL
        members = {**absent, **options, "whitespace_pattern": whitespace, kind: schema}
        alternatives.append({**typed_object(members, kind), "additionalProperties": NULL})
    return {"anyOf": [NULL, *alternatives]}


def kinds_of(forms: Iterable[tuple[str, dict[str, Schema], tuple[str, ...]]]) -> list[Schema]:
    """Return the schemas of objects with a type, their members, and the required members."""
    return [
        typed_object({"type": {"const": kind}, **members}, "type", *required)
        for kind, members, required in forms
    ]


def response_format(limits: Limits) -> dict[str, Any]:
    """Return the schema of response_format. structured_output.py accepts a few more names."""
    text = text_of(limits)
    schema = {"anyOf": [OBJECT, text]}
    wrapped = typed_object({"schema": OBJECT}, "schema")
    forms: list[tuple[str, dict[str, Schema], tuple[str, ...]]] = [
        ("text", {}, ()),
        ("json_object", {"schema": optional(schema)}, ()),
        ("json_schema", {"json_schema": wrapped}, ("json_schema",)),
        ("json_schema", {"schema": OBJECT, "json_schema": NULL}, ("schema",)),
        ("json", {"schema": schema}, ("schema",)),
        ("regex", {"pattern": text}, ("pattern",)),
        ("grammar", {"grammar": text}, ("grammar",)),
        ("structural_tag", STRUCTURAL_TAGS, ("structures", "triggers")),
    ]
    return {"anyOf": [NULL, *kinds_of(forms)]}


def typed_grammar(limits: Limits) -> dict[str, Any]:
    """Return the schema of the field grammar: a text, or TGI's object."""
    text = text_of(limits)
    values = {"json": {"anyOf": [OBJECT, text]}, "regex": text, "grammar": text}
    forms = [(kind, {"value": value}, ("value",)) for kind, value in values.items()]
    return {"anyOf": [NULL, text, *kinds_of(forms)]}


def bounds(
    names: tuple[str, ...], limits: Limits, vocab_size: int | None
) -> dict[str, dict[str, Any]]:
    """Return the limits of each field, to be added to the schema of its type.

    JSON Schema ignores a limit that does not apply to a value, such as `maximum` for a string.
    """
    id = {"type": "integer", "minimum": 0} | ({"maximum": vocab_size - 1} if vocab_size else {})
    return {
        "model": {"enum": [*names, None]},
        "cache_salt": {"minLength": 1, "maxLength": limits.salt_chars},
        "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
        "timeout": {"exclusiveMinimum": 0, "maximum": limits.timeout_seconds},
        "request_id": {"pattern": f"^[A-Za-z0-9._-]{{1,{limits.label_chars}}}$"},
        **prompt_bounds(limits, id),
        **sampling_bounds(limits, id),
        **reply_bounds(limits, id),
        **structure_bounds(limits),
    }


def prompt_bounds(limits: Limits, id: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the limits of the fields of prompts. `id` is the schema of a token id."""
    token_ids = {"type": "array", "items": id, "minItems": 1}
    single_prompt = {"anyOf": [TEXT, token_ids]}
    several = {"type": "array", "minItems": 1, "maxItems": limits.prompts, "items": single_prompt}
    prompt = {"anyOf": [TEXT, token_ids, several]}
    return {
        "prompt": prompt,
        "input": {"anyOf": [NULL, *prompt["anyOf"]]},
        "token_ids": {"items": id, "minItems": 1},
        "prompts": {"minItems": 1, "maxItems": limits.prompts},
        "tokens": {"items": id},
        "messages": {"minItems": 1, "maxItems": limits.messages, "items": MESSAGE},
        "tools": {"minItems": 1, "maxItems": limits.tools, "items": TOOL},
        "tool_choice": TOOL_CHOICE,
        "functions": {"minItems": 1, "maxItems": limits.tools, "items": FUNCTION},
        "function_call": FUNCTION_CALL,
        "truncate_prompt_tokens": LENGTH,
    }


def sampling_bounds(limits: Limits, id: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "temperature": {"minimum": 0, "maximum": 2},
        "top_p": {"minimum": 0, "maximum": 1},
        "top_k": {"minimum": -1, "maximum": 2**64 - 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
        "logit_bias": {
            "maxProperties": limits.logit_bias,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"minimum": -100, "maximum": 100},
        },
        "allowed_token_ids": {"items": id, "maxItems": limits.token_ids, "minItems": 1},
        "n": {"minimum": 1, "maximum": limits.n},
        "best_of": {"minimum": 0, "maximum": limits.best_of},
        "length_penalty": {"minimum": -10, "maximum": 10},
        "early_stopping": {"enum": [True, False, "never", None]},
    }


def reply_bounds(limits: Limits, id: dict[str, Any]) -> dict[str, dict[str, Any]]:
    stop = {"minLength": 1, "maxLength": limits.stop_chars, "pattern": "^[^\\u0000]+$"}
    return {
        "max_tokens": LENGTH,
        "max_completion_tokens": LENGTH,
        "max_new_tokens": LENGTH,
        "max_output_tokens": LENGTH,
        "dimensions": {"minimum": 1},
        "thinking_token_budget": {"minimum": -1, "maximum": 2**63 - 1},
        "min_tokens": {"minimum": 0, "maximum": 2**64 - 1},
        "stop": {**stop, "maxItems": limits.stops, "items": stop},
        "stop_token_ids": {"items": id, "maxItems": limits.token_ids},
        "repetition_detection": REPETITION_DETECTION,
        "stream_options": {"properties": STREAM_OPTIONS},
        "logprobs": {"minimum": 0, "maximum": limits.completion_logprobs},
        "top_logprobs": {"minimum": 0, "maximum": limits.top_logprobs},
        "prompt_logprobs": {"minimum": 0, "maximum": limits.top_logprobs},
        "logprob_token_ids": {"items": id, "maxItems": MAX_LOGPROB_IDS},
    }


def structure_bounds(limits: Limits) -> dict[str, dict[str, Any]]:
    text = {"minLength": 1, "maxLength": limits.structure_bytes}
    return {
        "response_format": response_format(limits),
        "structured_outputs": structure(limits),
        "guided_json": text,
        "guided_regex": text,
        "guided_grammar": text,
        "guided_choice": {"minItems": 1, "items": {"minLength": 1}},
        "guided_whitespace_pattern": {"minLength": 1},
        "json_schema": text,
        "regex": text,
        "ebnf": text,
        "grammar": typed_grammar(limits),
    }


def present(*names: str, without: Iterable[str]) -> dict[str, Any]:
    """Return the schema of requests that have these fields, and not the others."""
    fields = {name: {"not": NULL} for name in names} | dict.fromkeys(without, NULL)
    return {"required": list(names), "properties": fields}


def one_of(first: str, second: str) -> dict[str, Any]:
    return {"oneOf": [present(first, without=[second]), present(second, without=[first])]}


def one_pair() -> dict[str, Any]:
    """Return the schema of the two sides of a score, which have several names."""
    names = {name for pair in SCORE_SIDES for name in pair}
    pairs = [present(*pair, without=sorted(names - {*pair})) for pair in SCORE_SIDES]
    return {"anyOf": pairs}


# The requests that need one of several fields.
ALTERNATIVES: dict[type[msgspec.Struct], dict[str, Any]] = {
    TokenizeRequest: one_of("prompt", "messages"),
    EmbeddingRequest: one_of("input", "messages"),
    PoolingRequest: one_of("input", "messages"),
    ScoreRequest: one_pair(),
}


def describe(
    schema: dict[str, Any], required: tuple[str, ...], limits: dict[str, dict[str, Any]]
) -> None:
    """Add the limits to the schema of a struct. A required field may not be null."""
    for name, field in schema["properties"].items():
        if name in required:
            field["anyOf"] = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
            field.pop("default")
        bound = limits.get(name, {})
        if "anyOf" in bound:
            field.pop("anyOf")
        field.update(bound)
    if required:
        schema["required"] = list(required)


def post_operation(
    summary: str, schema: dict[str, Any], responses: dict[str, Any]
) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "requestBody": body, "responses": responses}


def upload_operation(responses: dict[str, Any]) -> dict[str, Any]:
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"enum": ["batch", "user_data"]},
        },
    }
    body = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    return {"summary": "Upload a file.", "requestBody": body, "responses": responses}


def id_paths(limits: Limits, responses: dict[str, Any]) -> dict[str, Any]:
    """Return the operations of the paths that contain an id."""
    id = {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    label = {
        **id,
        "schema": {"type": "string", "pattern": f"^[A-Za-z0-9._-]{{1,{limits.label_chars}}}$"},
    }

    def operation(summary: str, parameter: dict[str, Any]) -> dict[str, Any]:
        return {"summary": summary, "parameters": [parameter], "responses": responses}

    return {
        "/v1/models/{id}": {"get": operation("Describe the model.", id)},
        "/v1/requests/{id}/cancel": {"post": operation("Cancel a request.", label)},
        "/v1/responses/{id}": {
            "get": operation("Return a stored response.", label),
            "delete": operation("Delete a stored response.", label),
        },
        "/v1/responses/{id}/cancel": {"post": operation("Cancel a response.", label)},
        "/v1/files/{id}": {
            "get": operation("Describe a file.", label),
            "delete": operation("Delete a file.", label),
        },
        "/v1/files/{id}/content": {"get": operation("Return the content of a file.", label)},
        "/v1/batches/{id}": {"get": operation("Describe a batch.", label)},
        "/v1/batches/{id}/cancel": {"post": operation("Cancel a batch.", label)},
    }


def with_errors(responses: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the responses of a route, with those of its errors."""
    schema = {"$ref": f"#/components/schemas/{error_name(path)}"}
    failed = {
        "description": "The request failed.",
        "content": {"application/json": {"schema": schema}},
    }
    return {**responses, **dict.fromkeys(ERROR_CODES, failed)}


@cache
def description(
    names: tuple[str, ...], limits: Limits, vocab_size: int | None = None
) -> dict[str, Any]:
    """Return the OpenAPI description. `vocab_size` is None until the model is loaded."""
    kinds = list(dict.fromkeys(kind for kind, _, _ in POSTS.values()))
    refs, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(kinds, refs, strict=True))
    general = bounds(names, limits, vocab_size)
    bounds_by_kind = other_api_bounds(limits, general)
    required_by_kind = {kind: required for kind, _, required in POSTS.values()}
    for kind, required in required_by_kind.items():
        kind_bounds = dict(general)
        if kind is not CompletionRequest:
            del kind_bounds["prompt"]  # Other routes accept only a string.
        kind_bounds |= bounds_by_kind.get(kind, {})
        describe(components[kind.__name__], required, kind_bounds)
    for kind, alternatives in ALTERNATIVES.items():
        components[kind.__name__] |= alternatives
    good = {"description": "The request succeeded.", "content": {"application/json": {}}}
    responses: dict[str, Any] = {"200": good}
    paths: dict[str, Any] = {
        path: {"post": post_operation(text, schemas[kind], responses)}
        for path, (kind, text, _) in POSTS.items()
    }
    for path, text in GETS.items():
        paths.setdefault(path, {})["get"] = {"summary": text, "responses": responses}
    for path, text in POSTS_WITHOUT_BODY.items():
        paths.setdefault(path, {})["post"] = {"summary": text, "responses": responses}
    paths["/v1/files"]["post"] = upload_operation(responses)
    for path, content in {**STREAMED, **dict.fromkeys(BINARY, "application/octet-stream")}.items():
        streamed = {**good, "content": {"application/json": {}, content: {}}}
        paths[path]["post"]["responses"] = {**responses, "200": streamed}
    plain = {"description": "The request succeeded.", "content": {"text/plain": {}}}
    paths["/metrics"]["get"]["responses"] = {**responses, "200": plain}
    paths |= id_paths(limits, responses)
    file = {"description": "The request succeeded.", "content": {"application/octet-stream": {}}}
    paths["/v1/files/{id}/content"]["get"]["responses"] = {**responses, "200": file}
    for path, operations in paths.items():
        for operation in operations.values():
            operation["responses"] = with_errors(operation["responses"], path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__, "description": f"Serves {names[0]}."},
        "paths": paths,
        "components": {"schemas": {**components, **ERRORS}},
    }
