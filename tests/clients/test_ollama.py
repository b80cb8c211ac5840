"""Ollama's client with the embedded model: chats, streams, tools, structured output, the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("ollama", reason="ollama is not installed: run `make test-clients`")

import ollama
from ollama._types import ChatRequest, GenerateRequest, Options

from octavo.serve.api.ollama_api import OPTIONS
from octavo.serve.api.protocol import Common
from octavo.serve.api.request_fields import OLLAMA
from tests.clients.conftest import CALL, OBJECT, PARROT
from tests.serve.running import Running
from tests.serve.test_ollama import IGNORED_OPTIONS

pytestmark = pytest.mark.slow

MODEL = "smollm2"
SYSTEM = "Answer in one word."
QUESTION = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "What is the capital of France?"},
]
GREEDY = {"temperature": 0, "num_predict": 60}


@pytest.fixture(scope="module")
def client(embedded: Running) -> Any:
    return ollama.Client(host=embedded.url)


def test_a_chat_and_its_stream(client: Any) -> None:
    whole = client.chat(MODEL, messages=QUESTION, options=GREEDY)
    assert "Paris" in whole.message.content and whole.done_reason == "stop"
    parts = list(client.chat(MODEL, messages=QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done and parts[-1].eval_count == whole.eval_count


def test_generate(client: Any) -> None:
    prompt = QUESTION[1]["content"]
    answer = client.generate(MODEL, prompt, system=SYSTEM, options=GREEDY)
    assert "Paris" in answer.response
    raw = client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY)
    assert "Paris" in raw.response
    pieces = client.generate(MODEL, prompt, system=SYSTEM, options=GREEDY, stream=True)
    assert "".join(piece.response for piece in pieces) == answer.response


def test_tools_and_their_results(parrot: Running) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
          city: the name of the city
        """
        return f"It rains in {city}."

    client = ollama.Client(host=parrot.url)
    messages: list[Any] = [{"role": "user", "content": CALL}]
    asked = {"tools": [get_weather], "options": {"num_predict": 120}}
    reply = client.chat(PARROT, messages=messages, **asked).message
    (call,) = reply.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    parts = client.chat(PARROT, messages=messages, stream=True, **asked)
    streamed = [call for part in parts for call in part.message.tool_calls or []]
    assert streamed == [call]
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")}
    answer = client.chat(PARROT, messages=[*messages, reply, result], **asked).message
    assert "It rains in Paris." in (answer.content or "") and not answer.tool_calls


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
}


def test_structured_output(client: Any) -> None:
    reply = client.chat(MODEL, messages=QUESTION, format=CITY, options=GREEDY)
    assert set(json.loads(reply.message.content)) == {"city"}
    parts = client.chat(MODEL, messages=QUESTION, format=CITY, options=GREEDY, stream=True)
    assert "".join(part.message.content for part in parts) == reply.message.content


def test_exactly_the_object_that_the_model_says(parrot: Running) -> None:
    client = ollama.Client(host=parrot.url)
    said = [{"role": "user", "content": OBJECT}]
    assert client.chat(PARROT, messages=said, format=CITY).message.content == OBJECT
    parts = list(client.chat(PARROT, messages=said, format=CITY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == OBJECT and len(parts) > 2
    assert client.generate(PARROT, OBJECT, format=CITY).response == OBJECT


def test_the_model(client: Any) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities and shown.details.format == "gguf"
    assert (shown.details.family, shown.details.quantization_level) == ("llama", "4-bit")


def test_embeddings(client: Any) -> None:
    found = client.embed(MODEL, ["A cat sleeps.", "The market fell."])
    assert [len(vector) for vector in found.embeddings] == [576, 576]


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="does not serve the model") as caught:
        client.chat("another", messages=QUESTION)
    assert caught.value.status_code == 404


def test_every_field_of_the_client_is_known() -> None:
    known = {field.name for field in OLLAMA} | set(Common.__struct_fields__)
    assert {*ChatRequest.model_fields, *GenerateRequest.model_fields} - known == set()
    refused = {"repeat_last_n", "tfs_z", "typical_p", "mirostat"}
    assert set(Options.model_fields) == {*IGNORED_OPTIONS.split(), *OPTIONS, *refused} - {"min_p"}
