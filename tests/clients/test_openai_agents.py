"""OpenAI's agents over the Responses API, with the embedded model: runs, streams, tools, output
types."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("agents", reason="openai-agents is not installed: run `make test-clients`")

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from tests.clients.conftest import CALL, OBJECT, PARROT
from tests.serve.running import Running

pytestmark = pytest.mark.slow
set_tracing_disabled(True)

QUESTION = "What is the capital of France?"


def agent(served: Running, model: str = "smollm2", **options: Any) -> Any:
    client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
    settings = {"temperature": 0, "max_tokens": 60, **options.pop("settings", {})}
    return Agent(
        name="helper",
        model=OpenAIResponsesModel(model=model, openai_client=client),
        model_settings=ModelSettings(**settings),
        **options,
    )


def test_a_run_and_its_stream(embedded: Running) -> None:
    whole = asyncio.run(Runner.run(agent(embedded, instructions="Answer in one word."), QUESTION))
    assert "Paris" in whole.final_output

    async def streamed() -> tuple[str, list[str]]:
        run = Runner.run_streamed(agent(embedded, instructions="Answer in one word."), QUESTION)
        kinds = [event.data.type async for event in run.stream_events() if hasattr(event, "data")]
        return run.final_output, kinds

    output, kinds = asyncio.run(streamed())
    assert output == whole.final_output and "response.completed" in kinds


def test_a_tool_is_called(embedded: Running) -> None:
    cities: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return "It rains."

    helper = agent(
        embedded,
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
        settings={"tool_choice": "get_weather"},
    )
    found = asyncio.run(Runner.run(helper, "Is it raining in Paris?"))
    assert len(cities) == 1 and found.final_output == "It rains."


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_the_model_chooses_and_its_result(parrot: Running, stream: bool) -> None:
    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"It rains in {city}."

    helper = agent(parrot, model=PARROT, tools=[get_weather], settings={"max_tokens": 120})

    async def run() -> str:
        if not stream:
            return (await Runner.run(helper, CALL)).final_output
        streamed = Runner.run_streamed(helper, CALL)
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output

    assert "It rains in Paris." in asyncio.run(run())


class City(BaseModel):
    name: str = Field(max_length=20)


def test_an_output_type(embedded: Running) -> None:
    found = asyncio.run(Runner.run(agent(embedded, output_type=City), QUESTION))
    assert isinstance(found.final_output, City)

    async def streamed() -> Any:
        run = Runner.run_streamed(agent(embedded, output_type=City), QUESTION)
        async for _ in run.stream_events():
            pass
        return run.final_output

    assert asyncio.run(streamed()) == found.final_output


class Capital(BaseModel):
    city: str


@pytest.mark.parametrize("stream", [False, True])
def test_exactly_the_output_that_the_model_says(parrot: Running, stream: bool) -> None:
    helper = agent(parrot, model=PARROT, output_type=Capital)

    async def run() -> Any:
        if not stream:
            return (await Runner.run(helper, OBJECT)).final_output
        streamed = Runner.run_streamed(helper, OBJECT)
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output

    assert asyncio.run(run()) == Capital(city="Paris")


def test_a_run_continues_a_stored_response(embedded: Running) -> None:
    async def two_turns() -> tuple[Any, Any]:
        helper = agent(embedded, output_type=City)  # The output type bounds the replies.
        first = await Runner.run(helper, QUESTION)
        second = await Runner.run(
            helper, "Say it again.", previous_response_id=first.last_response_id
        )
        return first, second

    first, second = asyncio.run(two_turns())
    assert isinstance(second.final_output, City)
    before, after = (run.raw_responses[0].usage for run in (first, second))
    assert after.input_tokens > before.input_tokens + before.output_tokens, "both turns are there"
