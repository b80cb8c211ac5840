"""Priorities, deadlines and keys on their way from a client to the scheduler, and traces of what
came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from octavo.core.policy import Priority
from octavo.params import SamplingParams
from octavo.serve.channel.messages import Add, decode_to_engine, encode
from tests.serve.running import Running, check_error, server
from tests.serve.test_engine_loop import run

KEYS = """
[[keys]]
name = "slow"
key = "slow-0123456789abcdef"
[[keys]]
name = "fast"
key = "fast-0123456789abcdef"
priority = 7
"""


def test_the_engine_is_told() -> None:
    message = Add("a", [1, 2], SamplingParams(), 5.0, "salt", -3, 9.5, "alice")
    assert decode_to_engine(encode(message)) == message
    loop, _ = run([message])
    (seq,) = loop.engine.scheduler.live.values()
    request = seq.request
    assert (request.priority, request.deadline, request.tenant, request.cache_salt) == (
        -3,
        9.5,
        "alice",
        "salt",
    )


@pytest.fixture(scope="module")
def urgent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("urgent")
    engine = {
        "scheduling_policy": "priority",
        "max_num_seqs": 1,
        "record_trace": str(folder / "trace.jsonl"),
    }
    with server(folder, engine=engine) as found:
        yield found, folder / "trace.jsonl"


async def urgent_among(
    url: str, headers: list[dict[str, str]], priorities: list[int]
) -> tuple[float, float]:
    """Seconds that a long request and a short one took which came when the long one was at work."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def ask(tokens: int, which: int) -> float:
            begun = time.monotonic()
            body = {
                "prompt": [9] * 8,
                "max_tokens": tokens,
                "ignore_eos": True,
                "priority": priorities[which],
            }
            reply = await http.post("/v1/completions", json=body, headers=headers[which])
            assert reply.status_code == 200, reply.text
            assert "x-ignored-params" not in reply.headers
            return time.monotonic() - begun

        long = asyncio.create_task(ask(150, 0))
        await asyncio.sleep(0.02)
        short = asyncio.create_task(ask(2, 1))
        return await long, await short


def test_an_urgent_request_does_not_wait_for_a_long_one(urgent: tuple[Running, Path]) -> None:
    running, trace = urgent
    long, short = asyncio.run(urgent_among(running.url, [{}, {}], [0, -1]))
    assert short < long
    metrics = running.metrics()
    assert any(name.startswith("octavo:recomputed_tokens_total") for name in metrics)
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    lines = [record for record in records if "arrival" in record]  # others are steps
    assert {(e["prompt"], e["output"], e["priority"]) for e in lines} >= {(8, 2, -1), (8, 150, 0)}
    assert all(e["arrival"] > 0 for e in lines), "the canary is no request"


class QuickAgeing(Priority):
    """A level is worth a twentieth of a second, in place of ten."""

    ageing = 0.05


@pytest.mark.parametrize(("level", "status"), [(4, 200), (200, 429)])
def test_a_later_level_is_served_if_ageing_takes_less_than_the_queue_timeout(
    tmp_path: Path, level: int, status: int
) -> None:
    """Against an endless stream of earlier ones: 4 levels are 0.2 s, 200 levels are 10 s."""
    engine = {"scheduling_policy": f"{__name__}:QuickAgeing", "max_num_seqs": 1}
    with server(tmp_path, engine=engine, queue_timeout=3.0) as running:

        async def run() -> httpx.Response:
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
                over = False

                async def ask(priority: int) -> httpx.Response:
                    body = {"prompt": [9] * 8, "max_tokens": 20, "ignore_eos": True}
                    return await http.post("/v1/completions", json={**body, "priority": priority})

                async def stream() -> None:
                    while not over:
                        await ask(0)

                # so many that some wait at every moment, also while this process is slow
                streams = [asyncio.create_task(stream()) for _ in range(8)]
                await asyncio.sleep(0.1)
                try:
                    return await ask(level)
                finally:
                    over = True
                    await asyncio.gather(*streams)

        reply = asyncio.run(run())
        assert reply.status_code == status, reply.text
        if status == 429:
            check_error(reply, 429, code="queue_timeout")


def test_a_key_sets_the_priority_and_a_request_may_only_lower_it(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    engine = {
        "scheduling_policy": "priority",
        "max_num_seqs": 1,
        "record_trace": str(tmp_path / "trace.jsonl"),
    }
    with server(tmp_path, engine=engine, keys_file=str(tmp_path / "keys.toml")) as running:
        slow, fast = (
            {"authorization": f"Bearer {name}-0123456789abcdef"} for name in ("slow", "fast")
        )
        body = {"prompt": [9] * 8, "max_tokens": 1, "priority": -1}
        check_error(
            running.post("/v1/completions", body, headers=slow),
            400,
            "priority",
            "param_out_of_range",
        )
        for headers, priority in ((slow, 2), (fast, 3)):
            fields = {**body, "priority": priority, "timeout": 50}
            assert running.post("/v1/completions", fields, headers=headers).status_code == 200
        lines = [
            json.loads(line)
            for line in (tmp_path / "trace.jsonl").read_text().splitlines()
            if "prompt" in line
        ]
        assert [(e["tenant"], e["priority"]) for e in lines] == [("slow", 2), ("fast", 3 - 7)]
        assert all(e["deadline"] == pytest.approx(e["arrival"] + 50) for e in lines)
