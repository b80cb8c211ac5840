"""OpenAI's client: chats and Responses, whole and streamed, with tools, structured output and
embeddings. The embedded model answers, and one that repeats a message where the reply is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.conftest import CALL, OBJECT, PARROT
from tests.serve.running import Running

pytestmark = pytest.mark.slow

MODEL = "smollm2"
SYSTEM = "Answer in one word."
QUESTION = "What is the capital of France?"
CHAT: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
WEATHER_QUESTION = "Is it raining in Paris?"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": CITY,
    "strict": True,
}


class City(BaseModel):
    name: str = Field(max_length=20)


@pytest.fixture(scope="module")
def client(embedded: Running) -> Iterator[Any]:
    with OpenAI(base_url=f"{embedded.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_a_chat_and_its_stream(client: Any) -> None:
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == whole.choices[0].message.content
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_many_streams_at_once_are_those_of_one_at_a_time(embedded: Running) -> None:
    questions = [f"What is {number} plus {number}?" for number in range(6)]

    async def streamed(client: AsyncOpenAI, question: str) -> str:
        chunks = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=24,
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def both() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{embedded.url}/v1", api_key="unused") as client:
            alone = [await streamed(client, question) for question in questions]
            together = await asyncio.gather(*(streamed(client, each) for each in questions))
        return alone, list(together)

    alone, together = asyncio.run(both())
    assert together == alone and all(alone)


def test_a_tool_of_a_chat(client: Any) -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": WEATHER_QUESTION}],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 60,
        "temperature": 0,
    }
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


def test_structured_output_of_a_chat(client: Any) -> None:
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 60, "temperature": 0}
    parsed = client.chat.completions.parse(**asked, response_format=City).choices[0].message.parsed
    assert isinstance(parsed, City)
    with client.chat.completions.stream(**asked, response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_a_response_and_its_stream(client: Any) -> None:
    asked = {
        "model": MODEL,
        "instructions": SYSTEM,
        "input": QUESTION,
        "max_output_tokens": 60,
        "temperature": 0,
    }
    whole = client.responses.create(**asked)
    assert "Paris" in whole.output_text and whole.status == "completed"
    with client.responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_tool_of_a_response(client: Any) -> None:
    tools = [{"type": "function", **WEATHER}]
    asked = {"model": MODEL, "tools": tools, "max_output_tokens": 60, "temperature": 0}
    forced = {
        **asked,
        "input": WEATHER_QUESTION,
        "tool_choice": {"type": "function", "name": "get_weather"},
    }
    first = client.responses.create(**forced)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert set(json.loads(call.arguments)) == {"city"}
    with client.responses.stream(**forced) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.arguments == call.arguments


@pytest.fixture
def parrot_client(parrot: Running) -> Iterator[Any]:
    with OpenAI(base_url=f"{parrot.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_the_model_of_a_chat_chooses(parrot_client: Any, stream: bool) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    asked = {"model": PARROT, "tools": tools, "max_tokens": 200}

    def reply(messages: list[Any]) -> Any:
        if not stream:
            return parrot_client.chat.completions.create(**asked, messages=messages).choices[0]
        with parrot_client.chat.completions.stream(**asked, messages=messages) as events:
            return events.get_final_completion().choices[0]

    messages: list[Any] = [{"role": "user", "content": CALL}]
    called = reply(messages)
    (call,) = called.message.tool_calls
    assert called.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    answer = reply([*messages, called.message, result])
    assert "It rains." in answer.message.content and not answer.message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_the_model_of_a_response_chooses(parrot_client: Any, stream: bool) -> None:
    asked = {"model": PARROT, "tools": [{"type": "function", **WEATHER}], "max_output_tokens": 200}

    def reply(**fields: Any) -> Any:
        if not stream:
            return parrot_client.responses.create(**asked, **fields)
        with parrot_client.responses.stream(**asked, **fields) as events:
            return events.get_final_response()

    first = reply(input=CALL)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments) == {"city": "Paris"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    answer = reply(input=[output], previous_response_id=first.id)
    assert answer.status == "completed" and "It rains." in answer.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_exactly_what_the_model_says(parrot_client: Any, stream: bool) -> None:
    """An object that follows a schema, and the arguments of a call that is demanded."""
    completions = parrot_client.chat.completions

    def reply(text: str, **fields: Any) -> Any:
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 200, **fields}
        if not stream:
            return completions.create(model=PARROT, **asked).choices[0].message
        with completions.stream(model=PARROT, **asked) as events:
            return events.get_final_completion().choices[0].message

    schema = {"name": "answer", "schema": CITY, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    assert reply(OBJECT, response_format=form).content == OBJECT
    tools = [{"type": "function", "function": WEATHER}]
    demanded = {"type": "function", "function": {"name": "get_weather"}}
    for choice in (demanded, "required"):
        (call,) = reply(CALL, tools=tools, tool_choice=choice).tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("stream", [False, True])
def test_exactly_what_the_model_of_a_response_says(parrot_client: Any, stream: bool) -> None:
    def reply(message: str, **fields: Any) -> Any:
        asked = {"model": PARROT, "input": message, "max_output_tokens": 200, **fields}
        if not stream:
            return parrot_client.responses.create(**asked)
        with parrot_client.responses.stream(**asked) as events:
            return events.get_final_response()

    form = {"type": "json_schema", "name": "answer", "schema": CITY, "strict": True}
    assert reply(OBJECT, text={"format": form}).output_text == OBJECT
    tools = [{"type": "function", **WEATHER}]
    for choice in ({"type": "function", "name": "get_weather"}, "required"):
        (call,) = reply(CALL, tools=tools, tool_choice=choice).output
        assert json.loads(call.arguments) == {"city": "Paris"}


def test_structured_output_of_a_response(client: Any) -> None:
    asked = {"model": MODEL, "input": QUESTION, "max_output_tokens": 60, "temperature": 0}
    whole = client.responses.parse(**asked, text_format=City)
    assert isinstance(whole.output_parsed, City)
    with client.responses.stream(**asked, text_format=City) as stream:
        assert stream.get_final_response().output_parsed == whole.output_parsed


def test_embeddings(client: Any) -> None:
    found = client.embeddings.create(model=MODEL, input=["A cat sleeps.", "The market fell."])
    assert [len(entry.embedding) for entry in found.data] == [576, 576]
    assert found.data[0].embedding != found.data[1].embedding
