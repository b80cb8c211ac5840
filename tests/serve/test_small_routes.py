"""The routes beside OpenAI's two: each once as it is meant, and once for every error that the
documentation names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from octavo.serve.limits import Limits
from tests.serve.running import NAME, Running, check_error, server

HI = [{"role": "user", "content": "hi"}]
RENDER = "/v1/chat/completions/render"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that is asked everything before its model is there: {route: reply}."""
    bodies = {"/batch_generate": {"prompts": ["x"]}, "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]},
              RENDER: {"messages": HI}, "/generate": {"prompt": "x"}}  # fmt: skip
    with server(
        tmp_path_factory.mktemp("loading"), ready=False, program="tests.serve.late_engine"
    ) as front:
        found = {path: front.post(path, body) for path, body in bodies.items()}
        found["/tokenizer_info"] = front.get("/tokenizer_info")
        found["/v1/limits"], found["/v1/models"] = front.get("/v1/limits"), front.get("/v1/models")
        with socket(front) as ws:
            found["/ws/generate"] = ask(ws, prompt="x")
    return found


def socket(running: Running, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{running.port}/ws/generate", open_timeout=5, **options)


def ask(ws: ClientConnection, **body: Any) -> dict[str, Any]:
    """The message that ends a generation."""
    ws.send(json.dumps(body))
    while (message := json.loads(ws.recv(timeout=10))).get("type") == "text":
        pass
    return dict(message)


# ---- before there is a model ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/generate", "/batch_generate", "/tokenize", "/detokenize", "/tokenizer_info", RENDER]
)
def test_what_needs_a_model_says_that_it_is_not_there_yet(loading: Any, path: str) -> None:
    check_error(loading[path], 503, None, "engine_starting")
    assert int(loading[path].headers["retry-after-ms"]) > 0


def test_what_needs_none_answers(loading: Any) -> None:
    assert (
        loading["/v1/limits"].json()["max_model_len"] is None
        and loading["/v1/models"].status_code == 200
    )
    assert loading["/ws/generate"]["error"]["code"] == "engine_starting"


# ---- WebSocket -----------------------------------------------------------------------------------


def test_a_websocket_tells_what_http_says_in_headers(running: Running) -> None:
    with socket(running) as ws:
        done = ask(ws, prompt="x" * 1000, max_new_tokens=500, ignore_eos=True, wat=1, priority=2)
        assert done["headers"] == {"x-ignored-params": "wat, priority", "x-max-tokens": "24"}
        assert done["id"].startswith("req_") and done["finish_reason"] == "length"
        assert done["usage"]["prompt_tokens"] == 1000 and done["usage"][
            "prompt_tokens_details"
        ] == {"cached_tokens": 0}
        assert ask(ws, prompt="x", max_new_tokens=1)["headers"] == {}


def test_a_websocket_takes_bytes_for_the_text_that_they_are(running: Running) -> None:
    with socket(running) as ws:
        ws.send(
            json.dumps(
                {"prompt": "x", "max_new_tokens": 3, "ignore_eos": True, "stream": True}
            ).encode()
        )
        while (message := json.loads(ws.recv(timeout=10))).get("type") == "text":
            pass
        assert message["usage"]["completion_tokens"] == 3
        ws.send(b"\xff{")
        assert "error" in json.loads(ws.recv(timeout=10))
        assert ask(ws, prompt="x", max_new_tokens=1)["type"] == "done"


