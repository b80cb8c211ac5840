"""Two servers behind the routers of vLLM and SGLang: the tests of one server pass, and a killed
server ends only its own streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

pytest.importorskip("vllm_router", reason="vllm-router is not installed: run `make test-clients`")
pytest.importorskip("sglang_router", reason="sglang-router is missing: run `make test-clients`")

from tests.serve.running import NAME, ROOT, Running, free_port, server

# The same tests as for one server, as far as the routers pass their requests on unchanged. They use
# the fixtures `running` and `client` of this file.
from tests.serve.test_openai_client import (  # noqa: F401
    test_a_chat_that_echoes_its_last_message,
    test_a_stream_is_the_whole_reply_in_pieces,
    test_best_of_returns_the_likeliest,
    test_both_sides_of_a_prompt_can_be_cut,
    test_chat,
    test_chat_logprobs,
    test_completions_of_many_prompts,
    test_echoed_prompt_logprobs_as_lm_eval_asks_for_them,
    test_errors_have_types_and_codes,
    test_keys_without_a_value_are_null,
    test_many_streams_at_once_do_not_mix,
    test_models_are_listed_and_retrieved,
    test_n_choices_differ_and_share_the_prompt,
    test_seeds_and_biases_and_penalties_are_heard,
    test_stop_strings_end_the_text,
    test_the_fingerprint_is_that_of_the_settings,
    test_token_ids_of_completions,
    test_tokens_are_those_of_transformers,
    test_tokens_as_ids_and_tokens_by_name,
)
from tests.serve.test_structured import (  # noqa: F401
    test_a_reply_parses_into_a_model,
    test_json_object_and_what_max_tokens_cuts,
    test_json_schema_whole_and_streamed,
    test_n_choices_are_guided_each,
    test_openai_raises_for_a_bad_schema_in_a_stream_too,
)

pytestmark = pytest.mark.slow

ROUTERS = ("vllm", "sglang")
# docs/routing.md says which requests SGLang's router refuses, and what it drops.
NOT_WITH_SGLANG = {
    test_a_chat_that_echoes_its_last_message.__name__,
    test_both_sides_of_a_prompt_can_be_cut.__name__,
    test_echoed_prompt_logprobs_as_lm_eval_asks_for_them.__name__,
    test_errors_have_types_and_codes.__name__,
    test_models_are_listed_and_retrieved.__name__,
    test_tokens_are_those_of_transformers.__name__,
    test_tokens_as_ids_and_tokens_by_name.__name__,
}
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


class Routed(NamedTuple):
    router: Running
    workers: list[Running]

    def finished(self) -> list[float]:
        """Return the number of requests that each worker has finished."""
        return [worker.metrics()["inference_requests_total"] for worker in self.workers]


@contextlib.contextmanager
def router(name: str, urls: list[str], log: Path, *more: str) -> Iterator[Running]:
    """Run `octavo route` until the end of the block."""
    port = free_port()
    program = [sys.executable, "-m", "octavo", "route", "--router", name, "--port", str(port)]
    program += ["--metrics-port", str(free_port()), *more]
    for url in urls:
        program += ["--worker", url]
    with open(log, "w") as out:
        process = subprocess.Popen(program, cwd=ROOT, stdout=out, stderr=out, text=True)
    running = Running(process, port, log, log.parent)
    try:
        running.wait("/v1/models", seconds=60)
        yield running
    finally:
        try:
            running.stop(seconds=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module", params=ROUTERS)
def routed(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Routed]:
    folders = [tmp_path_factory.mktemp(f"worker{number}") for number in range(2)]
    with server(folders[0]) as first, server(folders[1]) as second:
        workers = [first, second]
        log = folders[0] / "router.log"
        urls = [worker.url for worker in workers]
        with router(request.param, urls, log, "--policy", "round_robin") as running:
            yield Routed(running, workers)


@pytest.fixture(autouse=True)
def skip_what_sglangs_router_refuses(request: pytest.FixtureRequest) -> None:
    router = request.node.callspec.params["routed"]
    if router == "sglang" and request.node.originalname in NOT_WITH_SGLANG:
        pytest.skip("SGLang's router does not pass this request on")


@pytest.fixture(scope="module")
def running(routed: Routed) -> Running:
    return routed.router


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {NAME}


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


def test_a_completion_is_that_of_a_worker(routed: Routed, client: openai.OpenAI) -> None:
    same: Any = dict(prompt="hello", max_tokens=8, temperature=0, logprobs=1)
    reply = client.completions.create(model=NAME, **same).choices[0]
    direct = routed.workers[0].complete(**same, ignore_eos=False)["choices"][0]
    assert reply.text == direct["text"]
    assert reply.logprobs.tokens == direct["logprobs"]["tokens"]  # type: ignore[union-attr]


def test_invalid_requests_have_a_typed_error_and_stop_no_worker(client: openai.OpenAI) -> None:
    for _ in range(10):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=NAME, prompt="x" * 2000)
        assert caught.value.code == "context_length_exceeded"
    for _ in range(4):
        assert client.completions.create(model=NAME, prompt="x", max_tokens=1).choices


def test_many_streams_use_both_workers_and_do_not_mix(routed: Routed) -> None:
    before = routed.finished()

    async def all_texts() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{routed.router.url}/v1", api_key="unused"
        ) as client:
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
    running: Running, client: openai.OpenAI
) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "cache_salt": "a"}
    reply = client.chat.completions.create(model=NAME, messages=HI, extra_body=extra)
    assert reply.choices[0].message.content in ("yes", "no")
    tokens = running.post("/tokenize", {"model": NAME, "prompt": "abc"}).json()
    assert tokens["count"] == 3 and tokens["max_model_len"] == 1024
    info = running.get("/get_server_info").json()
    assert info["served_model_name"] == NAME


# This test is the last of each router, because it kills a worker.
def test_a_killed_worker_ends_only_its_own_streams(routed: Routed, client: openai.OpenAI) -> None:
    victim, other = routed.workers

    async def streams_and_a_kill() -> list[str | BaseException]:
        async with openai.AsyncOpenAI(
            base_url=f"{routed.router.url}/v1", api_key="unused", max_retries=0, timeout=300
        ) as many:
            streams = [asyncio.create_task(stream_text(many, n, 600)) for n in range(8)]
            for worker in routed.workers:
                while worker.metrics()["octavo:num_requests_running"] < 4:
                    assert not any(stream.done() for stream in streams), "a stream ended early"
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
