"""The real openai-python against a real server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

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
    def counts(**options: bool) -> list[int | None]:
        chunks = client.chat.completions.create(
            model=NAME, messages=HI, max_tokens=4, stream=True, stream_options=options, extra_body={"ignore_eos": True}
        )  # fmt: skip
        return [c.usage and c.usage.completion_tokens for c in chunks]

    each = counts(include_usage=True, continuous_usage_stats=True)
    assert each[0] == 0 and each[-2:] == [4, 4] and sorted(set(each[:-1])) == each[:-1]
    assert counts(include_usage=True)[-1] == 4 and set(counts(include_usage=True)[:-1]) == {None}
    for without in ({"include_usage": False}, {"continuous_usage_stats": True}, {}):
        assert set(counts(**without)) == {None}


def test_keys_without_a_value_are_null(client: openai.OpenAI) -> None:
    """Scripts for vLLM read them without asking whether they are there."""
    chat = client.chat.completions.create(model=NAME, messages=HI, max_tokens=2).model_dump()
    text = client.completions.create(model=NAME, prompt="a", max_tokens=2).model_dump()
    for reply, names in (
        (chat, ["prompt_logprobs", "prompt_token_ids", "service_tier", "kv_transfer_params"]),
        (chat["choices"][0], ["token_ids", "stop_reason", "logprobs"]),
        (chat["choices"][0]["message"], ["reasoning", "refusal", "audio", "function_call"]),
        (text, ["service_tier", "kv_transfer_params"]),
        (text["choices"][0], ["token_ids", "prompt_token_ids", "prompt_logprobs", "stop_reason"]),
    ):
        assert {name: reply[name] for name in names} == dict.fromkeys(names)


def test_the_fingerprint_is_that_of_the_settings(client: openai.OpenAI) -> None:
    same = dict(model=NAME, messages=HI, max_tokens=2)
    whole = client.chat.completions.create(**same)
    assert (whole.system_fingerprint or "").startswith("octavo-")
    chunks = list(client.chat.completions.create(**same, stream=True))
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_token_ids_of_a_chat(client: openai.OpenAI, tools: Any) -> None:
    body = {"return_token_ids": True, "return_prompt_text": True, "ignore_eos": True}
    same = dict(model=NAME, messages=HI, max_tokens=5, seed=1, n=2, extra_body=body)
    if tools is not None:
        same["tools"] = tools
    whole = client.chat.completions.create(**same).model_dump()
    chunks = [c.model_dump() for c in client.chat.completions.create(**same, stream=True)]
    said = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            said[choice["index"]] += choice.get("token_ids") or []
    assert [said[0], said[1]] == [choice["token_ids"] for choice in whole["choices"]]
    assert len(said[0]) == 5 and len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[0]["prompt_text"] == whole["prompt_text"]
    assert "<|user|>hi<|end|>" in whole["prompt_text"]
    assert not any(chunk.get("prompt_token_ids") for chunk in chunks if "role" not in str(chunk))


@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_of_completions(client: openai.OpenAI, echo: bool) -> None:
    body = {"return_token_ids": True, "ignore_eos": True}
    same = dict(model=NAME, prompt=["ab", "c"], max_tokens=5, seed=1, echo=echo, extra_body=body)
    whole = [c.model_dump() for c in client.completions.create(**same).choices]
    assert [choice["prompt_token_ids"] for choice in whole] == [[64, 65], [66]]
    parts: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for chunk in client.completions.create(**same, stream=True):
        for choice in chunk.choices:
            parts[choice.index].append(choice.model_dump())
    for index, choices in parts.items():
        assert [t for c in choices for t in c["token_ids"]] == whole[index]["token_ids"]
        told = [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c]
        assert told == [whole[index]["prompt_token_ids"]]


def test_tokens_as_ids_and_tokens_by_name(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True, "logprob_token_ids": [70, 5], "ignore_eos": True}
    chat = dict(model=NAME, messages=HI, max_tokens=3, seed=1, logprobs=True, top_logprobs=4)
    text = dict(model=NAME, prompt="abc", max_tokens=3, seed=1, logprobs=2)
    content = client.chat.completions.create(**chat, extra_body=extra).choices[0].logprobs.content
    assert [[t.token for t in at.top_logprobs] for at in content] == [
        [at.token, "token_id:70", "token_id:5"] for at in content
    ]
    plain = client.chat.completions.create(**chat, extra_body={"ignore_eos": True})
    before = plain.choices[0].logprobs.content
    assert [at.logprob for at in content] == [at.logprob for at in before]
    assert all(at.token.startswith("token_id:") for at in content)
    found = client.completions.create(**text, extra_body=extra).choices[0].logprobs
    assert all({"token_id:70", "token_id:5"} <= set(at) for at in found.top_logprobs)
    assert [set(at) - {"token_id:70", "token_id:5"} for at in found.top_logprobs] == [
        {token} - {"token_id:70", "token_id:5"} for token in found.tokens
    ]
    streamed = list(client.completions.create(**text, extra_body=extra, stream=True))
    tokens = [
        t for c in streamed for t in (c.choices[0].logprobs.tokens if c.choices[0].logprobs else [])
    ]
    assert tokens == found.tokens


def test_a_chat_that_echoes_its_last_message(client: openai.OpenAI) -> None:
    said = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "well, "}]}]
    same = dict(model=NAME, max_tokens=4, seed=1)
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    plain = client.chat.completions.create(messages=said, **same, extra_body=go_on)
    echoed = client.chat.completions.create(
        messages=said, **same, extra_body={**go_on, "echo": True}
    )
    want = "well, " + plain.choices[0].message.content
    assert echoed.choices[0].message.content == want
    chunks = client.chat.completions.create(
        messages=said, **same, stream=True, extra_body={**go_on, "echo": True}
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want
    other = client.chat.completions.create(messages=HI, **same, extra_body={"echo": True})
    nothing = client.chat.completions.create(messages=HI, **same)
    assert other.choices[0].message.content == nothing.choices[0].message.content


def test_both_sides_of_a_prompt_can_be_cut(client: openai.OpenAI) -> None:
    def prompt(**asked: Any) -> list[int]:
        extra = {"return_token_ids": True, **asked}
        reply = client.completions.create(
            model=NAME, prompt="abcdef", max_tokens=1000, temperature=0, extra_body=extra
        )
        return reply.choices[0].model_dump()["prompt_token_ids"]

    whole = prompt()
    assert prompt(truncate_prompt_tokens=2) == whole[-2:]
    assert prompt(truncate_prompt_tokens=2, truncation_side="left") == whole[-2:]
    assert prompt(truncate_prompt_tokens=2, truncation_side="right") == whole[:2]
    long = client.completions.create(
        model=NAME, prompt=[5] * 2000, max_tokens=24, extra_body={"truncate_prompt_tokens": -1}
    )
    assert long.usage.prompt_tokens == 1000


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
