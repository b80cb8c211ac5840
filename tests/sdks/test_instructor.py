"""instructor: objects from tools, from JSON, in lists and as they grow, with the embedded model and
with one that repeats the user's message."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("instructor", reason="instructor is not installed: run `make test-clients`")

import instructor
import openai
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "Jason is 25 years old. Extract the person."}]
JASON = {"name": "Jason", "age": 25}
COMPACT = (",", ":")  # Structured output has no spaces between tokens, and arguments of tools do.
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


def call_of(tool: str, arguments: Any) -> str:
    """Return the text of a model that calls this tool."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


# In JSON mode the schema is only a part of the prompt, which the embedded model is too small to
# follow.
@pytest.mark.parametrize("mode", [*MODES, instructor.Mode.JSON], ids=lambda mode: mode.value)
def test_exactly_the_object_that_the_model_says(parrot_url: str, mode: Any) -> None:
    def asked(tool: str) -> dict[str, Any]:
        is_call = mode is instructor.Mode.TOOLS
        text = call_of(tool, JASON) if is_call else json.dumps(JASON, separators=COMPACT)
        said = [{"role": "user", "content": text}]
        return {"model": "parrot", "messages": said, "response_model": Person, "max_tokens": 120}

    completions = client(parrot_url, mode).chat.completions
    found = completions.create(**asked("Person"), max_retries=0)
    parts = list(completions.create_partial(**asked("PartialPerson")))
    assert found.model_dump() == parts[-1].model_dump() == JASON
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


def test_a_list_of_objects(parrot_url: str) -> None:
    people = [Person(name="Jason", age=25), Person(name="Ada", age=36)]
    said = {"tasks": [person.model_dump() for person in people]}
    found = client(parrot_url, instructor.Mode.JSON_SCHEMA).chat.completions.create_iterable(
        model="parrot",
        messages=[{"role": "user", "content": json.dumps(said, separators=COMPACT)}],
        response_model=Person,
        max_tokens=120,
    )
    assert list(found) == people
