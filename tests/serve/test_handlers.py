"""The jobs of worker processes: what goes back to the event loop is right, and of bounded size."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.serve.api.api_errors import ApiError, api_error
from octavo.serve.channel.jobs import Detokenize, Encode, EncodeChat, Parse, Tokenize, unpack
from octavo.serve.front.tokenize import Texts
from octavo.serve.front.worker_pool import WorkerPool
from octavo.serve.limits import Limits
from octavo.serve.workers import handlers
from octavo.serve.workers.handlers import Context
from octavo.text.tokenizer import Tokenizer
from tests import tiny

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    limits = Limits(values=100, unknown_fields=3, prompt_tokens=2000)
    return Context(Tokenizer.from_directory(folder), tiny.VOCAB, 1024, limits)


def parse(context: Context, kind: str, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return handlers.parse_body(context, Parse(kind, json.dumps(body).encode()))


def refusal(context: Context, job: Any) -> ApiError:
    with pytest.raises((ApiError, InvalidRequest)) as caught:
        handlers.HANDLERS[type(job)](context, job)
    return api_error(caught.value)


def chat(template: str | None = None, content: str = "hi", **options: Any) -> EncodeChat:
    messages = [{"role": "user", "content": content}]
    return EncodeChat(messages, None, template, options, context=1024)


# ---- bodies --------------------------------------------------------------------------------------


def test_token_ids_come_back_packed_and_everything_else_as_it_was(context: Context) -> None:
    body = {"prompt": [[1, 2], "a text", [3]], "max_tokens": 7, "metadata": {"a": 1}, "wat": 1}
    request, unknown = parse(context, "CompletionRequest", body)
    first, text, last = request.prompt
    assert (unpack(first), text, unpack(last)) == ([1, 2], "a text", [3])
    assert (request.max_tokens, request.metadata, unknown) == (7, None, {"wat": 1})
    request, _ = parse(context, "CompletionRequest", {"prompt": [1, 2, 3]})
    assert [unpack(ids) for ids in request.prompt] == [[1, 2, 3]]
    request, _ = parse(context, "ChatRequest", {"messages": HI})
    assert request.messages == HI


@pytest.mark.parametrize(
    ("kind", "body", "param", "code"),
    [
        ("CompletionRequest", {"prompt": [1] * 1024}, "prompt", "context_length_exceeded"),
        ("CompletionRequest", {"prompt": [[1] * 1000] * 3}, "prompt", "param_out_of_range"),
        ("CompletionRequest", {"prompt": [[1]] * 1025}, "prompt", "param_out_of_range"),
        ("CompletionRequest", {"prompt": [1, 300]}, "prompt", None),
        ("CompletionRequest", {"prompt": [1, True]}, "prompt", None),
        ("CompletionRequest", {"prompt": ["a"] * 101}, "prompt", "param_out_of_range"),
        ("CompletionRequest", {"stop_token_ids": [1] * 101}, "stop_token_ids", "param_out_of_range"),
        ("ChatRequest", {"messages": HI * 60}, "messages", "param_out_of_range"),
        ("ChatRequest", {"messages": [{"a": [[[[]] * 30] * 4]}]}, "messages", "param_out_of_range"),
        ("ChatRequest", {"messages": HI, "a": 1, "b": 1, "c": 1, "d": 1}, None, "param_out_of_range"),
    ],
)  # fmt: skip
def test_a_request_that_would_be_large_is_refused(
    context: Context, kind: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    error = refusal(context, Parse(kind, json.dumps(body).encode()))
    assert (error.status, error.param, error.code) == (400, param, code)


def test_more_token_ids_than_the_context_may_be_truncated(context: Context) -> None:
    body = {"prompt": [1] * 1500, "truncate_prompt_tokens": 10}
    request, _ = parse(context, "CompletionRequest", body)
    assert len(unpack(request.prompt[0])) == 1500


def test_a_large_unknown_field_is_named_and_not_sent_back(context: Context) -> None:
    body = {"prompt": "a", "x": [1] * 1000, "tools": [], "modalities": ["text"]}
    _, unknown = parse(context, "CompletionRequest", body)
    assert unknown == {"x": True, "tools": [], "modalities": ["text"]}


# ---- text ----------------------------------------------------------------------------------------


def test_texts_are_tokenised_and_cut_to_their_last_tokens(context: Context) -> None:
    texts = ["hello", "a" * 2000]
    first, second = handlers.encode_texts(context, Encode(texts, context=1024, keep=3))
    expected = context.tokenizer.encode("hello")
    assert (unpack(first.ids), first.total) == (expected[-3:], len(expected))
    assert len(unpack(second.ids)) == 3 and second.total >= 2000


def test_texts_are_cut_to_their_first_tokens_if_the_job_says_so(context: Context) -> None:
    job = Encode(["hello"], context=1024, keep=3, keep_first=True)
    (found,) = handlers.encode_texts(context, job)
    assert unpack(found.ids) == context.tokenizer.encode("hello")[:3]


@pytest.mark.parametrize("asked", [True, False])
def test_special_tokens_are_put_around_a_chat_if_it_asks_for_them(
    context: Context, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(Tokenizer, "with_special_tokens", lambda self, ids: [1, *ids, 2])
    job = chat()
    plain = unpack(handlers.encode_messages(context, job).ids)
    job.add_special_tokens = asked
    expected = [1, *plain, 2] if asked else plain
    assert unpack(handlers.encode_messages(context, job).ids) == expected
    texts = Texts(WorkerPool(1, 1.0), combines_texts=lambda: False)
    assert asyncio.run(texts.encode_chat(context.tokenizer, job)).ids == expected


@pytest.mark.parametrize("size", [1024, 3000, 10**6])
def test_a_text_that_does_not_fit_is_refused(context: Context, size: int) -> None:
    error = refusal(context, Encode(["a" * size], context=1024))
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    error = refusal(context, chat(content="a" * size))
    assert (error.param, error.code) == ("messages", "context_length_exceeded")


def test_a_text_that_is_far_too_long_is_not_tokenised_to_its_end(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    refusal(context, Encode(["a b " * 10**6], context=1024))
    assert sum(sizes) < 100_000


def test_prompts_of_one_request_have_a_bound_on_tokens_together(context: Context) -> None:
    error = refusal(context, Encode(["a" * 900] * 3, context=1024))
    assert (error.param, error.code) == ("prompt", "param_out_of_range")


def test_the_replies_of_the_small_routes_come_back_as_json(context: Context) -> None:
    ids = context.tokenizer.encode("hi")
    job = Tokenize(Encode(["hi"], context=1024), token_strs=True)
    reply = json.loads(handlers.tokenize(context, job))
    assert reply["tokens"] == ids and reply["count"] == len(ids) and reply["max_model_len"] == 1024
    assert reply["token_strs"] == [context.tokenizer.token_str(id) for id in ids]
    found = handlers.detokenize(context, Detokenize(json.dumps({"tokens": ids, "x": 1}).encode()))
    assert json.loads(found.reply) == {"prompt": context.tokenizer.decode(ids, False)}
    assert found.unknown == {"x": 1}
    error = refusal(context, Detokenize(json.dumps({"tokens": [1] * 2001}).encode()))
    assert (error.param, error.code) == ("tokens", "param_out_of_range")


# ---- templates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "".join("{% for i in [1] %}" for _ in range(30)) + "{% endfor %}" * 30,
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'x' %}",
    ],
)
def test_every_failure_of_a_clients_template_is_a_template_error(
    context: Context, template: str
) -> None:
    error = refusal(context, chat(template))
    assert (error.status, error.param, error.code) == (400, "chat_template", "chat_template_error")


def test_wrong_messages_are_told_of_the_messages_whoever_sent_the_template(
    context: Context,
) -> None:
    error = refusal(context, EncodeChat([{"role": "user", "content": 1}], None, "x", {}, 1024))
    assert (error.status, error.param) == (400, "messages.0.content")
