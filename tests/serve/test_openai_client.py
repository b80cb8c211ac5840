"""The real openai-python against a real server."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest

from tests import tiny
from tests.serve.running import NAME, Running

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).model_dump()["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=NAME, messages=HI, max_tokens=6, temperature=0)
    (choice,) = reply.choices
    assert choice.finish_reason in ("length", "stop") and choice.message.role == "assistant"
    assert (
        reply.usage is not None
        and reply.usage.prompt_tokens == 5
        and reply.usage.completion_tokens == 6
    )
    assert (
        reply.usage.prompt_tokens_details is not None
        and reply.usage.prompt_tokens_details.cached_tokens == 0
    )
    assert reply.id.startswith("chatcmpl-")


def test_a_stream_is_the_whole_reply_in_pieces(client: openai.OpenAI) -> None:
    same = dict(model=NAME, messages=HI, max_tokens=40, seed=3)
    whole = client.chat.completions.create(**same)
    chunks = list(
        client.chat.completions.create(**same, stream=True, stream_options={"include_usage": True})
    )
    *pieces, last = chunks
    assert (
        "".join(c.choices[0].delta.content or "" for c in pieces)
        == whole.choices[0].message.content
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in pieces[1:])
    assert [c.choices[0].finish_reason for c in pieces if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert last.choices == [] and last.usage == whole.usage
    assert all(c.usage is None for c in pieces)
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model=NAME, prompt="abc", max_tokens=5, stream=True, stream_options=options,
                                            extra_body={"ignore_eos": True}))  # fmt: skip
    counts = [c.usage.completion_tokens for c in chunks if c.usage]
    assert counts[-1] == 5 and counts == sorted(counts)


def test_completions_of_many_prompts(client: openai.OpenAI) -> None:
    prompts = ["one", "two", "three"]
    same = dict(model=NAME, max_tokens=8, temperature=0)
    each = [client.completions.create(prompt=p, **same).choices[0].text for p in prompts]
    together = client.completions.create(prompt=prompts, **same)
    assert [c.text for c in together.choices] == each
    assert [c.index for c in together.choices] == [0, 1, 2]
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(prompt=prompts, **same, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == each


def test_tokens_are_those_of_transformers(client: openai.OpenAI) -> None:
    prompt = [1, 2, 3, 4, 5]
    reply = client.completions.create(model=NAME, prompt=prompt, max_tokens=10, temperature=0, logprobs=0,
                                      extra_body={"ignore_eos": True})  # fmt: skip
    want = tiny.hf_greedy("llama", prompt, 10)
    logits = tiny.hf_logits("llama", prompt + want).log_softmax(-1)
    got = reply.choices[0].logprobs
    assert got is not None and got.token_logprobs is not None
    for k, logprob in enumerate(got.token_logprobs):
        assert logprob == pytest.approx(float(logits[len(prompt) + k - 1, want[k]]), abs=1e-4)


def test_echoed_prompt_logprobs_as_lm_eval_asks_for_them(client: openai.OpenAI) -> None:
    prompt = list(b"The quick brown fox")
    want = tiny.hf_logits("llama", prompt).log_softmax(-1)
    for max_tokens in (0, 1):
        reply = client.completions.create(
            model=NAME, prompt=[prompt], max_tokens=max_tokens, temperature=0, logprobs=1, echo=True
        )
        found = reply.choices[0].logprobs
        assert found is not None and found.token_logprobs and found.top_logprobs and found.tokens
        assert (
            len(found.tokens)
            == len(found.token_logprobs)
            == len(found.top_logprobs)
            == len(prompt) + max_tokens
        )
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        for k in range(1, len(prompt)):
            assert found.token_logprobs[k] == pytest.approx(float(want[k - 1, prompt[k]]), abs=1e-4)
            top = found.top_logprobs[k]
            assert max(top.values()) == pytest.approx(float(want[k - 1].max()), abs=1e-4)
            assert found.tokens[k] in top
        assert reply.usage is not None and reply.usage.completion_tokens == max_tokens


def test_chat_logprobs(client: openai.OpenAI) -> None:
    same = dict(model=NAME, messages=HI, max_tokens=5, logprobs=True, top_logprobs=4, seed=1)
    whole = client.chat.completions.create(**same).choices[0].logprobs
    assert whole is not None and whole.content is not None and len(whole.content) == 5
    for at in whole.content:
        assert len(at.top_logprobs) == 4 and at.bytes is not None
        assert at.top_logprobs[0].logprob == max(t.logprob for t in at.top_logprobs)
        assert sum(math.exp(t.logprob) for t in at.top_logprobs) <= 1.0001
    streamed = [
        at
        for chunk in client.chat.completions.create(**same, stream=True)
        for choice in chunk.choices
        if choice.logprobs and choice.logprobs.content
        for at in choice.logprobs.content
    ]
    assert streamed == whole.content


def test_n_choices_differ_and_share_the_prompt(client: openai.OpenAI) -> None:
    same = dict(model=NAME, messages=HI, max_tokens=12, n=4, seed=5)
    whole = client.chat.completions.create(**same)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    assert len({c.message.content for c in whole.choices}) > 1
    assert whole.usage is not None and whole.usage.prompt_tokens == 5
    texts, roles = dict.fromkeys(range(4), ""), []
    for chunk in client.chat.completions.create(**same, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] if choice.delta.role else []
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert sorted(roles) == [0, 1, 2, 3]


def test_best_of_returns_the_likeliest(client: openai.OpenAI) -> None:
    same = dict(
        model=NAME, prompt="abc", max_tokens=6, seed=5, logprobs=0, extra_body={"ignore_eos": True}
    )
    every = client.completions.create(n=6, **same).choices
    best = client.completions.create(n=2, best_of=6, **same).choices
    ranked = sorted(every, key=lambda c: -sum(c.logprobs.token_logprobs))  # type: ignore[union-attr,arg-type]
    assert [c.text for c in best] == [c.text for c in ranked[:2]]


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    same = dict(model=NAME, prompt="hello", max_tokens=30, temperature=0)
    text = client.completions.create(**same).choices[0].text
    stop = text[5:7]
    cut = client.completions.create(**same, stop=[stop, "never there"]).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    streamed = "".join(
        c.choices[0].text for c in client.completions.create(**same, stop=stop, stream=True)
    )
    assert streamed == cut.text


def test_seeds_and_biases_and_penalties_are_heard(client: openai.OpenAI) -> None:
    def text(**options: object) -> str:
        return (
            client.completions.create(model=NAME, prompt="hello", max_tokens=8, **options)
            .choices[0]
            .text
        )  # type: ignore

    assert text(seed=7) == text(seed=7) != text(seed=8)
    assert set(text(temperature=0, logit_bias={"65": 100})) == {"b"}, (
        "token 65 of this vocabulary is a b"
    )
    assert text(temperature=0, logit_bias={"65": 100}, extra_body={"stop_token_ids": [65]}) == ""
    assert text(temperature=0, frequency_penalty=2, presence_penalty=2) != text(temperature=0)


def test_errors_have_types_and_codes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt=[1] * 2000)
    assert (
        caught.value.code == "context_length_exceeded"
        and "2000" in str(caught.value)
        and "1024" in str(caught.value)
    )
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HI)


async def _stream_of(client: openai.AsyncOpenAI, k: int) -> str:
    found = ""
    async for chunk in await client.completions.create(
        model=NAME, prompt=f"prompt {k}", max_tokens=30, temperature=0, stream=True
    ):
        found += chunk.choices[0].text
    return found


def test_many_streams_at_once_do_not_mix(running: Running) -> None:
    import asyncio

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="unused") as client:
            alone = [await _stream_of(client, k) for k in range(8)]
            return alone, list(
                await asyncio.gather(*(_stream_of(client, k % 8) for k in range(32)))
            )

    alone, together = asyncio.run(run())
    assert together == alone * 4