def test_plain_generation_refuses_what_it_would_not_do(running: Running) -> None:
    for body in ({"stream": True}, {"n": 2}, {"messages": []}, {"max_tokens": 3}):
        said = check_error(
            running.post("/generate", {"prompt": "x", **body}),
            400,
            next(iter(body)),
            "unsupported_parameter",
        )
        assert "/v1/" in said["message"] or "use max_new_tokens" in said["message"]
    assert (
        running.post(
            "/generate", {"prompt": "x", "max_new_tokens": 1, "stream": False, "n": 1}
        ).status_code
        == 200
    )


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": "x", "best_of": 2}, "best_of", "unsupported_parameter"),
        ({"prompt": "x", "max_tokens": 2}, "max_tokens", "unsupported_parameter"),
        (
            {"prompt": "x", "use_beam_search": True, "best_of": 2},
            "use_beam_search",
            "unsupported_parameter",
        ),
        ({"prompt": "x" * 2000}, "prompt", "context_length_exceeded"),
        (
            {"prompt": "x", "structured_outputs": {"regex": "("}},
            "structured_outputs",
            "invalid_structured_output",
        ),
        ({"prompt": "x", "model": "gpt-9"}, "model", "model_not_found"),
        ({"prompt": "x", "tools": TOOLS}, "tools", "unsupported_parameter"),
        (
            {"prompt": "x", "max_new_tokens": 900, "ignore_eos": True, "timeout": 0.02},
            None,
            "deadline_exceeded",
        ),
        ({"max_new_tokens": 1}, "prompt", None),
    ],
)
def test_what_a_websocket_refuses(
    running: Running, body: dict[str, Any], param: str | None, code: str | None
) -> None:
    with socket(running) as ws:
        error = ask(ws, **body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and (
            error["param"],
            error["code"],
        ) == (param, code)
        assert ask(ws, prompt="x", max_new_tokens=1)["type"] == "done", "it goes on"


def test_cancelling_where_nothing_runs_is_nothing_to_do(running: Running) -> None:
    with socket(running) as ws:
        ws.send('{"type": "cancel"}')
        assert ask(ws, prompt="x", max_new_tokens=1)["type"] == "done"


def test_a_websocket_needs_a_key_where_there_are_keys(tmp_path: Path) -> None:
    key = "alice-0123456789abcdef"
    (tmp_path / "keys.toml").write_text(f'[[keys]]\nname = "alice"\nkey = "{key}"\n')
    with server(tmp_path, keys_file=str(tmp_path / "keys.toml")) as locked:
        with pytest.raises(InvalidStatus) as caught:
            socket(locked)
        assert caught.value.response.status_code == 401
        with socket(locked, additional_headers={"authorization": f"Bearer {key}"}) as ws:
            assert ask(ws, prompt="x", max_new_tokens=1)["type"] == "done"


# ---- batches -------------------------------------------------------------------------------------


def test_a_batch_larger_than_the_queue_is_taken(tmp_path: Path) -> None:
    with server(tmp_path, max_queue=4, engine={"max_num_seqs": 2}) as small:
        body = {"prompts": ["x"] * 20, "max_new_tokens": 2}
        reply = small.post("/batch_generate", body)
        assert reply.status_code == 200 and len(reply.json()["generated_texts"]) == 20


def test_the_best_of_several_for_each_prompt(running: Running) -> None:
    body = {"prompts": ["one", "two"], "max_new_tokens": 6, "use_beam_search": True, "best_of": 3}
    alone = [
        running.post("/generate", {**body, "prompt": p}).json()["generated_text"]
        for p in body["prompts"]
    ]  # type: ignore[attr-defined]
    assert running.post("/batch_generate", body).json() == {"generated_texts": alone}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompts": ["x", "y" * 2000]}, "prompt", "context_length_exceeded"),
        ({"prompts": ["x", 5]}, "prompts.1", None),
        (
            {"prompts": ["x"], "min_tokens": 5, "max_new_tokens": 4},
            "min_tokens",
            "param_out_of_range",
        ),
        ({"prompts": ["x"] * 200, "best_of": 20}, "n", "param_out_of_range"),
        ({"prompts": ["x"], "guided_regex": "("}, "guided_regex", "invalid_structured_output"),
        ({"prompts": ["x"], "prompt": "x"}, "prompt", "unsupported_parameter"),
    ],
)
def test_what_a_batch_is_refused_for(
    running: Running, body: dict[str, Any], param: str, code: str | None
) -> None:
    check_error(running.post("/batch_generate", body), 400, param, code)


