"""Ollama's API over HTTP: lines of JSON, calls of tools, options, the model, errors, fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo import __version__
from octavo.serve.api.protocol import OllamaChatRequest, OllamaGenerateRequest
from octavo.serve.api.request_fields import HONOURED, OLLAMA, REFUSED
from tests.serve.api_fields import FieldChecks
from tests.serve.running import NAME, Running

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]
SHARED = {"stream": False, "ignore_eos": True, "temperature": 0, "options": {"num_predict": 12}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
SHOWN = {
    "stream": ({"stream": True}, {}),
    "format": ({"format": "json"}, {}),
    "options": ({"options": {"num_predict": 3}}, {}),
    "think": ({"think": True}, {}),
    "logprobs": ({"logprobs": True}, {}),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True}),
}
ASKS = {"suffix": "x", "images": ["x"], "template": "x", "context": [1]}
FIELDS = [
    FieldChecks(
        path=CHAT,
        base={"messages": HI, **SHARED},
        group=tuple(field for field in OLLAMA if field.chat == field.completion or field.chat == HONOURED),
        shown={
            **SHOWN,
            "messages": ({"messages": [{"role": "user", "content": "another"}]}, {}),
            "tools": ({"tools": TOOLS}, {}),
        },
        asks=ASKS,
    ),
    FieldChecks(
        path=GENERATE,
        base={"prompt": "hi", **SHARED},
        group=tuple(
            field._replace(chat=field.completion) for field in OLLAMA if field.completion != REFUSED or field.chat == REFUSED
        ),
        shown={
            **SHOWN,
            "prompt": ({"prompt": "another"}, {}),
            "system": ({"system": "be brief"}, {}),
            "raw": ({"raw": True}, {}),
        },
        asks=ASKS,
        sends_common=False,
    ),
]  # fmt: skip
# The options of Ollama's clients.
IGNORED_OPTIONS = """
numa num_ctx num_batch num_gpu main_gpu low_vram logits_all vocab_only use_mmap use_mlock embedding_only num_thread num_keep
mirostat_tau mirostat_eta penalize_newline f16_kv
"""


def lines(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_reply(running: Running) -> None:
    found = running.post(CHAT, {"model": f"{NAME}:latest", "messages": HI, **SHARED}).json()
    assert found["model"] == NAME and found["message"]["role"] == "assistant"
    assert found["message"]["content"] and found["created_at"].endswith("Z")
    assert (found["done"], found["done_reason"], found["eval_count"]) == (True, "length", 12)
    assert found["total_duration"] >= found["prompt_eval_duration"] > 0
    text = running.post(GENERATE, {"prompt": "hi", **SHARED}).json()
    assert text["response"] == found["message"]["content"], "the same conversation"
    raw = running.post(GENERATE, {"prompt": "hi", **SHARED, "raw": True}).json()
    plain = running.complete(prompt="hi", max_tokens=12, temperature=0)
    assert raw["response"] == plain["choices"][0]["text"]
    assert raw["prompt_eval_count"] == 2


@pytest.mark.parametrize("text", ["plain words", f"I call. {CALL} {CALL}", CALL])
def test_a_stream_has_the_parts_of_the_whole_reply(parrot: Running, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "tools": TOOLS}
    whole = parrot.post(CHAT, {**body, "stream": False}).json()
    reply = parrot.post(CHAT, body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    found = lines(reply.text)
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert "".join(line["message"]["content"] for line in found) == whole["message"]["content"]
    calls = [call for line in found for call in line["message"].get("tool_calls", [])]
    assert calls == whole["message"].get("tool_calls", [])
    assert calls == [{"function": {"name": "f", "arguments": {"a": "b"}}}] * text.count(CALL)
    assert found[-1]["eval_count"] == whole["eval_count"] and found[-1]["done_reason"] == "stop"
    generated = lines(parrot.post(GENERATE, {"prompt": "plain words"}).text)
    assert "".join(line["response"] for line in generated) == "plain words"


def test_calls_and_results_reach_the_template(parrot: Running) -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "f", "content": "42"},
    ]
    found = parrot.post(CHAT, {"messages": messages, "tools": TOOLS, "stream": False}).json()
    assert "42" in found["message"]["content"], found


def test_the_model_is_described(running: Running) -> None:
    (tag,) = running.get("/api/tags").json()["models"]
    (loaded,) = running.get("/api/ps").json()["models"]
    assert tag["name"] == loaded["model"] == NAME and tag["size"] > 0
    assert (tag["details"]["family"], tag["details"]["quantization_level"]) == ("llama", "float32")
    assert len(tag["digest"]) == 64 and loaded["context_length"] == 1024
    shown = running.post("/api/show", {"model": f"{NAME}:latest"}).json()
    assert "tools" in shown["capabilities"] and shown["template"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 1024
    assert running.get("/api/version").json() == {"version": __version__}


def test_a_request_without_a_prompt_says_that_the_model_is_loaded(running: Running) -> None:
    for path in (CHAT, GENERATE):
        found = running.post(path, {"model": NAME}).json()
        assert (found["done"], found["done_reason"]) == (True, "load")


def test_options_without_effect_are_named(running: Running) -> None:
    for name in IGNORED_OPTIONS.split():
        options = {**SHARED["options"], name: 1}  # type: ignore[dict-item]
        reply = running.post(CHAT, {"messages": HI, **SHARED, "options": options})
        assert reply.status_code == 200 and reply.headers["x-ignored-params"] == f"options.{name}"


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"messages": [], "temperature": 9}, 400, "temperature must be in"),
    (GENERATE, {"prompt": "", "top_logprobs": 5}, 400, "top_logprobs needs logprobs"),
    (GENERATE, {"raw": True, "top_logprobs": 5}, 400, "top_logprobs needs logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": "x"}]}, 400, "must be text"),
    (CHAT, {"messages": [{"role": "tool", "tool_name": 0}]}, 400, "messages.0.tool_name must be a string"),
    ("/api/embed", {}, 400, "input must be a text or a list of texts"),
    ("/api/embed", {"input": "x", "prompt": "y"}, 400, "prompt is not supported"),
    ("/api/embeddings", {}, 400, "prompt must be a text"),

    (CHAT, {"model": "another"}, 404, "does not serve the model"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, 400, "messages.0.images is not supported"),
    (CHAT, {"options": {"temperature": "hot"}}, 400, "options.temperature: expected number"),
    (CHAT, {"options": {"temperature": 9}}, 400, "options.temperature must be in"),
    (CHAT, {"options": {"num_predict": 0}}, 400, "options.num_predict must be"),
    (CHAT, {"options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
    (CHAT, {"format": "yaml"}, 400, "format must be"),
    (CHAT, {"options": {"max_tokens": 4}}, 400, "options.max_tokens is not supported: use options.num_predict"),
    (CHAT, {"options": {"logit_bias": {"1": 1}}}, 400, "send logit_bias as a field of the request"),
    (CHAT, {"options": {"n": 2}}, 400, "options.n is not supported: this API does not have it"),
    (CHAT, {"max_tokens": 4}, 400, "max_tokens is not supported: use options.num_predict"),
    (GENERATE, {"max_tokens": 4}, 400, "max_tokens is not supported: use options.num_predict"),
    (GENERATE, {"max_length": 4, "raw": True}, 400, "max_length is not supported: use options.num_predict"),
    (CHAT, {"temperature": 9}, 400, "temperature must be in"),
    (CHAT, {"prompt": "x"}, 400, "prompt is not supported: this route does not accept it, but /api/generate does"),
    (GENERATE, {"messages": HI}, 400,
     "messages is not supported: this route does not accept it, but /api/chat does "
     "(the conversation; /api/generate has prompt instead)"),
    (GENERATE, {"options": {"top_p": 7}}, 400, "options.top_p"),
    (GENERATE, {"prompt": "x" * 2000}, 400, "the context holds 1024"),
    (GENERATE, {"prompt": "x", "raw": True, "options": {"temperature": 9}}, 400, "options.temperature"),
    ("/api/embed", {"input": []}, 400, "a text or a list of texts"),
    ("/api/pull", {"model": "x"}, 404, "no such route"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "asked", "status", "message"), WRONG)
def test_errors_have_ollamas_shape(
    running: Running, path: str, asked: dict[str, Any], status: int, message: str
) -> None:
    base = {"messages": HI} if path == CHAT else {"prompt": "hi"} if path == GENERATE else {}
    reply = running.post(path, {**base, **asked})
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"} and message in reply.json()["error"], reply.text
    assert not (message.startswith("temperature") and "options" in reply.json()["error"])


def test_a_raw_prompt_has_no_reasoning_to_turn_on(running: Running) -> None:
    asked = {"prompt": "hi", "raw": True, "think": True, **SHARED}
    reply = running.post(GENERATE, {**asked, "options": {"num_predict": 2, "a\r\nb": 1}})
    assert reply.status_code == 200 and reply.headers["x-ignored-params"] == "think"


@pytest.mark.parametrize("checks", FIELDS, ids=[CHAT, GENERATE])
def test_every_field_of_the_api_is_handled(running: Running, checks: FieldChecks) -> None:
    checks.check_honoured(running)
    checks.check_others(running)


def test_the_table_has_the_fields_of_the_structs() -> None:
    names = {field.name for field in OLLAMA if HONOURED in (field.chat, field.completion)}
    structs = {*OllamaChatRequest.__struct_fields__, *OllamaGenerateRequest.__struct_fields__}
    assert names <= structs
