"""guidance with the embedded model, through its class for vLLM: text, streams, choices, patterns,
JSON. guidance has no tools for models of this class."""

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


@pytest.fixture
def asked(url: str) -> Any:
    """guidance sends no temperature 0 to this class of models, but top_k 1 means the same."""
    greedy: Any = {"top_k": 1}
    options: dict[str, Any] = {"sampling_params": greedy, "echo": False}
    model = VLLMModel("smollm2", base_url=f"{url}/v1", api_key="unused", **options)
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


def test_a_choice(asked: Any) -> None:
    """The embedded model is too small to choose the right city."""
    cities = ["London", "Paris", "Rome"]
    assert twice(asked, guidance.select(cities, name="answer")) in cities


def test_a_pattern(asked: Any) -> None:
    answer = twice(asked, guidance.gen(name="answer", regex=r"[A-Z][a-z]{2,8}\."))
    assert re.fullmatch(r"[A-Z][a-z]{2,8}\.", answer)


class City(BaseModel):
    name: str = Field(max_length=20)


def test_json(asked: Any) -> None:
    answer = twice(asked, guidance.json(name="answer", schema=City))
    assert City.model_validate(json.loads(answer))