def test_a_batch_that_takes_too_long(running: Running) -> None:
    body = {"prompts": ["x"] * 8, "max_new_tokens": 900, "ignore_eos": True, "timeout": 0.05}
    error = check_error(running.post("/batch_generate", body), 504, None, "deadline_exceeded")
    assert error["type"] == "timeout_error"


# ---- tokens, prompts, limits ---------------------------------------------------------------------


def test_a_prompt_is_shown_as_it_would_be_used(running: Running) -> None:
    reply = running.post(RENDER, {"messages": HI, "truncate_prompt_tokens": 3, "wat": 1})
    whole = running.post(RENDER, {"messages": HI}).json()
    assert reply.json()["token_ids"] == whole["token_ids"][-3:] and reply.json()["count"] == 3
    assert whole["max_model_len"] == 1024 and whole["count"] == len(whole["token_ids"])
    assert reply.headers["x-truncated-tokens"] == "2" and reply.headers["x-ignored-params"] == "wat"


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"messages": []}, 400, "messages", None),
        ({"messages": HI, "temperature": 3}, 400, "temperature", "param_out_of_range"),
        ({"messages": HI, "max_tokens": 0}, 400, "max_tokens", "param_out_of_range"),
        ({"messages": HI, "allowed_token_ids": [300]}, 400, "allowed_token_ids", None),
        ({"messages": HI, "tool_choice": "auto"}, 400, "tool_choice", None),
        ({"messages": HI, "model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"messages": HI, "chat_template": "x"}, 403, "chat_template", "template_not_allowed"),
        (
            {"messages": HI, "chat_template_kwargs": {"messages": []}},
            400,
            "chat_template_kwargs",
            None,
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 200_000}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
    ],
)
def test_what_is_not_shown(
    running: Running, body: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    check_error(running.post(RENDER, body), status, param, code)


def test_a_prompt_somewhat_too_long_can_be_looked_at(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 1500}]}
    assert running.post(RENDER, body).json()["count"] > 1024
    check_error(
        running.post("/v1/chat/completions", body), 400, "messages", "context_length_exceeded"
    )


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})]
)
def test_tokens_of_another_model(running: Running, path: str, body: dict[str, Any]) -> None:
    check_error(running.post(path, {"model": "gpt-9", **body}), 404, "model", "model_not_found")


def test_the_tokenizer_is_told_as_lm_eval_reads_it(running: Running) -> None:
    found = running.get("/tokenizer_info").json()
    assert (
        found["model_max_length"] == 1024
        and found["eos_token_id"] == 256
        and found["vocab_size"] > 256
    )
    check_error(running.post("/tokenizer_info", {}), 405, code="method_not_allowed")


def test_a_refused_method_names_all_that_the_path_allows(running: Running) -> None:
    for path, allowed in (
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/files/file-1", "DELETE, GET, HEAD"),
        ("/v1/completions", "POST"),
    ):
        reply = running.http.put(path, json={})
        error = check_error(reply, 405, code="method_not_allowed")
        assert reply.headers["allow"] == allowed and error["message"].endswith(f"use {allowed}")


def test_every_limit_is_told_under_its_name(running: Running) -> None:
    found = running.get("/v1/limits").json()
    assert set(Limits.__dataclass_fields__) < set(found)
    assert (
        found["max_queue"] is None
        and found["max_queue_memory"] == 512 * 2**20
        and found["longest_sequence"] == 1024
        and found["request_timeout"] == 600
    )
    check_error(running.post("/v1/limits", {}), 405, code="method_not_allowed")


def test_a_model_that_is_not_there(running: Running) -> None:
    assert running.get(f"/v1/models/{NAME}").json()["max_model_len"] == 1024
    check_error(running.get("/v1/models/gpt-9"), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("id", "status", "code"), [("req_0", 404, "request_not_found"), ("x" * 129, 400, None)]
)
def test_a_request_that_cannot_be_cancelled(
    running: Running, id: str, status: int, code: str | None
) -> None:
    check_error(running.post(f"/v1/requests/{id}/cancel", None), status, code=code)
