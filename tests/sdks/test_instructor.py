"""instructor with the embedded model: objects from tools, from JSON, in lists and as they grow."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("instructor", reason="instructor is not installed: run `make test-clients`")

import instructor
import openai
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "Jason is 25 years old. Extract the person."}]
# In JSON mode the schema is only a part of the prompt, and the embedded model is too small to follow
# it, so another model repeats the last message. JSON of this server has no spaces between tokens.
SAID: Any = [{"role": "user", "content": '{"name":"Jason","age":25}'}]
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def client(url: str, mode: Any) -> Any:
    return instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0), mode=mode
    )


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_an_object(url: str, mode: Any) -> None:
    found = client(url, mode).chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        response_model=Person,
        max_tokens=100,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(found, Person)


def test_an_object_in_json_mode(parrot_url: str) -> None:
    asked = {"model": "parrot", "messages": SAID, "response_model": Person, "max_tokens": 60}
    completions = client(parrot_url, instructor.Mode.JSON).chat.completions
    found = completions.create(**asked, max_retries=0)
    parts = list(completions.create_partial(**asked))
    assert (found.name, found.age) == (parts[-1].name, parts[-1].age) == ("Jason", 25)
    assert len(parts) > 1


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_an_object_as_it_grows(url: str, mode: Any) -> None:
    parts = list(
        client(url, mode).chat.completions.create_partial(
            model="smollm2",
            messages=MESSAGES,
            response_model=Person,
            max_tokens=100,
            temperature=0,
        )
    )
    assert len(parts) > 1
    assert Person.model_validate(parts[-1].model_dump())
