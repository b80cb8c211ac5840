"""Requests for embeddings and scores, and their replies, without I/O.

A request becomes a CompletionRequest or a ChatRequest with the same prompts, which takes their path
through the checks. The engine computes the prompts and generates nothing (octavo/pooling.py).
"""

from __future__ import annotations

import base64
import sys
import time
from typing import Any

import msgspec

from octavo.collect import Collector
from octavo.config import PoolerConfig
from octavo.pooling import PoolingParams, Vector, cosine, embedding
from octavo.serve.api.api_errors import invalid_field
from octavo.serve.api.number_formats import binary_values
from octavo.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    OllamaEmbedFields,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from octavo.serve.api.translation import FieldNames

encode = msgspec.json.Encoder().encode
METADATA_BYTES = 32_768  # limit of a header; common clients accept lines of 64 KiB
# The pairs of fields that hold the two sides of a score.
SCORE_SIDES = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)

# ---- requests ----------------------------------------------------------------------------------


def completion_of(body: PoolingFields, prompts: Any) -> CompletionRequest:
    """Return a completion whose prompts are the texts of a request."""
    return CompletionRequest(
        model=body.model,
        prompt=prompts,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt,
        priority=body.priority,
        timeout=body.timeout,
        request_id=body.request_id,
        user=body.user,
    )


def chat_of(body: EmbeddingRequest) -> ChatRequest:
    """Return a chat whose prompt is the conversation of a request."""
    return ChatRequest(
        model=body.model,
        messages=body.messages,
        chat_template_kwargs=body.chat_template_kwargs,
        # An embedding describes the existing messages, so the default opens no turn for an answer.
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt,
        priority=body.priority,
        timeout=body.timeout,
        request_id=body.request_id,
        user=body.user,
    )


def translate_embedding(
    body: EmbeddingRequest,
) -> tuple[CompletionRequest | ChatRequest, FieldNames]:
    if (body.input is None) == (body.messages is None):
        raise invalid_field("input", "the request must have either input or messages")
    if body.messages is not None:
        return chat_of(body), FieldNames({})
    return completion_of(body, body.input), FieldNames({"prompt": "input"})


def params_of(
    body: PoolingFields, dimensions: int | None = None, hidden_size: int = 0
) -> PoolingParams:
    params = PoolingParams(dimensions, body.use_activation, body.normalize)
    params.check_size(hidden_size)
    return params


def rerank_texts(body: RerankRequest) -> list[str]:
    """Return the query and the documents."""
    if body.query is None or not body.documents:
        missing = "documents" if body.query is not None else "query"
        raise invalid_field(missing, "the request must have a query, and documents to compare with")
    if body.top_n is not None and body.top_n < 0:
        raise invalid_field("top_n", f"top_n must be at least 0, got {body.top_n}")
    query = text_of(body.query, "query")
    documents = [text_of(text, f"documents.{i}") for i, text in enumerate(body.documents)]
    return [query, *documents]


def text_of(value: str | dict[str, Any], param: str) -> str:
    """Return a text, which may be the field `text` of an object."""
    text = value if isinstance(value, str) else value.get("text")
    if not isinstance(text, str):
        raise invalid_field(param, f"{param} must be a text, or an object with the field text")
    return text


def score_sides(body: ScoreRequest) -> tuple[list[str], list[str]]:
    """Return the texts of both sides. The first side has one text, or as many as the second."""
    for first, second in SCORE_SIDES:
        left = getattr(body, first)
        right = getattr(body, second)
        if left is None or right is None:
            continue
        check_one_pair(body, first, second)
        left_texts = [left] if isinstance(left, str) else left
        right_texts = [right] if isinstance(right, str) else right
        if not right_texts or len(left_texts) not in (1, len(right_texts)):
            raise invalid_field(
                first,
                f"{first} must have one text, or as many as {second}: it has {len(left_texts)}, "
                f"and {second} has {len(right_texts)}",
            )
        return left_texts, right_texts
    pairs = ", ".join(f"{first} and {second}" for first, second in SCORE_SIDES)
    raise invalid_field("text_1", f"the request must have two sides to compare: {pairs}")


