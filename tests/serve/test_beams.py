"""Beam search and best_of over HTTP: the texts that the engine finds, best first, in every shape of
reply."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import tiny
from tests.serve.running import Running, check_error
from tests.test_beams import STOPS, transformers_beams

PROMPT = [5, 6, 7]
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 12, "stop_token_ids": STOPS}


def texts(settings: tuple[Any, ...], count: int) -> list[str]:
    """What transformers finds, as the server writes it: without the token that ended it."""
    from octavo.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(tiny.model_dir())
    found = transformers_beams("llama", tuple(PROMPT), *settings)[:count]
    return [
        tokenizer.decode(t[:-1] if t[-1] in [tiny.EOS, *STOPS] else t, skip_special_tokens=True)
        for _, t in found
    ]


@pytest.mark.parametrize("fields", [
    {}, {"best_of": 5, "n": 2}, {"length_penalty": 0.5, "early_stopping": True}, {"early_stopping": "never", "length_penalty": 2},
    {"temperature": 0}, {"logprobs": 2},
])  # fmt: skip
def test_completions_are_the_best_texts_best_first(
    running: Running, fields: dict[str, Any]
) -> None:
    reply = running.post("/v1/completions", {"prompt": PROMPT, **BEAMS, **fields})
    assert reply.status_code == 200, reply.text
    asked = {**BEAMS, **fields}
    width = asked.get("best_of", asked["n"])
    settings = (
        True,
        width,
        12,
        float(asked.get("length_penalty", 1.0)),
        asked.get("early_stopping", False),
    )
    choices = reply.json()["choices"]
    assert [c["index"] for c in choices] == list(range(asked["n"]))
    assert [c["text"] for c in choices] == texts(settings, asked["n"])
    if "logprobs" in fields:
        score = transformers_beams("llama", tuple(PROMPT), *settings)[0][0]
        given = choices[0]["logprobs"]["token_logprobs"]
        assert sum(given) / len(given) == pytest.approx(score, abs=1e-4)
        assert len(choices[0]["logprobs"]["top_logprobs"]) == len(given)


def test_chats_generate_and_batches_search_too(running: Running) -> None:
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "use_beam_search": True,
        "n": 2,
        "best_of": 4,
        "max_tokens": 6,
    }
    reply = running.post(
        "/v1/chat/completions", {**chat, "logprobs": True, "ignore_eos": True}
    ).json()
    sums = [sum(at["logprob"] for at in c["logprobs"]["content"]) for c in reply["choices"]]
    assert (
        len(sums) == 2
        and sums == sorted(sums, reverse=True)
        and reply["usage"]["completion_tokens"] == 12
    )
    fields = {"use_beam_search": True, "best_of": 4, "max_new_tokens": 6, "ignore_eos": True}
    one = running.post("/generate", {"prompt": "hello", **fields}).json()["generated_text"]
    several = running.post("/batch_generate", {"prompts": ["hello", "you"], **fields}).json()[
        "generated_texts"
    ]
    best = running.complete(prompt="hello", use_beam_search=True, best_of=4, max_tokens=6)[
        "choices"
    ][0]["text"]
    assert one == best == several[0] != several[1]


def test_what_draws_is_named_as_without_effect(running: Running) -> None:
    fields = {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 4}
    plain = running.post("/v1/completions", fields)
    drawn = running.post("/v1/completions", {**fields, "temperature": 1.5, "top_p": 0.5, "seed": 3})
    assert (
        "x-ignored-params" not in plain.headers
        and drawn.headers["x-ignored-params"] == "temperature, top_p, seed"
    )
    assert drawn.json()["choices"] == plain.json()["choices"]


def test_many_searches_beside_others(running: Running) -> None:
    settings = (True, 4, 12, 1.0, False)
    want = texts(settings, 4)
    alone = running.complete(prompt="hello there", temperature=0, max_tokens=20)["choices"][0][
        "text"
    ]

    def ask(i: int) -> Any:
        if i % 3:
            return (
                running.complete(prompt="hello there", temperature=0, max_tokens=20)["choices"][0][
                    "text"
                ]
                == alone
            )
        reply = running.complete(**{**BEAMS, "prompt": PROMPT, "n": 4, "ignore_eos": False})
        return [c["text"] for c in reply["choices"]] == want

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(ask, range(30)))


def test_a_beam_search_ends_when_its_request_times_out(running: Running) -> None:
    fields = {
        "prompt": PROMPT,
        "use_beam_search": True,
        "best_of": 20,
        "max_tokens": 900,
        "ignore_eos": True,
        "timeout": 0.3,
    }
    check_error(running.post("/v1/completions", fields), 504)
    for _ in range(100):
        if running.metrics()["octavo:num_requests_running"] == 0:
            break
        time.sleep(0.02)
    assert running.metrics()["octavo:num_requests_running"] == 0
    running.complete()


def test_best_of_in_chats_and_generate(running: Running) -> None:
    fields = {"best_of": 6, "seed": 5, "ignore_eos": True}
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "logprobs": True,
        "seed": 5,
        "ignore_eos": True,
    }
    every = running.post("/v1/chat/completions", {**chat, "n": 6}).json()
    reply = running.post("/v1/chat/completions", {**chat, "best_of": 6, "n": 2}).json()
    score = {
        c["message"]["content"]: sum(at["logprob"] for at in c["logprobs"]["content"])
        for c in every["choices"]
    }
    assert [c["message"]["content"] for c in reply["choices"]] == sorted(
        score, key=lambda t: -score[t]
    )[:2]
    assert reply["usage"]["completion_tokens"] == 36, (
        "those that were not given back were computed too"
    )
    one = running.post("/generate", {"prompt": "hello", "max_new_tokens": 6, **fields}).json()[
        "generated_text"
    ]
    assert one == running.complete(prompt="hello", max_tokens=6, **fields)["choices"][0]["text"]


def test_a_websocket_streams_and_does_not_rank(running: Running) -> None:
    connect = pytest.importorskip("websockets.sync.client").connect
    with connect(f"ws://127.0.0.1:{running.port}/ws/generate") as socket:
        for fields in ({"use_beam_search": True, "best_of": 2}, {"best_of": 3}):
            socket.send(json.dumps({"prompt": "hello", **fields}))
            error = json.loads(socket.recv())["error"]
            assert error["code"] == "unsupported_parameter" and error["param"] == next(iter(fields))


def test_the_bounds_are_told(running: Running) -> None:
    assert running.get("/v1/limits").json()["beams"] == 64
