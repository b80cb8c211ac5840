"""langchain-openai with the embedded model: chats, streams, tools, structured output, embeddings."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed: run `make test-clients`"
)

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from tests.clients.conftest import CALL, OBJECT, PARROT
from tests.serve.running import Running

pytestmark = pytest.mark.slow

QUESTION = "Is it raining in Paris?"


def chat_with(model: str, served: Running) -> ChatOpenAI:
    return ChatOpenAI(
        model=model,
        base_url=f"{served.url}/v1",
        api_key="unused",
        temperature=0,
        max_tokens=120,
        max_retries=0,
    )


@pytest.fixture(scope="module")
def chat(embedded: Running) -> ChatOpenAI:
    return chat_with("smollm2", embedded)


@pytest.fixture(scope="module")
def parrot_chat(parrot: Running) -> ChatOpenAI:
    return chat_with(PARROT, parrot)


@tool
def get_weather(city: str, unit: str = "C") -> str:
    """The weather in a city."""
    return f"rain in {city}, 9 {unit}"


@tool
def get_time() -> str:
    """The time now."""
    return "noon"


class Place(BaseModel):
    name: str = Field(max_length=30)
    country: str = Field(max_length=30)


class Trip(BaseModel):
    """A trip."""

    start: Place
    days: int = Field(ge=1, le=30)


def test_a_chat(chat: ChatOpenAI) -> None:
    reply = chat.invoke(
        [SystemMessage("Answer in one word."), HumanMessage("What is the capital of France?")]
    )
    assert "Paris" in reply.text and reply.response_metadata["finish_reason"] == "stop"
    assert reply.usage_metadata is not None and reply.usage_metadata["output_tokens"] > 0


def test_a_stream_is_the_whole_reply(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    assert "".join(c.text for c in chunks) == whole.text and len(chunks) > 3
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]  # type: ignore[index]


def test_many_at_once(chat: ChatOpenAI) -> None:
    questions = [f"What is {n} plus {n}?" for n in range(6)]
    alone = [chat.invoke(q).text for q in questions]
    assert [r.text for r in asyncio.run(chat.abatch(questions))] == alone


def test_completions(embedded: Running) -> None:
    model = OpenAI(
        model="smollm2",
        base_url=f"{embedded.url}/v1",
        api_key="unused",
        temperature=0,
        max_tokens=8,
    )
    assert "Paris" in model.invoke("The capital of France is")


def test_embeddings(embedded: Running) -> None:
    model = OpenAIEmbeddings(
        model="smollm2",
        base_url=f"{embedded.url}/v1",
        api_key="unused",
        check_embedding_ctx_length=False,
    )
    first, second = model.embed_documents(["A cat sleeps.", "The market fell."])
    assert len(first) == len(second) == 576
    assert model.embed_query("A cat sleeps.") == pytest.approx(first, abs=1e-5)


@pytest.mark.parametrize("choice", ["any", "required", "get_weather", True])
def test_tools_that_must_be_called(chat: ChatOpenAI, choice: str | bool) -> None:
    tools = [get_weather] if choice is True else [get_weather, get_time]
    reply = chat.bind_tools(tools, tool_choice=choice).invoke(QUESTION)
    assert reply.tool_calls and not reply.invalid_tool_calls
    assert {call["name"] for call in reply.tool_calls} <= {"get_weather", "get_time"}
    for call in reply.tool_calls:
        found = {"get_weather": get_weather, "get_time": get_time}[call["name"]].invoke(call)
        assert (
            isinstance(found, ToolMessage)
            and found.tool_call_id == call["id"]
            and found.status == "success"
        )


def test_a_streamed_call_joins_to_the_whole_one(chat: ChatOpenAI) -> None:
    forced = chat.bind_tools([get_weather], tool_choice="get_weather")
    whole, joined, pieces = forced.invoke(QUESTION), None, 0
    for chunk in forced.stream(QUESTION):
        assert isinstance(chunk, AIMessageChunk)
        pieces += len(chunk.tool_call_chunks)
        joined = chunk if joined is None else joined + chunk
    assert joined is not None and pieces > 3
    assert [(c["name"], c["args"]) for c in joined.tool_calls] == [
        (c["name"], c["args"]) for c in whole.tool_calls
    ]


def test_tools_that_may_be_called_and_results_that_come_back(
    parrot_chat: ChatOpenAI,
) -> None:
    bound = parrot_chat.bind_tools([get_weather], parallel_tool_calls=False)
    plain = bound.invoke("It rains.")
    assert (plain.text, plain.tool_calls) == ("It rains.", [])
    reply = bound.invoke(CALL)
    assert isinstance(reply, AIMessage) and reply.text == ""
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    answer = bound.invoke([HumanMessage(CALL), reply, get_weather.invoke(call)])
    assert "rain in Paris, 9 C" in answer.text and not answer.tool_calls


def test_a_streamed_call_that_the_model_chooses(parrot_chat: ChatOpenAI) -> None:
    joined = None
    for chunk in parrot_chat.bind_tools([get_weather]).stream(CALL):
        joined = chunk if joined is None else joined + chunk
    assert isinstance(joined, AIMessageChunk)
    (call,) = joined.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})


def test_strict_tools(parrot_chat: ChatOpenAI) -> None:
    """langchain makes every parameter of a strict tool required."""
    bound = parrot_chat.bind_tools([get_weather], strict=True)
    (call,) = bound.invoke(CALL.replace("}}", ', "unit": "C"}}')).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris", "unit": "C"})
    with pytest.raises(openai.BadRequestError) as caught:
        bound.invoke(CALL.replace('"Paris"', "5"))
    assert caught.value.code == "structured_output_failed"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(chat: ChatOpenAI, method: str) -> None:
    if method == "json_mode":
        found = chat.with_structured_output(None, method="json_mode").invoke(
            "A city as JSON with the keys name and country."
        )
        assert isinstance(found, dict)
    else:
        found = chat.with_structured_output(Trip, method=method).invoke(
            "Plan a trip that starts in Paris, France."
        )
        assert isinstance(found, Trip) and 1 <= found.days <= 30


def test_streamed_structured_output(chat: ChatOpenAI) -> None:
    model = chat.with_structured_output(Trip, method="json_schema")
    question = "Plan a trip that starts in Paris, France."
    *_, last = model.stream(question)
    assert last == model.invoke(question)


class Capital(BaseModel):
    """A capital."""

    city: str


def test_exactly_the_object_that_the_model_says(parrot_chat: ChatOpenAI) -> None:
    model = parrot_chat.with_structured_output(Capital, method="json_schema")
    assert model.invoke(OBJECT) == Capital(city="Paris")
    *_, last = model.stream(OBJECT)
    assert last == Capital(city="Paris")
    model = parrot_chat.with_structured_output(Capital, method="function_calling")
    assert model.invoke(CALL.replace("get_weather", "Capital")) == Capital(city="Paris")


def test_the_responses_api(embedded: Running, parrot: Running) -> None:
    """ChatOpenAI chooses this API by itself for some options."""
    options: dict[str, Any] = {"api_key": "unused", "max_retries": 0, "use_responses_api": True}
    chat = ChatOpenAI(model="smollm2", base_url=f"{embedded.url}/v1", temperature=0, **options)
    question = [
        SystemMessage("Answer in one word."),
        HumanMessage("What is the capital of France?"),
    ]
    whole = chat.invoke(question).text
    assert "Paris" in whole
    assert "".join(chunk.text for chunk in chat.stream(question)) == whole
    chat = ChatOpenAI(model=PARROT, base_url=f"{parrot.url}/v1", **options)
    (call,) = chat.bind_tools([get_weather]).invoke(CALL).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    structured = chat.with_structured_output(Capital, method="json_schema")
    assert structured.invoke(OBJECT) == Capital(city="Paris")
