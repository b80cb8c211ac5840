"""The routes of embeddings and scores: /v1/embeddings, /pooling, /rerank, /score and Ollama's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.collect import Collector
from octavo.pooling import PoolingParams, Vector, pooling_sampling
from octavo.serve.api import embeddings as api
from octavo.serve.api import prompt, validate
from octavo.serve.api.api_errors import invalid_field, unsupported
from octavo.serve.api.ollama_api import SECOND, served_name
from octavo.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedFields,
    OllamaEmbedRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from octavo.serve.api.request_fields import EMBEDDINGS_TABLE, OLLAMA_EMBED_TABLE, Field
from octavo.serve.api.translation import FieldNames
from octavo.serve.api.validate import CheckedRequest, Prepared
from octavo.serve.endpoints.completions import open_call
from octavo.serve.http.exchange import Exchange

encode = msgspec.json.Encoder().encode
VALUES_PER_TURN = 65_536  # The event loop encodes this many numbers in about 3 ms.


@dataclass
class Pooled:
    """The finished prompts of a request."""

    collectors: list[Collector]
    vectors: list[Vector]
    headers: dict[str, str]

    @property
    def usage(self) -> dict[str, Any]:
        return api.usage_of(self.collectors)


# ---- routes ------------------------------------------------------------------------------------


async def embeddings(exchange: Exchange) -> None:
    body, unknown = await exchange.body(EmbeddingRequest, generates=True)
    pooled = await pool_input(exchange, body, unknown)
    await send_vectors(exchange, pooled, "embedding", body)


async def pooling(exchange: Exchange) -> None:
    """Reply as /v1/embeddings does or, for the task token_embed, with a state for each token."""
    body, unknown = await exchange.body(PoolingRequest, generates=True)
    kind = "all" if body.task == "token_embed" else None
    pooled = await pool_input(exchange, body, unknown, kind)
    await send_vectors(exchange, pooled, "pooling", body)


async def rerank(exchange: Exchange) -> None:
    body, unknown = await exchange.body(RerankRequest, generates=True)
    texts = api.rerank_texts(body)
    names = FieldNames({"the prompt": "the text", "prompt": "documents"})
    request = api.completion_of(body, texts)
    pooled = await pool(exchange, request, names, unknown, api.params_of(body))
    reply = api.rerank_reply(body, texts, pooled.vectors, pooled.usage)
    head = {"id": f"rerank-{exchange.caller.id}", "model": exchange.front.config.name}
    await exchange.reply({**head, **reply}, pooled.headers)


async def score(exchange: Exchange) -> None:
    body, unknown = await exchange.body(ScoreRequest, generates=True)
    left_texts, right_texts = api.score_sides(body)
    request = api.completion_of(body, [*left_texts, *right_texts])
    names = FieldNames({"the prompt": "the text", "prompt": "the texts"})
    pooled = await pool(exchange, request, names, unknown, api.params_of(body))
    head = api.envelope(exchange.caller.id, exchange.front.config.name)
    vectors = pooled.vectors
    reply = api.score_reply(
        head, vectors[: len(left_texts)], vectors[len(left_texts) :], pooled.usage
    )
    await exchange.reply(reply, pooled.headers)


async def ollama_embed(exchange: Exchange) -> None:
    body, unknown = await exchange.body(OllamaEmbedRequest, generates=True)
    started = time.monotonic()
    pooled = await pool_ollama(exchange, body, body.input, unknown)
    duration = int((time.monotonic() - started) * SECOND)
    head = {
        "model": body.model or exchange.front.config.name,
        "total_duration": duration,
        "load_duration": 0,
        "prompt_eval_count": pooled.usage["prompt_tokens"],
    }
    entries = [vector.tolist() for vector in pooled.vectors]
    await exchange.reply({**head, "embeddings": entries}, pooled.headers)


async def ollama_embeddings(exchange: Exchange) -> None:
    """Reply with one embedding, in the format of older Ollama clients."""
    body, unknown = await exchange.body(OllamaEmbeddingRequest, generates=True)
    pooled = await pool_ollama(exchange, body, body.prompt, unknown, "prompt")
    await exchange.reply({"embedding": pooled.vectors[0].tolist()}, pooled.headers)


# ---- the path of a request ---------------------------------------------------------------------


async def pool_input(
    exchange: Exchange, body: EmbeddingRequest, unknown: dict[str, Any], kind: str | None = None
) -> Pooled:
    request, names = api.translate_embedding(body)
    hidden_size = exchange.front.engine_client.model.hidden_size
    params = api.params_of(body, body.dimensions, hidden_size)
    return await pool(exchange, request, names, unknown, params, kind)


async def pool_ollama(
    exchange: Exchange,
    body: OllamaEmbedFields,
    texts: Any,
    unknown: dict[str, Any],
    param: str = "input",
) -> Pooled:
    front = exchange.front
    for name in {"input", "prompt"} & unknown.keys():
        raise unsupported(name, f"on this route, the text is in {param}")
    if not texts:
        kinds = "a text or a list of texts" if param == "input" else "a text"
        raise invalid_field(param, f"{param} must be {kinds}")
    fields = api.ollama_fields(body, served_name(body.model, front.config.names))
    params = api.params_of(fields, body.dimensions, front.engine_client.model.hidden_size)
    names = FieldNames({"prompt": param}, ignored=["options"] if body.options else [])
    request = api.completion_of(fields, texts)
    return await pool(exchange, request, names, unknown, params, table=OLLAMA_EMBED_TABLE)


async def pool(
    exchange: Exchange,
    request: CompletionRequest | ChatRequest,
    names: FieldNames,
    unknown: dict[str, Any],
    params: PoolingParams,
    kind: str | None = None,
    table: Mapping[str, Field] = EMBEDDINGS_TABLE,
) -> Pooled:
    """Compute the prompts of a request. `kind` is a name of POOLINGS, by default the model's."""
    front = exchange.front
    pooler = front.engine_client.model.pooler
    with names.errors(sent=unknown):
        prepared = await prepare(exchange, request, unknown, table)
        validate.ignore(prepared.headers, *names.ignored)
        for engine_request in prepared.requests:
            engine_request.pooling = kind or pooler.pooling
        check_values(exchange, prepared, params, per_token=kind == "all")
        with open_call(front, exchange.caller, prepared, stream=False) as call:
            exchange.watch(call)
            await call.wait_finished()
    vectors = [
        api.vector_of(collector, kind or pooler.pooling, pooler, params)
        for collector in call.collectors
    ]
    return Pooled(call.collectors, vectors, prepared.headers)


