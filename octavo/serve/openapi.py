"""The description of the HTTP interface, put together from the structs that read it."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from octavo import __version__
from octavo.serve.protocol import (
    BatchGenerateRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)

POSTS: dict[str, tuple[type[msgspec.Struct], str, tuple[str, ...]]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation.", ("messages",)),
    "/v1/chat/completions/render": (ChatRequest, "The prompt that a conversation becomes.", ("messages",)),
    "/v1/completions": (CompletionRequest, "Continue a text.", ("prompt",)),
    "/generate": (GenerateRequest, "Continue a text; the reply is its text alone.", ("prompt",)),
    "/batch_generate": (BatchGenerateRequest, "Continue several texts.", ("prompts",)),
    "/tokenize": (TokenizeRequest, "Text to token ids.", ()),
    "/detokenize": (DetokenizeRequest, "Token ids to text.", ("tokens",)),
}
GETS = {
    "/v1/models": "The models: one.",
    "/tokenizer_info": "What the tokenizer is.",
    "/v1/limits": "The bounds of everything a request may hold.",
    "/version": "The server's version.",
    "/livez": "200 while the server's loop runs.",
    "/readyz": "200 while requests are taken.",
    "/startupz": "200 once the model is loaded; before, how far it is.",
    "/health": "As /readyz.",
    "/metrics": "Prometheus' text format.",
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


@cache
def description(name: str) -> dict[str, Any]:
    kinds = list(dict.fromkeys(kind for kind, _, _ in POSTS.values()))
    refs, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(kinds, refs, strict=True))
    for kind, _, required in POSTS.values():
        if required:
            components[kind.__name__]["required"] = list(required)
    failed = {
        "description": "What was wrong.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    good = {"description": "Done.", "content": {"application/json": {}}}
    codes = ("400", "401", "403", "404", "408", "413", "415", "421", "429", "500", "503", "504")
    responses = {"200": good, **dict.fromkeys(codes, failed)}
    paths: dict[str, Any] = {
        path: {"post": {"summary": text, "requestBody": {"required": True, "content": {"application/json": {
            "schema": schemas[kind]}}}, "responses": responses}}
        for path, (kind, text, _) in POSTS.items()
    }  # fmt: skip
    paths |= {path: {"get": {"summary": text, "responses": responses}} for path, text in GETS.items()}
    id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{id}"] = {"get": {"summary": "One model.", "parameters": [id], "responses": responses}}
    paths["/v1/requests/{id}/cancel"] = {"post": {"summary": "End a request.", "parameters": [id], "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__, "description": f"Serves {name}."},
        "paths": paths,
        "components": {"schemas": {**components, "Error": ERROR}},
    }
