"""guidance with the embedded model, through its class for vLLM: text, streams, choices, patterns,
JSON. guidance has no tools for models of this class."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("guidance", reason="guidance is not installed: run `make test-clients`")

import guidance
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow


@pytest.fixture
def asked(url: str) -> Any:
    model = VLLMModel("smollm2", base_url=f"{url}/v1", api_key="unused", echo=False)
    with guidance.user():
        model += "What is the capital of France?"
    return model


def test_text(asked: Any) -> None:
    """guidance sends no temperature to this class of models, so the text is not known."""
    with guidance.assistant():
        asked += guidance.gen(name="answer", max_tokens=40)
    assert asked["answer"]


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
    assert parts[-1]["answer"]


def test_a_choice(asked: Any) -> None:
    with guidance.assistant():
        asked += guidance.select(["London", "Paris", "Rome"], name="answer")
    assert asked["answer"] in ("London", "Paris", "Rome")


def test_a_pattern(asked: Any) -> None:
    with guidance.assistant():
        asked += guidance.gen(name="answer", regex=r"[A-Z][a-z]{2,8}\.")
    assert asked["answer"].endswith(".") and asked["answer"][:-1].isalpha()


class City(BaseModel):
    name: str = Field(max_length=20)


def test_json(asked: Any) -> None:
    with guidance.assistant():
        asked += guidance.json(name="answer", schema=City)
    assert City.model_validate(json.loads(asked["answer"]))
