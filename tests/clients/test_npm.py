"""Clients from npm: openai with chats and Responses, OpenAI's agents, Anthropic's SDK, and Vercel's ai
with its providers for both. Each program prints what it found."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import OBJECT
from tests.serve.running import Running

PROGRAMS = Path(__file__).parent / "npm"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("node") is None or not (PROGRAMS / "node_modules").is_dir(),
        reason="the clients are not installed: install Node.js and run `make test-clients`",
    ),
]


def run(program: str, *arguments: str) -> dict[str, Any]:
    found = subprocess.run(
        ["node", program, *arguments],
        cwd=PROGRAMS,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout)


def check(found: dict[str, Any]) -> None:
    """Every client streams what it also gets whole, follows a schema, and calls a tool that the
    model chooses, whose result is in the next prompt. A model that repeats the user's message shows
    that nothing is lost on the way."""
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]
    assert isinstance(found["object"]["city"], str)
    assert found["streamed_object"] == found["object"]
    assert "It rains in Paris." in found["answer"]
    exact = {"object": OBJECT, "streamed_object": OBJECT, "streamed_call": json.loads(OBJECT)}
    assert found["exact"] == exact


def test_openai_chat(embedded: Running, parrot: Running) -> None:
    found = run("openai_chat.mjs", embedded.url, parrot.url)
    check(found)
    assert found["call"]["name"] == "get_weather"
    arguments = json.loads(found["call"]["arguments"])
    assert set(arguments) == {"city"}
    assert json.loads(found["streamed_call"]["arguments"]) == arguments
    assert found["embeddings"] == [576, 576]


def test_openai_responses(embedded: Running, parrot: Running) -> None:
    found = run("openai_responses.mjs", embedded.url, parrot.url)
    check(found)
    assert found["last_event"] == "response.completed"
    assert found["call"]["name"] == "get_weather"
    arguments = json.loads(found["call"]["arguments"])
    assert set(arguments) == {"city"}
    assert json.loads(found["streamed_call"]["arguments"]) == arguments


def test_anthropic_messages(embedded: Running, parrot: Running) -> None:
    found = run("anthropic_messages.mjs", embedded.url, parrot.url)
    check(found)
    assert (found["call"]["type"], found["call"]["name"]) == ("tool_use", "get_weather")
    assert set(found["call"]["input"]) == {"city"}
    assert found["streamed_call"]["input"] == found["call"]["input"]
    assert found["counted"] == found["input"]


def test_openai_agents(embedded: Running, parrot: Running) -> None:
    found = run("openai_agents.mjs", embedded.url, parrot.url)
    check(found)
    assert set(found["call"]) == {"city"} and found["streamed_call"] == found["call"]
    weather = f"It rains in {found['call']['city']}."
    assert found["outputs"] == [weather, weather]
    assert "It rains in Paris." in found["streamed_answer"]


@pytest.mark.parametrize("provider", ["openai", "openai-chat", "openai-compatible", "anthropic"])
def test_vercel_ai(embedded: Running, parrot: Running, provider: str) -> None:
    found = run("vercel_ai.mjs", embedded.url, parrot.url, provider)
    check(found)
    assert found["call"]["toolName"] == "get_weather"
    assert set(found["call"]["input"]) == {"city"}
    assert found["streamed_call"]["input"] == found["call"]["input"]
