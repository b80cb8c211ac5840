"""The routes that routers call on a worker: they answer what the routers read, and no more."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import NAME, Running, check_error, server

PROMPT = "a prompt of more than one block of the prefix cache, " * 2


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_the_server_is_described_under_the_names_that_sglangs_router_reads(
    running: Running, path: str
) -> None:
    found = running.get(path).json()
    assert found["served_model_name"] == found["model_path"] == NAME
    assert (found["tp_size"], found["dp_size"]) == (1, 1)
    assert found["max_total_tokens"] == 512 * found["page_size"]
    assert found["max_running_requests"] == 64 and found["max_model_len"] == 1024


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model_is_described_without_a_path_of_the_machine(running: Running, path: str) -> None:
    reply = running.get(path)
    assert reply.json()["architectures"] == ["LlamaForCausalLM"]
    assert reply.json()["served_model_name"] == NAME and "/" not in reply.text


def test_the_load_of_an_idle_engine_is_zero(running: Running) -> None:
    running.complete()
    deadline = time.monotonic() + 5
    while (found := running.get("/get_load").json())[0]["num_tokens"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert found == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]


def test_health_generate_computes_a_token(running: Running) -> None:
    before = running.metrics()["octavo:generation_tokens_total"]
    assert running.get("/health_generate").status_code == 200
    assert running.metrics()["octavo:generation_tokens_total"] == before + 1


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_the_prefix_cache_can_be_emptied(running: Running, path: str) -> None:
    def cached() -> int:
        details = running.complete(prompt=PROMPT)["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    cached()
    assert cached() > 0
    assert running.http.post(path).status_code == 200
    assert cached() == 0


def test_only_an_administrator_empties_the_cache_if_there_are_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[keys]]\nname = "a"\nkey = "n7Vq2mXz9LwTb4Rk"\n'
        '[[keys]]\nname = "b"\nkey = "q1W2e3R4t5Y6u7I8"\nadmin = true\n'
    )

    def bearer(key: str) -> dict[str, Any]:
        return {"headers": {"authorization": f"Bearer {key}"}}

    with server(tmp_path, keys_file=str(keys)) as running:
        assert running.get("/server_info").status_code == 401
        user = running.http.post("/flush_cache", **bearer("n7Vq2mXz9LwTb4Rk"))
        check_error(user, 403, None, "admin_only")
        admin = running.http.post("/flush_cache", **bearer("q1W2e3R4t5Y6u7I8"))
        assert admin.status_code == 200
