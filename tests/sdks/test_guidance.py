"""guidance through its class for vLLM: text and streams with the embedded model, and with a model
that repeats the user's message exact choices, patterns, JSON and calls of tools."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("guidance", reason="guidance is not installed: run `make test-clients`")

import guidance
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def model_of(url: str, name: str, **options: Any) -> Any:
    return VLLMModel(name, base_url=f"{url}/v1", api_key="unused", echo=False, **options)


@pytest.fixture
def asked(url: str) -> Any:
    """guidance sends no temperature 0 to this class of models, but top_k 1 means the same."""
    greedy: Any = {"top_k": 1}
    model = model_of(url, "smollm2", sampling_params=greedy)
    with guidance.system():
        model += "Answer in one word."
    with guidance.user():
        model += "What is the capital of France?"
    return model


def test_text(asked: Any) -> None:
    with guidance.assistant():
        asked += guidance.gen(name="answer", max_tokens=20)
    assert "Paris" in asked["answer"]


@guidance.guidance
def answer_in_a_thread(model: Any) -> Any:
    """A stream runs in a thread of its own, which does not know the role of its caller."""
    with guidance.assistant():
        model += guidance.gen(name="answer", max_tokens=20)
    return model


def test_a_stream(asked: Any) -> None:
    parts = list(asked.stream() + answer_in_a_thread())
    texts = [str(part) for part in parts]
    assert len(texts) > 3 and texts == sorted(texts, key=len)
    with guidance.assistant():
        asked += guidance.gen(name="answer", max_tokens=20)
    assert parts[-1]["answer"] == asked["answer"]


def twice(asked: Any, grammar: Any) -> str:
    """Return the answer, which must be the same again."""
    answers = []
    for _ in range(2):
        with guidance.assistant():
            answers.append((asked + grammar)["answer"])
    assert answers[0] == answers[1]
    return answers[0]


def test_a_choice_of_the_embedded_model(asked: Any) -> None:
    """The embedded model is too small to choose the right city."""
    cities = ["London", "Paris", "Rome"]
    assert twice(asked, guidance.select(cities, name="answer")) in cities


def repeated(parrot_url: str, text: str, grammar: Any) -> str:
    """Return the answer of the model that repeats this text, if the grammar allows it."""
    model = model_of(parrot_url, "parrot")
    with guidance.user():
        model += text
    with guidance.assistant():
        model += grammar
    return model["answer"]


@pytest.mark.parametrize("city", ["London", "Paris", "Rome"])
def test_a_choice(parrot_url: str, city: str) -> None:
    cities = ["London", "Paris", "Rome"]
    assert repeated(parrot_url, city, guidance.select(cities, name="answer")) == city


def test_a_pattern(asked: Any, parrot_url: str) -> None:
    pattern = guidance.gen(name="answer", regex=r"[A-Z][a-z]{2,8}\.")
    assert re.fullmatch(r"[A-Z][a-z]{2,8}\.", twice(asked, pattern))
    assert repeated(parrot_url, "Madrid.", pattern) == "Madrid."


class City(BaseModel):
    name: str = Field(max_length=20)


def test_json(asked: Any, parrot_url: str) -> None:
    grammar = guidance.json(name="answer", schema=City)
    assert City.model_validate(json.loads(twice(asked, grammar)))
    found = repeated(parrot_url, '{"name": "Paris"}', grammar)
    assert City.model_validate_json(found).name == "Paris"


def test_a_tool_that_the_model_chooses_and_its_result(parrot_url: str) -> None:
    cities: list[str] = []

    def get_weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return f"It rains in {city}."

    model = model_of(parrot_url, "parrot")
    with guidance.user():
        model += CALL
    with guidance.assistant():
        model += guidance.gen(tools=[get_weather])
    assert cities == ["Paris"]
    with guidance.assistant():
        model += guidance.gen(name="answer", max_tokens=200)
    assert "It rains in Paris." in model["answer"]
