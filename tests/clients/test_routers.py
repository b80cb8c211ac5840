"""Two servers behind the routers of vLLM and SGLang: openai-python works as with one server, and a
killed server ends only its own streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx2 as httpx
import openai
import pytest
from pydantic import BaseModel

pytest.importorskip("vllm_router", reason="vllm-router is not installed: run `make test-clients`")
pytest.importorskip("sglang_router", reason="sglang-router is missing: run `make test-clients`")

from tests.serve.running import NAME, ROOT, Running, free_port, server

pytestmark = pytest.mark.slow

ROUTERS = ("vllm", "sglang")
HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "rain": {"type": "boolean"}},
            "required": ["unit", "rain"],
            "additionalProperties": False,
        },
    },
}


class Colour(BaseModel):
    name: Literal["red", "green"]
    dark: bool


class Routed(NamedTuple):
    url: str
    workers: list[Running]

    def finished(self) -> list[float]:
        """Return the number of requests that each worker has finished."""
        return [worker.metrics()["inference_requests_total"] for worker in self.workers]


@contextlib.contextmanager
def router(name: str, urls: list[str], log: Path, *more: str) -> Iterator[str]:
    """Run `octavo route` until the end of the block, and yield its address."""
    port = free_port()
    program = [sys.executable, "-m", "octavo", "route", "--router", name, "--port", str(port)]
    program += ["--metrics-port", str(free_port()), *more]
    for url in urls:
        program += ["--worker", url]
    with open(log, "w") as out:
        process = subprocess.Popen(program, cwd=ROOT, env=os.environ, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not is_ready(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    return False


@pytest.fixture(scope="module", params=ROUTERS)
def routed(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Routed]:
    folders = [tmp_path_factory.mktemp(f"worker{number}") for number in range(2)]
    with server(folders[0]) as first, server(folders[1]) as second:
        workers = [first, second]
        log = folders[0] / "router.log"
        with router(request.param, [w.url for w in workers], log, "--policy", "round_robin") as url:
            yield Routed(url, workers)


@pytest.fixture(scope="module")
def client(routed: Routed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{routed.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {NAME}


def test_a_stream_is_the_whole_reply(client: openai.OpenAI) -> None:
    same: Any = dict(model=NAME, messages=HI, max_tokens=40, seed=3)
    whole = client.chat.completions.create(**same)
    options = {"include_usage": True}
    *pieces, last = client.chat.completions.create(**same, stream=True, stream_options=options)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content and len(pieces) > 3
    assert last.usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_tools_are_called(client: openai.OpenAI) -> None:
    same: Any = dict(
        model=NAME,
        messages=HI,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
        max_tokens=200,
    )
    (choice,) = client.chat.completions.create(**same).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "get_weather"  # type: ignore[union-attr]
    arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
    assert arguments["unit"] in ("C", "F") and isinstance(arguments["rain"], bool)
    streamed = ""
    for chunk in client.chat.completions.create(**same, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            streamed += piece.function.arguments or ""
    assert json.loads(streamed) == arguments


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=NAME, messages=HI, response_format=Colour, max_tokens=100, temperature=1.5
    )
    assert isinstance(reply.choices[0].message.parsed, Colour)


def test_a_completion_is_that_of_a_worker(routed: Routed, client: openai.OpenAI) -> None:
    same: Any = dict(prompt="hello", max_tokens=8, temperature=0, logprobs=1)
    reply = client.completions.create(model=NAME, **same).choices[0]
    direct = routed.workers[0].complete(**same, ignore_eos=False)["choices"][0]
    assert reply.text == direct["text"]
    assert reply.logprobs.tokens == direct["logprobs"]["tokens"]  # type: ignore[union-attr]


def test_an_error_has_its_type_and_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="x" * 2000)  # SGLang takes only text here.
    assert caught.value.code == "context_length_exceeded"


def test_many_streams_use_both_workers_and_do_not_mix(routed: Routed) -> None:
    before = routed.finished()

    async def all_texts() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{routed.url}/v1", api_key="unused") as client:
            alone = [await stream_text(client, number) for number in range(4)]
            numbers = [number % 4 for number in range(16)]
            return alone, list(await asyncio.gather(*(stream_text(client, n) for n in numbers)))

    alone, together = asyncio.run(all_texts())
    assert together == alone * 4
    added = [after - start for after, start in zip(routed.finished(), before, strict=True)]
    assert sum(added) == 20 and min(added) >= 5


async def stream_text(client: openai.AsyncOpenAI, number: int, max_tokens: int = 30) -> str:
    """Return the text of a greedy stream, or raise the error that ends it."""
    text = ""
    reason = None
    stream = await client.completions.create(
        model=NAME,
        prompt=f"prompt {number}",
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    if reason is None:
        raise EOFError("the stream ended early and without an error")
    return text


@pytest.mark.parametrize("routed", ["vllm"], indirect=True)
def test_vllms_router_passes_on_what_it_does_not_know(
    routed: Routed, client: openai.OpenAI
) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "cache_salt": "a"}
    reply = client.chat.completions.create(model=NAME, messages=HI, extra_body=extra)
    assert reply.choices[0].message.content in ("yes", "no")
    tokens = httpx.post(f"{routed.url}/tokenize", json={"model": NAME, "prompt": "abc"}).json()
    assert tokens["count"] == 3 and tokens["max_model_len"] == 1024
    info = httpx.get(f"{routed.url}/get_server_info").json()
    assert info["served_model_name"] == NAME


# This test is the last of each router, because it kills a worker.
def test_a_killed_worker_ends_only_its_own_streams(routed: Routed, client: openai.OpenAI) -> None:
    victim, other = routed.workers

    async def streams_and_a_kill() -> list[str | BaseException]:
        async with openai.AsyncOpenAI(
            base_url=f"{routed.url}/v1", api_key="unused", max_retries=0, timeout=300
        ) as many:
            streams = [asyncio.create_task(stream_text(many, n, 600)) for n in range(8)]
            for worker in routed.workers:
                while worker.metrics()["octavo:num_requests_running"] < 4:
                    await asyncio.sleep(0.02)
            victim.process.kill()
            return await asyncio.gather(*streams, return_exceptions=True)

    ends = asyncio.run(streams_and_a_kill())
    whole = [end for end in ends if isinstance(end, str)]
    assert len(whole) == 4, ends
    for number in range(12):
        reply = client.completions.create(
            model=NAME, prompt=f"prompt {number}", max_tokens=4, temperature=0
        )
        assert reply.choices[0].text
    assert other.process.poll() is None and victim.process.poll() is not None
