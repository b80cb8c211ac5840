"""huggingface_hub's InferenceClient with the embedded model: chats, streams, tools, structured
output."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

from huggingface_hub import InferenceClient, constants

from tests.clients.conftest import CALL, OBJECT, PARROT
from tests.serve.running import Running

pytestmark = pytest.mark.slow

QUESTION = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": CITY,
    },
}
GREEDY: dict[str, Any] = {"model": "smollm2", "max_tokens": 60, "temperature": 0}


@pytest.fixture
def client(embedded: Running, monkeypatch: pytest.MonkeyPatch) -> InferenceClient:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # Otherwise it sends no request at all.
    return InferenceClient(base_url=embedded.url, api_key="unused")


def test_a_chat_and_its_stream(client: InferenceClient) -> None:
    whole = client.chat_completion(QUESTION, **GREEDY)
    assert "Paris" in whole.choices[0].message.content
    chunks = list(client.chat_completion(QUESTION, stream=True, **GREEDY))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content


def test_a_tool_that_must_be_called(client: InferenceClient) -> None:
    choice = {"function": {"name": "get_weather"}}
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, **GREEDY}
    messages = [{"role": "user", "content": "Is it raining in Paris?"}]
    (call,) = client.chat_completion(messages, **asked).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    pieces = [
        piece.function.arguments or ""
        for chunk in client.chat_completion(messages, stream=True, **asked)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or []
    ]
    assert json.loads("".join(pieces)) == json.loads(call.function.arguments)


def test_structured_output(client: InferenceClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY}}
    asked: dict[str, Any] = {"response_format": form, **GREEDY}
    content = client.chat_completion(QUESTION, **asked).choices[0].message.content
    assert set(json.loads(content)) == {"city"}
    chunks = list(client.chat_completion(QUESTION, stream=True, **asked))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == content


@pytest.fixture
def parrot_client(parrot: Running, monkeypatch: pytest.MonkeyPatch) -> InferenceClient:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return InferenceClient(base_url=parrot.url, api_key="unused")


def test_a_tool_that_the_model_chooses_and_its_result(parrot_client: InferenceClient) -> None:
    asked: dict[str, Any] = {"model": PARROT, "tools": [WEATHER], "max_tokens": 120}
    messages: list[Any] = [{"role": "user", "content": CALL}]
    called = parrot_client.chat_completion(messages, **asked).choices[0].message
    (call,) = called.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    pieces = [
        piece.function.arguments or ""
        for chunk in parrot_client.chat_completion(messages, stream=True, **asked)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or []
    ]
    assert json.loads("".join(pieces)) == {"city": "Paris"} and len(pieces) > 1
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    answer = parrot_client.chat_completion([*messages, called, result], **asked).choices[0].message
    assert "It rains." in answer.content and not answer.tool_calls


def test_exactly_the_object_that_the_model_says(parrot_client: InferenceClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY}}
    asked: dict[str, Any] = {"model": PARROT, "response_format": form, "max_tokens": 60}
    messages: list[Any] = [{"role": "user", "content": OBJECT}]
    assert parrot_client.chat_completion(messages, **asked).choices[0].message.content == OBJECT
    chunks = list(parrot_client.chat_completion(messages, stream=True, **asked))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == OBJECT