def check_one_pair(body: ScoreRequest, first: str, second: str) -> None:
    """Refuse the fields of another pair, which would have no effect."""
    names = dict.fromkeys(name for pair in SCORE_SIDES for name in pair)
    for name in names:
        if name not in (first, second) and getattr(body, name) is not None:
            raise invalid_field(
                name, f"{name} cannot be combined with {first} and {second}: remove {name}"
            )


def ollama_fields(body: OllamaEmbedFields, model: str | None) -> PoolingFields:
    """Return the fields of an Ollama request. Ollama truncates a text that does not fit."""
    truncates = body.truncate is not False
    return PoolingFields(
        model=model,
        truncate_prompt_tokens=-1 if truncates else None,
        truncation_side="right" if truncates else None,
    )


# ---- replies -----------------------------------------------------------------------------------


def vector_of(
    collector: Collector, pooling: str, pooler: PoolerConfig, params: PoolingParams
) -> Vector:
    assert collector.pooled is not None  # The request has finished without an error.
    length = len(collector.request.prompt)
    return embedding(collector.pooled, length, pooling, pooler, params)


def usage_of(collectors: list[Collector]) -> dict[str, Any]:
    tokens = sum(len(collector.request.prompt) for collector in collectors)
    cached = sum(collector.cached for collector in collectors)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def embedding_entry(index: int, vector: Vector, kind: str, body: EmbeddingRequest) -> bytes:
    """Return one entry of the data of a reply. `kind` is "embedding" or "pooling"."""
    field = "embedding" if kind == "embedding" else "data"
    value: Any = vector.tolist()
    if body.encoding_format == "base64":
        value = base64.b64encode(vector_bytes(vector, body)).decode()
    return encode({"object": kind, "index": index, field: value})


def vector_bytes(vector: Vector, body: EmbeddingRequest) -> bytes:
    """Return the values of a vector in the type and the byte order of the request."""
    order = body.endianness or "little"
    order = sys.byteorder if order == "native" else order
    return binary_values(vector, body.embed_dtype or "float32", order)


def metadata_of(
    head: dict[str, Any],
    vectors: list[Vector],
    parts: list[bytes],
    usage: dict[str, Any],
    body: EmbeddingRequest,
) -> str:
    """Return the header with the position of each vector in a binary reply."""
    items = []
    start = 0
    for index, (vector, part) in enumerate(zip(vectors, parts, strict=True)):
        end = start + len(part)
        items.append(
            {
                "index": index,
                "embed_dtype": body.embed_dtype or "float32",
                "endianness": body.endianness or "little",
                "start": start,
                "end": end,
                "shape": list(vector.shape),
            }
        )
        start = end
    text = encode({**head, "data": items, "usage": usage}).decode("latin-1")
    if len(text) > METADATA_BYTES:
        raise invalid_field(
            "encoding_format",
            f"the header metadata of {len(vectors)} embeddings would have {len(text)} bytes, but "
            f"clients accept {METADATA_BYTES}: send fewer texts, or use bytes_only",
            "param_out_of_range",
        )
    return text


def envelope(caller_id: str, model: str) -> dict[str, Any]:
    id = f"embd-{caller_id.removeprefix('req_')}"
    return {"id": id, "object": "list", "created": int(time.time()), "model": model}


def score_reply(
    head: dict[str, Any], left: list[Vector], right: list[Vector], usage: dict[str, Any]
) -> dict[str, Any]:
    pairs = zip(left * (len(right) // len(left)), right, strict=True)
    data = [
        {"index": index, "object": "score", "score": cosine(*pair)}
        for index, pair in enumerate(pairs)
    ]
    return {**head, "data": data, "usage": usage}


def rerank_reply(
    body: RerankRequest, texts: list[str], vectors: list[Vector], usage: dict[str, Any]
) -> dict[str, Any]:
    """Return the documents by relevance, the most relevant first."""
    query, *documents = vectors
    scores = [cosine(query, document) for document in documents]
    order = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)
    results = [
        {
            "index": index,
            "document": {"text": texts[index + 1]},
            "relevance_score": scores[index],
        }
        for index in order[: body.top_n or None]
    ]
    if body.return_documents is False:
        for result in results:
            del result["document"]
    return {"results": results, "usage": usage}
