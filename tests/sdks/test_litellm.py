"""litellm with the embedded model, through five of its providers: chats, streams, tools, structured
output."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("litellm", reason="litellm is not installed: run `make test-clients`")

import litellm
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow

PROVIDERS = {  # and the path of the API that each one calls
    "openai": "/v1",
    "hosted_vllm": "/v1",
    "lm_studio": "/v1",
    "anthropic": "",
    "ollama_chat": "",
}
QUESTION = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)


@pytest.fixture(params=PROVIDERS)
def asked(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    """The arguments that every call of a provider has."""
    return {
        "model": f"{request.param}/smollm2",
        "api_base": url + PROVIDERS[request.param],
        "api_key": "unused",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 60,
        "num_retries": 0,
    }


def test_a_chat_and_its_stream(asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop" and whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(**asked, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_a_tool_is_called_and_its_result_comes_back(asked: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it raining in Paris?"}]
    tools = {"tools": [WEATHER]}
    if not asked["model"].startswith("ollama_chat"):  # Ollama's API cannot demand a call.
        tools["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
        reply = litellm.completion(**{**asked, **tools, "messages": messages})
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert isinstance(json.loads(call.function.arguments)["city"], str)
        pieces = litellm.completion(**{**asked, **tools, "messages": messages}, stream=True)
        joined = litellm.stream_chunk_builder(list(pieces))
        (streamed,) = joined.choices[0].message.tool_calls
        assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    called = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_0", "content": "It rains."},
    ]
    answer = litellm.completion(**{**asked, "tools": [WEATHER], "messages": messages})
    message = answer.choices[0].message
    assert message.content or message.tool_calls


def test_structured_output(asked: dict[str, Any]) -> None:
    reply = litellm.completion(**asked, response_format=City)
    assert City.model_validate_json(reply.choices[0].message.content).name


def test_other_apis(url: str) -> None:
    options = {"api_base": f"{url}/v1", "api_key": "unused"}
    reply = litellm.responses(
        model="openai/smollm2", input="Say hello.", max_output_tokens=16, **options
    )
    assert reply.output[0].content[0].text
    found = litellm.embedding(model="openai/smollm2", input=["a", "b"], **options)
    assert [len(entry["embedding"]) for entry in found.data] == [576, 576]
    text = litellm.text_completion(
        model="text-completion-openai/smollm2",
        prompt="The capital of France is",
        max_tokens=8,
        temperature=0,
        **options,
    )
    assert "Paris" in text.choices[0].text
