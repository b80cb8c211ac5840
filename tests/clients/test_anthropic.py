"""Anthropic's client with the embedded model: messages, streams, tools, structured output, errors,
and an agent whose system prompt changes each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest

pytest.importorskip("anthropic", reason="anthropic is not installed: run `make test-clients`")

import anthropic
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from pydantic import BaseModel, Field

from octavo.serve.api.protocol import MessagesRequest
from octavo.serve.api.request_fields import MESSAGES
from tests.clients.conftest import CALL, OBJECT, PARROT
from tests.serve.running import Running

pytestmark = pytest.mark.slow

MODEL = "smollm2"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def client(embedded: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=embedded.url, api_key="unused", max_retries=0) as found:
        yield found


def ask(client: Any, **fields: Any) -> Any:
    given = {"model": MODEL, "max_tokens": 60, "messages": QUESTION, **fields}
    return client.messages.create(**given, extra_body={"temperature": 0})


def test_a_message(client: Any) -> None:
    reply = ask(client, system="Answer in one word.")
    assert "Paris" in reply.content[0].text and reply.stop_reason == "end_turn"
    assert reply.usage.output_tokens > 0 and reply.model == MODEL


def test_a_stream_is_the_whole_reply(client: Any) -> None:
    whole = ask(client)
    with client.messages.stream(
        model=MODEL, max_tokens=60, messages=QUESTION, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


def test_stop_sequences(client: Any) -> None:
    reply = ask(client, system="Answer in one word.", stop_sequences=["Paris"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in reply.content[0].text


def test_a_tool_that_must_be_called(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it raining in Paris?"}]
    choice = {"type": "tool", "name": "get_weather"}
    asked = {"messages": messages, "tools": [WEATHER], "tool_choice": choice}
    reply = ask(client, **asked)
    (call,) = reply.content
    assert (call.type, call.name, reply.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert isinstance(call.input["city"], str)
    with client.messages.stream(
        model=MODEL, max_tokens=60, extra_body={"temperature": 0}, **asked
    ) as stream:
        assert stream.get_final_message().content[0].input == call.input


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_the_model_chooses_and_its_result(parrot: Running, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": f"I look. {CALL}"}]
    asked: dict[str, Any] = {"model": PARROT, "max_tokens": 200, "tools": [WEATHER]}

    def reply() -> Any:
        if not stream:
            return client.messages.create(**asked, messages=messages)
        with client.messages.stream(**asked, messages=messages) as events:
            return events.get_final_message()

    with anthropic.Anthropic(base_url=parrot.url, api_key="unused", max_retries=0) as client:
        called = reply()
        text, call = called.content
        assert (text.text, called.stop_reason) == ("I look.", "tool_use")
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
        messages += [
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        answer = reply()
        assert "It rains." in answer.content[0].text and answer.stop_reason == "end_turn"


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


def test_structured_output(client: Any) -> None:
    asked = {"model": MODEL, "max_tokens": 100, "messages": QUESTION, "output_format": City}
    greedy = {"extra_body": {"temperature": 0}}
    reply = client.messages.parse(**asked, **greedy)
    assert isinstance(reply.parsed_output, City)
    with client.messages.stream(**asked, **greedy) as stream:
        assert stream.get_final_message().parsed_output == reply.parsed_output


class Capital(BaseModel):
    city: str


@pytest.mark.parametrize("stream", [False, True])
def test_exactly_what_the_model_says(parrot: Running, stream: bool) -> None:
    """An object that follows a schema, and the input of a call that is demanded."""

    def reply(text: str, **fields: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": text}]
        asked = {"model": PARROT, "max_tokens": 200, "messages": messages, **fields}
        if stream:
            with client.messages.stream(**asked) as events:
                return events.get_final_message()
        send = client.messages.parse if "output_format" in fields else client.messages.create
        return send(**asked)

    with anthropic.Anthropic(base_url=parrot.url, api_key="unused", max_retries=0) as client:
        assert reply(OBJECT, output_format=Capital).parsed_output == Capital(city="Paris")
        for choice in ({"type": "tool", "name": "get_weather"}, {"type": "any"}):
            (call,) = reply(CALL, tools=[WEATHER], tool_choice=choice).content
            assert (call.name, call.input) == ("get_weather", {"city": "Paris"})


def test_counted_tokens(client: Any) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=[WEATHER])
    usage = ask(client, tools=[WEATHER], max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_have_their_types(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="another")
    with pytest.raises(anthropic.BadRequestError, match="messages must have at least one"):
        ask(client, messages=[])
    assert ask(client, thinking={"type": "disabled"}).content


def nonce(turn: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn * 7919:05x};"


def reused_share(client: Any, first_line: Callable[[int], str]) -> list[float]:
    """Run an agent for ten turns, as Claude Code sends them: the first line of the system prompt
    changes, and each turn streams a call of a tool and sends its result. Return the share of the
    previous prompt that each turn after the first reused."""
    instructions = "You are an agent that answers questions about the weather. " * 10
    cached: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": "Is it raining in Paris?"}]
    shares = []
    before = 0
    for turn in range(10):
        system = [
            {"type": "text", "text": first_line(turn)},
            {"type": "text", "text": instructions, **cached},
        ]
        asked = {"system": system, "messages": messages, "tools": [WEATHER]}
        choice = {"type": "tool", "name": "get_weather"}
        greedy = {"extra_body": {"temperature": 0}}
        with client.messages.stream(
            model=MODEL, max_tokens=60, tool_choice=choice, **asked, **greedy
        ) as stream:
            reply = stream.get_final_message()
        (call,) = reply.content
        reused = reply.usage.cache_read_input_tokens
        if turn > 0:
            shares.append(reused / before)
        before = reused + reply.usage.input_tokens
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"Rain, {turn} C."}
        messages.append({"role": "assistant", "content": reply.content})
        messages.append({"role": "user", "content": [{**result, **cached}]})
    return shares


def test_an_agent_with_a_changing_header_line_keeps_its_prefix(client: Any) -> None:
    shares = reused_share(client, nonce)
    assert len(shares) == 9 and min(shares) >= 0.95, shares


def test_a_changing_line_of_the_prompt_itself_is_not_left_out(client: Any) -> None:
    """Only header lines are left out. Any other line that changes costs the prefix after it."""
    shares = reused_share(client, lambda turn: f"This is turn {turn * 7919:05x}.")
    assert max(shares) < 0.5, shares


def test_every_field_of_the_client_is_known() -> None:
    known = {field.name for field in MESSAGES} | set(MessagesRequest.__struct_fields__)
    for params in (
        message_create_params.MessageCreateParamsBase,
        message_count_tokens_params.MessageCountTokensParams,
        beta_create_params.MessageCreateParamsBase,
    ):
        assert set(get_type_hints(params)) - known == set()
