"""Routes for operators: load, ping, invocations, sleep; and several conversations at once."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.sagemaker_sessions import SagemakerSessions
from octavo.serve.limits import Limits
from tests.serve.running import NAME, Running, check_error, events, server

HI = [{"role": "user", "content": "hi"}]


def test_load_and_ping(running: Running) -> None:
    assert running.get("/ping").status_code == running.post("/ping", {}).status_code == 200
    assert running.get("/load").json() == {"server_load": 0}
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
    thread = threading.Thread(target=lambda: running.post("/v1/completions", body))
    thread.start()
    limit = time.monotonic() + 10
    while running.get("/load").json() == {"server_load": 0} and time.monotonic() < limit:
        pass
    assert running.get("/load").json() == {"server_load": 1}
    thread.join()


@pytest.mark.parametrize(
    ("body", "member"),
    [
        ({"messages": HI, "max_tokens": 2}, "choices"),
        ({"prompt": "x", "max_tokens": 2}, "choices"),
        ({"input": "x"}, "data"),
        ({"messages": HI, "encoding_format": "float"}, "data"),
        ({"query": "x", "documents": ["y"]}, "results"),
        ({"text_1": "x", "text_2": "y"}, "data"),
    ],
)
def test_invocations_find_the_route(running: Running, body: dict[str, Any], member: str) -> None:
    reply = running.post("/invocations", body)
    assert reply.status_code == 200 and member in reply.json()
    streamed = running.post("/invocations", {"prompt": "x", "stream": True, "max_tokens": 2})
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_invocations_without_a_route(running: Running) -> None:
    for body in ({}, {"other": 1}):
        check_error(running.post("/invocations", body), 400)
    reply = running.http.post(
        "/invocations", content=b"[1", headers={"content-type": "application/json"}
    )
    check_error(reply, 400, None, "invalid_json")


SESSION = "x-amzn-sagemaker-session-id"


def test_a_session_of_sagemaker(running: Running) -> None:
    created = running.post("/invocations", {"requestType": "NEW_SESSION"})
    id, until = created.headers["x-amzn-sagemaker-new-session-id"].split("; Expires=")
    expires = datetime.strptime(until, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert 1100 < expires.timestamp() - time.time() < 1201
    body = {"prompt": "x", "max_tokens": 2}
    for session in (id, "NEW_SESSION", ""):
        reply = running.post("/invocations", body, headers={SESSION: session})
        assert reply.status_code == 200 and "choices" in reply.json()
    closed = running.post("/invocations", {"requestType": "CLOSE"}, headers={SESSION: id})
    assert closed.status_code == 200
    assert closed.headers["x-amzn-sagemaker-closed-session-id"] == id
    for asked in (body, {"requestType": "CLOSE"}):
        reply = running.post("/invocations", asked, headers={SESSION: id})
        check_error(reply, 400, None, "session_not_found")
    check_error(running.post("/invocations", {"requestType": "CLOSE"}), 424)


@pytest.mark.parametrize(
    "body", [{"requestType": "OPEN"}, {"requestType": "CLOSE", "prompt": "x"}, {"requestType": 1}]
)
def test_a_wrong_request_for_a_session(running: Running, body: dict[str, Any]) -> None:
    check_error(running.post("/invocations", body), 400, "requestType")


def test_sessions_are_bounded_and_expire_and_belong_to_a_key() -> None:
    sessions = SagemakerSessions(Limits(sessions=2, session_seconds=0.2))
    first, _ = sessions.create("alice")
    sessions.create("bob")
    sessions.check(first, "alice")
    for refused in (lambda: sessions.check(first, "bob"), lambda: sessions.close(first, "bob")):
        with pytest.raises(ApiError, match="session not found"):
            refused()
    with pytest.raises(ApiError) as caught:
        sessions.create("bob")
    assert caught.value.status == 429
    time.sleep(0.25)
    with pytest.raises(ApiError, match="session not found"):
        sessions.check(first, "alice")
    sessions.create("bob")


def test_several_conversations_have_a_choice_each(running: Running) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    asked = {"model": NAME, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    reply = running.post("/v1/chat/completions/batch", {**asked, "messages": conversations}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    for choice, messages in zip(reply["choices"], conversations, strict=True):
        alone = running.post("/v1/chat/completions", {**asked, "messages": messages}).json()
        assert alone["choices"][0]["message"]["content"] == choice["message"]["content"]
    assert reply["usage"]["completion_tokens"] == 15


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": HI}, "messages.0"),
        ({"messages": [HI, []]}, "messages.1"),
        ({"messages": [HI], "stream": True}, "stream"),
        ({"messages": [HI], "tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_several_conversations_that_are_refused(running: Running, asked: Any, param: str) -> None:
    check_error(running.post("/v1/chat/completions/batch", asked), 400, param)


@pytest.mark.slow
def test_a_server_sleeps_and_wakes_up(tmp_path: Path) -> None:
    with server(tmp_path, metrics_prefix="vllm") as drowsy:
        before = drowsy.complete(temperature=0)["choices"]
        assert drowsy.get("/is_sleeping").json() == {"is_sleeping": False}
        assert drowsy.http.post("/sleep?level=1").json() == {"is_sleeping": True}
        assert drowsy.http.post("/sleep").status_code == 200  # It already sleeps.
        assert not drowsy.engines()
        check_error(drowsy.post("/v1/completions", {"prompt": "x"}), 503, None, "engine_sleeping")
        assert drowsy.get("/readyz").json()["state"] == "sleeping"
        assert drowsy.metrics()['vllm:engine_sleep_state{sleep_state="weights_offloaded"}'] == 1
        assert drowsy.http.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
        assert (
            drowsy.http.post("/wake_up?tags=kv_cache", timeout=120).json()["is_sleeping"] is False
        )
        assert drowsy.complete(temperature=0)["choices"] == before
        assert drowsy.metrics()['vllm:engine_sleep_state{sleep_state="awake"}'] == 1
        for path, param in (("/sleep?level=3", "level"), ("/wake_up?tags=x", "tags")):
            check_error(drowsy.http.post(path), 400, param)


# ---- token ids in, token ids out ----------------------------------------------------------------

TOKENS = "/inference/v1/generate"


def test_token_ids_in_token_ids_out(running: Running) -> None:
    params = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": [5, 6, 7], "sampling_params": {**params, "logprobs": 2, "n": 1}}
    reply = running.post(TOKENS, body).json()
    completion = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    same = running.post("/v1/completions", {**completion, "return_token_ids": True}).json()
    (choice,) = reply["choices"]
    assert choice["token_ids"] == same["choices"][0]["token_ids"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * 5
    assert reply["usage"]["completion_tokens"] == 5
    found = events(running.post(TOKENS, {**body, "stream": True}).text)
    streamed = [token for chunk in found for token in chunk["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    unlimited = {"token_ids": [5], "sampling_params": {"ignore_eos": True}}
    assert len(running.post(TOKENS, unlimited).json()["choices"][0]["token_ids"]) == 1023


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [300]}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": 9}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"n": "x"}}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"bad_words": ["x"]}}, "bad_words"),
        (
            {"token_ids": [1], "sampling_params": {"stop": ["x"], "detokenize": False}},
            "sampling_params.stop",
        ),
    ],
)
def test_token_ids_that_are_refused(running: Running, asked: Any, param: str) -> None:
    check_error(running.post(TOKENS, asked), 400, param)


def test_rendered_requests(running: Running) -> None:
    asked = {"prompt": ["hello", "a <|end|>"], "temperature": 0.5, "return_token_offsets": True}
    first, second = running.post("/v1/completions/render", asked).json()
    assert first["prompt"] == "hello" and first["request_id"].startswith("cmpl-")
    assert first["token_offsets"] == [[i, i + 1] for i in range(5)]
    assert second["token_offsets"][-1] == [2, 9], "the token <|end|>"
    assert first["sampling_params"]["temperature"] == 0.5
    generated = {"token_ids": first["token_ids"], "sampling_params": {"max_tokens": 2}}
    assert running.post(TOKENS, generated).status_code == 200
    chat = running.post("/v1/chat/completions/render", {"messages": HI, "stream": True}).json()
    assert chat["stream"] is True and chat["token_offsets"] is None
    check_error(running.post("/v1/completions/render", {"prompt": "x", "top_p": 2}), 400, "top_p")


def test_the_load_is_in_a_header_if_a_client_asks(running: Running) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for wanted, start in (("TEXT", "TEXT named_metrics.kv"), ("json", 'JSON {"named_metrics"')):
        header = {"endpoint-load-metrics-format": wanted}
        reply = running.post("/v1/completions", body, headers=header)
        assert reply.headers["endpoint-load-metrics"].startswith(start)
    for header in ({}, {"endpoint-load-metrics-format": "other"}):
        reply = running.post("/v1/completions", body, headers=header)
        assert "endpoint-load-metrics" not in reply.headers