async def prepare(
    exchange: Exchange,
    request: CompletionRequest | ChatRequest,
    unknown: dict[str, Any],
    table: Mapping[str, Field],
) -> Prepared:
    """Check a request and tokenise its prompts."""
    front = exchange.front
    headers = validate.check_fields(front, unknown, chat=False, table=table)
    timeout = validate.check_common(front, exchange.caller, request)
    checked = CheckedRequest(pooling_sampling(), 0, timeout, headers)
    param = "prompt"
    if isinstance(request, ChatRequest):
        param = "messages"
        prompt.check_template_options(front, request, headers)
        context = prompt.max_prompt_tokens(front, request.truncate_prompt_tokens)
        ids = await prompt.chat_ids(front, request, checked, None, context)
        prompts: list[tuple[str | None, list[int]]] = [(None, ids)]
    else:
        prompts = await prompt.completion_prompts(front, request, checked)
    return validate.build(front, exchange.caller, request, prompts, checked, param)


def check_values(
    exchange: Exchange, prepared: Prepared, params: PoolingParams, per_token: bool
) -> None:
    """Refuse a request whose reply would have too many numbers."""
    front = exchange.front
    size = params.dimensions or front.engine_client.model.hidden_size
    count = sum(len(request.prompt) if per_token else 1 for request in prepared.requests) * size
    limit = front.config.limits.embedding_values
    if count > limit:
        raise invalid_field(
            "prompt",
            f"the reply would have {count} numbers, but at most {limit} are allowed: send fewer "
            "texts in one request",
            "param_out_of_range",
        )


async def send_vectors(
    exchange: Exchange, pooled: Pooled, kind: str, body: EmbeddingRequest
) -> None:
    """Send a reply that may have millions of numbers, without blocking the event loop."""
    head = api.envelope(exchange.caller.id, exchange.front.config.name)
    is_binary = body.encoding_format in ("bytes", "bytes_only")
    entries: list[bytes] = []
    encoded_values = 0
    for index, vector in enumerate(pooled.vectors):
        if is_binary:
            entries.append(api.vector_bytes(vector, body))
        else:
            entries.append(api.embedding_entry(index, vector, kind, body))
        encoded_values += vector.size
        if encoded_values > VALUES_PER_TURN:
            encoded_values = 0
            await asyncio.sleep(0)
    if is_binary:
        headers = pooled.headers
        if body.encoding_format == "bytes":
            metadata = api.metadata_of(head, pooled.vectors, entries, pooled.usage, body)
            headers = {**headers, "metadata": metadata}
        await exchange.send(b"".join(entries), "application/octet-stream", headers)
        return
    reply = b"".join(
        (
            encode(head)[:-1],
            b',"data":[',
            b",".join(entries),
            b'],"usage":',
            encode(pooled.usage),
            b"}",
        )
    )
    await exchange.send(reply, "application/json", pooled.headers)
