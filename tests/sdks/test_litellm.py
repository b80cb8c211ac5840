"""litellm through five of its providers: chats, streams, tools, structured output. The embedded model
answers, and a model that repeats the user's message where the exact reply is known."""

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

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


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


def test_a_tool_that_must_be_called(asked: dict[str, Any]) -> None:
    if asked["model"].startswith("ollama_chat"):
        pytest.skip("Ollama's API cannot demand a call")
    choice = {"type": "function", "function": {"name": "get_weather"}}
    asked["messages"] = [{"role": "user", "content": "Is it raining in Paris?"}]
    reply = litellm.completion(**asked, tools=[WEATHER], tool_choice=choice)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    pieces = litellm.completion(**asked, tools=[WEATHER], tool_choice=choice, stream=True)
    joined = litellm.stream_chunk_builder(list(pieces))
    (streamed,) = joined.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


@pytest.fixture(params=PROVIDERS)
def parrot(request: pytest.FixtureRequest, parrot_url: str) -> dict[str, Any]:
    """The arguments that every call of a provider has, for the model that repeats a message."""
    return {
        "model": f"{request.param}/parrot",
        "api_base": parrot_url + PROVIDERS[request.param],
        "api_key": "unused",
        "max_tokens": 200,
        "num_retries": 0,
    }


def reply_to(asked: dict[str, Any], messages: list[Any], stream: bool, **fields: Any) -> Any:
    found = litellm.completion(**asked, messages=messages, stream=stream, **fields)
    if stream:
        found = litellm.stream_chunk_builder(list(found))
    return found.choices[0].message


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_the_model_chooses_and_its_result(parrot: dict[str, Any], stream: bool) -> None:
    def reply(messages: list[Any]) -> Any:
        return reply_to(parrot, messages, stream, tools=[WEATHER])

    messages: list[Any] = [{"role": "user", "content": CALL}]
    called = reply(messages)
    (call,) = called.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    answer = reply([*messages, called.model_dump(), result])
    assert "It rains." in answer.content and not answer.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_exactly_the_arguments_and_the_object_that_the_model_says(
    parrot: dict[str, Any], stream: bool
) -> None:
    text = '{"name":"Paris"}'
    if parrot["model"].startswith("anthropic"):  # litellm asks for a call in place of a schema.
        text = CALL.replace("get_weather", "json_tool_call").replace("city", "name")
    said = [{"role": "user", "content": text}]
    content = reply_to(parrot, said, stream, response_format=City).content
    assert City.model_validate_json(content) == City(name="Paris")
    if not parrot["model"].startswith("ollama_chat"):  # Ollama's API cannot demand a call.
        said = [{"role": "user", "content": CALL}]
        choice = {"type": "function", "function": {"name": "get_weather"}}
        (call,) = reply_to(parrot, said, stream, tools=[WEATHER], tool_choice=choice).tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_structured_output(asked: dict[str, Any]) -> None:
    content = litellm.completion(**asked, response_format=City).choices[0].message.content
    assert City.model_validate_json(content)
    pieces = litellm.completion(**asked, response_format=City, stream=True)
    joined = litellm.stream_chunk_builder(list(pieces))
    assert joined.choices[0].message.content == content


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
