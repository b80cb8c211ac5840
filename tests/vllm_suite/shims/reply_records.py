"""The replies that vLLM's tests read with vLLM's own classes. A reply of another form is refused."""

from __future__ import annotations

from typing import Any, Literal

from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class Usage(Record):
    prompt_tokens: int
    total_tokens: int


class ListReply(Record):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: Usage


class Embedding(Record):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingResponse(ListReply):
    data: list[Embedding]


class Pooled(Record):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingResponse(ListReply):
    data: list[Pooled]


class Score(Record):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(ListReply):
    data: list[Score]


class Document(Record):
    text: str


class Ranked(Record):
    index: int
    document: Document
    relevance_score: float


class RerankResponse(Record):
    id: str
    model: str
    usage: Usage
    results: list[Ranked]


class BatchResponse(Record):
    status_code: int
    request_id: str
    body: ChatCompletion | EmbeddingResponse | ScoreResponse | RerankResponse | None = None


class BatchRequestOutput(Record):
    id: str
    custom_id: str
    response: BatchResponse | None
    error: Any | None


class TokenizeResponse(Record):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
