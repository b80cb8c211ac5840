"""The routes of embeddings and scores: /v1/embeddings, /pooling, /rerank, /score and Ollama's."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from octavo import LLM
from octavo.serve.api.request_fields import EMBEDDINGS, HONOURED, IGNORED, REFUSED
from tests import tiny
from tests.serve.running import NAME, Running, check_error

EMBED = "/v1/embeddings"
TEXTS = ["hello world", "goodbye", "a longer text with several words"]


@pytest.fixture(scope="module")
def want() -> dict[str, list[float]]:
    """The embeddings that the Python API returns."""
    llm = LLM(tiny.model_dir(), max_model_len=256, progress=False)
    return {
        text: found.outputs.embedding for text, found in zip(TEXTS, llm.embed(TEXTS), strict=True)
    }


def vectors(reply: Any) -> list[list[float]]:
    assert reply.status_code == 200, reply.text
    return [entry["embedding"] for entry in reply.json()["data"]]


def test_the_openai_client_gets_the_embeddings_of_the_python_api(
    running: Running, want: dict[str, list[float]]
) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="x")
    for options in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model=NAME, input=TEXTS, **options)
        assert [entry.index for entry in found.data] == [0, 1, 2]
        for entry, text in zip(found.data, TEXTS, strict=True):
            assert entry.embedding == pytest.approx(want[text], abs=1e-5)
        assert found.usage.prompt_tokens == found.usage.total_tokens > 0
    short = client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=4)
    assert len(short.data[0].embedding) == 4


def test_token_ids_and_conversations(running: Running, want: dict[str, list[float]]) -> None:
    ids = running.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    (by_ids,) = vectors(running.post(EMBED, {"input": ids}))
    assert by_ids == pytest.approx(want[TEXTS[0]], abs=1e-5)
    assert len(vectors(running.post(EMBED, {"input": [ids, ids[:2]]}))) == 2
    messages = [{"role": "user", "content": "hi"}]
    chat = {"messages": messages, "add_generation_prompt": False}
    rendered = running.post("/v1/chat/completions/render", chat).json()["token_ids"]
    assert vectors(running.post(EMBED, {"messages": messages})) == vectors(
        running.post(EMBED, {"input": rendered})
    )


def test_base64_holds_little_endian_floats(running: Running) -> None:
    plain = vectors(running.post(EMBED, {"input": "x"}))[0]
    packed = vectors(running.post(EMBED, {"input": "x", "encoding_format": "base64"}))[0]
    found = np.frombuffer(base64.b64decode(packed), "<f4")  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx(plain)


def test_a_binary_reply_holds_the_embeddings_one_after_the_other(running: Running) -> None:
    plain = vectors(running.post(EMBED, {"input": TEXTS}))
    asked = {"input": TEXTS, "embed_dtype": "float16", "endianness": "big"}
    reply = running.post(EMBED, {**asked, "encoding_format": "bytes"})
    assert reply.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(reply.headers["metadata"])
    assert metadata["usage"]["prompt_tokens"] > 0
    for index, entry in enumerate(metadata["data"]):
        found = np.frombuffer(reply.content[entry["start"] : entry["end"]], dtype=">f2")
        assert entry["index"] == index and entry["shape"] == [len(found)]
        assert found.tolist() == pytest.approx(plain[index], abs=1e-3)
    bare = running.post(EMBED, {**asked, "encoding_format": "bytes_only"})
    assert bare.content == reply.content and "metadata" not in bare.headers


def test_a_metadata_header_that_clients_cannot_read_is_refused(running: Running) -> None:
    body = {"input": [[1]] * 500, "encoding_format": "bytes"}
    message = check_error(running.post(EMBED, body), 400, "encoding_format")["message"]
    assert "use bytes_only" in message
    assert len(running.post(EMBED, {**body, "encoding_format": "bytes_only"}).content) == 500 * 128


def test_the_usage_counts_cached_tokens(running: Running) -> None:
    text = "a text that is long enough for several blocks of the prefix cache " * 2
    details = [
        running.post(EMBED, {"input": text}).json()["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert details[1]["cached_tokens"] > details[0]["cached_tokens"] == 0


def test_pooling_returns_the_state_of_every_token(running: Running) -> None:
    body = {"input": [5, 6, 7], "use_activation": False}
    entry = running.post("/pooling", {**body, "task": "token_embed"}).json()["data"][0]
    assert np.array(entry["data"]).shape == (3, 32) and entry["object"] == "pooling"
    (last,) = vectors(running.post(EMBED, body))
    assert entry["data"][2] == pytest.approx(last, abs=1e-5)
    whole = running.post("/pooling", body).json()["data"][0]
    assert whole["data"] == pytest.approx(last, abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_relevance(
    running: Running, want: dict[str, list[float]], path: str
) -> None:
    reply = running.post(path, {"model": NAME, "query": TEXTS[0], "documents": TEXTS}).json()
    scores = [float(np.dot(want[TEXTS[0]], want[text])) for text in TEXTS]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [entry["index"] for entry in reply["results"]] == order and order[0] == 0
    assert [entry["relevance_score"] for entry in reply["results"]] == pytest.approx(
        [scores[index] for index in order], abs=1e-5
    )
    assert reply["results"][0]["document"] == {"text": TEXTS[0]}
    two = {"query": TEXTS[0], "documents": [{"text": text} for text in TEXTS], "top_n": 2}
    two |= {"return_documents": False}
    found = running.post(path, two).json()["results"]
    assert [set(entry) for entry in found] == [{"index", "relevance_score"}] * 2


def test_scores(running: Running, want: dict[str, list[float]]) -> None:
    scores = [float(np.dot(want[TEXTS[0]], want[text])) for text in TEXTS]
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items")):
        reply = running.post("/score", {first: TEXTS[0], second: TEXTS}).json()
        assert [entry["score"] for entry in reply["data"]] == pytest.approx(scores, abs=1e-5)
    pairs = running.post("/v1/score", {"data_1": TEXTS, "data_2": TEXTS}).json()["data"]
    assert [entry["score"] for entry in pairs] == pytest.approx([1, 1, 1])


def test_a_truncated_text_fills_the_context(running: Running) -> None:
    body = {"input": "word " * 2000, "truncate_prompt_tokens": -1}
    assert running.post(EMBED, body).json()["usage"]["prompt_tokens"] == 1024


def test_ollama(running: Running, want: dict[str, list[float]]) -> None:
    reply = running.post("/api/embed", {"model": f"{NAME}:latest", "input": TEXTS}).json()
    assert reply["embeddings"][1] == pytest.approx(want[TEXTS[1]], abs=1e-5)
    assert reply["prompt_eval_count"] > 0 and reply["total_duration"] > 0
    one = running.post("/api/embeddings", {"model": NAME, "prompt": TEXTS[1]}).json()
    assert one["embedding"] == pytest.approx(want[TEXTS[1]], abs=1e-5)
    long = {"input": "word " * 2000}
    assert running.post("/api/embed", long).headers["x-truncated-tokens"]
    assert running.post("/api/embed", {**long, "truncate": False}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBED, {}, "input"),
        (EMBED, {"input": "x", "messages": []}, "input"),
        (EMBED, {"input": []}, "input"),
        (EMBED, {"input": [1.5]}, "input"),
        (EMBED, {"input": [300]}, "input"),
        (EMBED, {"input": "word " * 2000}, "input"),
        (EMBED, {"input": "x", "dimensions": 33}, "dimensions"),
        (EMBED, {"input": "x", "dimensions": 0}, "dimensions"),
        (EMBED, {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        (EMBED, {"input": "x", "embed_dtype": "int8"}, "embed_dtype"),
        (EMBED, {"input": "x", "endianness": "middle"}, "endianness"),
        (EMBED, {"input": "x", "model": "other"}, "model"),
        (EMBED, {"input": "x", "temperature": 1}, "temperature"),
        ("/rerank", {"query": "x", "documents": []}, "documents"),
        ("/rerank", {"documents": ["x"]}, "query"),
        ("/rerank", {"query": "x", "documents": [{"title": "x"}]}, "documents.0"),
        ("/rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
        ("/score", {"text_1": "x"}, "text_1"),
        ("/score", {"text_1": ["x", "y"], "text_2": "z"}, "text_1"),
        ("/score", {"text_1": "x", "text_2": []}, "text_1"),
        ("/score", {"text_1": "x", "text_2": "y", "items": "z"}, "items"),
        ("/score", {"text_1": "x", "text_2": "word " * 2000}, "the texts"),
    ],
)
def test_refused(running: Running, path: str, body: dict[str, Any], param: str) -> None:
    status = 404 if body.get("model") == "other" else 400
    check_error(running.post(path, body), status, param)


def test_the_error_of_a_long_text_names_it(running: Running) -> None:
    reply = running.post("/score", {"text_1": "x", "text_2": "word " * 2000})
    message = check_error(reply, 400, "the texts")["message"]
    assert message.startswith("the text has ")


def test_a_reply_with_too_many_numbers_is_refused(running: Running) -> None:
    """The limit is on numbers, because a reply for each token can be large."""
    body = {"input": [[1] * 200] * 2048, "task": "token_embed"}
    assert "numbers, but at most" in check_error(running.post("/pooling", body), 400)["message"]


# ---- every field -------------------------------------------------------------------------------

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "task": ("/pooling", {"input": "hi"}),
    "query": ("/rerank", {"documents": ["a", "b"], "query": "a"}),
    "documents": ("/rerank", {"documents": ["a", "b"], "query": "a"}),
    "top_n": ("/rerank", {"documents": ["a", "b"], "query": "a"}),
    "return_documents": ("/rerank", {"documents": ["a", "b"], "query": "a"}),
}
SCORES = ("/score", {"queries": "a", "documents": "b"})
CHAT = (EMBED, {"messages": [{"role": "user", "content": "hi"}]})
SHOWN: dict[str, Any] = {
    "input": "other",
    "messages": [{"role": "user", "content": "other"}],
    "chat_template_kwargs": {"unused": 1},
    "add_generation_prompt": True,
    "continue_final_message": True,
    "dimensions": 4,
    "encoding_format": "base64",
    "embed_dtype": "float16",
    "endianness": "big",
    "task": "token_embed",
    "query": "b",
    "documents": ["b", "a", "c"],
    "top_n": 1,
    "return_documents": False,
    "queries": "c",
    "use_activation": False,
    "normalize": False,
    "truncate_prompt_tokens": 1,
    "truncation_side": "right",
}
# test_scores sends the names of a pair. The tokenizer of the tiny model adds no special tokens.
ELSEWHERE = {"items", "text_1", "text_2", "data_1", "data_2", "add_special_tokens"}


def test_every_honoured_field_has_an_effect(running: Running) -> None:
    names = {field.name for field in EMBEDDINGS if field.chat == HONOURED}
    assert set(SHOWN) == names - ELSEWHERE
    for name, value in SHOWN.items():
        path, base = BASES.get(name, (EMBED, {"input": "hello there", "truncate_prompt_tokens": 2}))
        if name == "queries":
            path, base = SCORES
        if name in ("messages", "chat_template_kwargs") or name.endswith(("_prompt", "_message")):
            path, base = CHAT
        if name in ("embed_dtype", "endianness"):
            base = {**base, "encoding_format": "base64"}
        seen = []
        for body in (base, {**base, name: value}):
            reply = running.post(path, body)
            assert reply.status_code == 200, (name, reply.text)
            found = {**reply.json(), "id": 0, "created": 0}
            seen.append((found, reply.headers.get("x-ignored-params")))
        assert seen[0] != seen[1], f"{name} has no effect"


def test_every_other_field_is_named(running: Running) -> None:
    for field in EMBEDDINGS:
        body = {"input": "hi", field.name: "x"}
        if field.chat == IGNORED:
            assert running.post(EMBED, body).headers["x-ignored-params"] == field.name
        if field.chat == REFUSED:
            check_error(running.post(EMBED, body), 400, field.name)
