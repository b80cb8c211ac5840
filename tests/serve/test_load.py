"""More work than fits: what is refused, when to come back, and that what was let in is served."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.queue_bound import REQUEST_BYTES, TOKEN_BYTES, QueueBound, QueueLimits
from octavo.serve.serve_config import ServeConfig
from tests.serve.running import NAME, Running, check_error, events, http_request, server

BUSY = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True}


class Owner:
    def __init__(self, priority: int = 0):
        self.key_priority, self.error = priority, None

    def fail(self, error: ApiError) -> None:
        self.error = error


# ---- the queue -----------------------------------------------------------------------------------


def bounded(requests: int | None = None, tokens: int | None = None) -> QueueBound:
    return QueueBound(QueueLimits(2**40, 1e9, requests, tokens))


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    queue = bounded(requests=3, tokens=100)
    for k, tokens in enumerate((40, 40)):
        queue.check(1, tokens)
        queue.enter(str(k), Owner(), tokens)
    with pytest.raises(ApiError, match="80 prompt tokens") as caught:
        queue.check(1, 40)
    assert (
        caught.value.status == 429
        and caught.value.code == "queue_full"
        and caught.value.type == "overloaded_error"
    )
    queue.check(1, 20)
    queue.enter("2", Owner(), 20)
    with pytest.raises(ApiError, match="3 requests"):
        queue.check(1, 0)
    queue.leave("0", admitted=True)
    queue.check(1, 40)


def test_the_queue_is_bounded_by_memory() -> None:
    queue = QueueBound(QueueLimits(10 * REQUEST_BYTES + 10_000 * TOKEN_BYTES, 60.0))
    for k in range(5):
        queue.check(1, 1000)
        queue.enter(str(k), Owner(), 1000)
    queue.check(1, 5000)
    with pytest.raises(ApiError, match="5 requests with 5000 prompt tokens") as caught:
        queue.check(1, 50_000)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    with pytest.raises(ApiError, match="5 requests with 5000 prompt tokens"):
        queue.check(50, 50)


def test_the_queue_is_bounded_by_the_expected_waiting_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    queue = QueueBound(QueueLimits(2**40, 60.0))
    for k in range(2000):  # a burst, of which nothing is known yet
        queue.check(1, 10)
        queue.enter(str(k), Owner(), 10)
    for k in range(1000):  # ten requests in a second
        now += 0.1
        queue.leave(str(k), admitted=True)
    with pytest.raises(ApiError, match="would wait for about 100 s") as caught:
        queue.check(1, 10)
    assert caught.value.code == "queue_full" and caught.value.retry_after == pytest.approx(100, 0.1)
    queue.check(1, 10, free=500)
    for k in range(1000, 1500):
        now += 0.1
        queue.leave(str(k), admitted=True)
    queue.check(1, 10)


def test_the_default_limits_accept_a_burst_of_2000_short_requests() -> None:
    config = ServeConfig()
    queue = QueueBound(QueueLimits(config.max_queue_memory, config.queue_timeout))
    for k in range(2000):
        queue.check(1, 500)
        queue.enter(str(k), Owner(), 500)
    assert config.limits.connections_per_address > 2000
    assert config.limits.connections_per_key > 2000


def test_a_full_queue_is_known_before_the_request_is_read() -> None:
    queue = bounded(requests=2, tokens=100)
    queue.enter("0", Owner(), 100)
    with pytest.raises(ApiError, match="100 prompt tokens") as caught:
        queue.check_full()
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    queue.leave("0", admitted=True)
    owners = [Owner(), Owner()]
    for k, owner in enumerate(owners):
        queue.check_full()
        queue.enter(str(k), owner, 1)
    with pytest.raises(ApiError, match="2 requests"):
        queue.check_full()
    queue.check_full(free=1)
    queue.check_full(key_priority=1)
    assert not any(owner.error for owner in owners), "nothing is refused for a body not read yet"


def test_requests_with_a_free_slot_do_not_count_as_waiting() -> None:
    queue = bounded(requests=2, tokens=100)
    for k in range(5):
        queue.check(1, 1, free=3)  # not yet told that any of them has begun
        queue.enter(str(k), Owner(), 1)
    with pytest.raises(ApiError, match="5 requests"):
        queue.check(1, 1, free=3)


def test_alone_any_request_may_wait() -> None:
    bounded(1, 10).check(1, 1000)
    bounded(1, 10).check(1000, 1000)  # a batch of prompts


def test_a_higher_priority_pushes_out_the_youngest_lower_one() -> None:
    queue = bounded(2, 1000)
    first, second = Owner(), Owner()

    def fail(error: ApiError) -> None:
        second.error = error  # type: ignore[assignment]
        queue.leave("2", admitted=False)

    second.fail = fail  # type: ignore[method-assign]
    queue.enter("1", first, 1)
    queue.enter("2", second, 1)
    with pytest.raises(ApiError):
        queue.check(1, 1, key_priority=0)
    queue.check(1, 1, key_priority=5)
    assert first.error is None and second.error is not None and second.error.code == "queue_full"


def test_when_to_come_back_follows_the_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    queue = bounded()
    for k in range(50):
        queue.enter(str(k), Owner(), 1)
    for k in range(30):  # ten a second
        now += 0.1
        queue.leave(str(k), admitted=True)
    assert [queue.retry_after() for _ in range(3)] == pytest.approx([2.0, 2.07, 2.14], rel=0.01), (
        "one after another"
    )
    now += 2.05
    assert queue.retry_after() == pytest.approx(2.14, rel=0.01), "the first of them came back"
    for k in range(30, 50):
        queue.leave(str(k), admitted=False)
    now += 1000
    queue.enter("later", Owner(), 1)
    assert queue.retry_after() == pytest.approx(0.1, rel=0.01), (
        "they are forgotten; and time in which nobody waited does not count"
    )


# ---- a server of two rows and a queue of four ----------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    engine = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 40,
        "max_model_len": 1024,
    }
    with server(
        tmp_path_factory.mktemp("small"),
        engine=engine,
        max_queue=4,
        queue_timeout=1.0,
        request_timeout=20.0,
    ) as found:
        yield found


async def post_all(small: Running, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(
        base_url=small.url, timeout=60, limits=httpx.Limits(max_connections=None)
    ) as http:
        return list(
            await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        )


def test_a_burst_of_ten_times_what_fits(small: Running) -> None:
    """Some are served, the rest is told when to come back; nothing fails."""
    body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    alone = small.complete(**body)["choices"][0]["text"]
    replies = asyncio.run(post_all(small, [body] * 60))
    codes = Counter(r.status_code for r in replies)
    assert set(codes) == {200, 429} and codes[200] >= 4, codes
    for reply in replies:
        if reply.status_code == 429:
            error = check_error(reply, 429, code="queue_full")
            assert error["type"] == "overloaded_error"
            assert (
                0 < int(reply.headers["retry-after-ms"]) <= 120_000
                and 1 <= int(reply.headers["retry-after"]) <= 120
            )
        else:
            assert reply.json()["choices"][0]["text"] == alone
    assert small.metrics()['octavo:rejections_total{reason="queue_full"}'] == codes[429]
    begun = time.monotonic()
    small.complete()
    assert time.monotonic() - begun < 1, "recovered"


def test_a_burst_that_rows_and_queue_hold_is_taken(small: Running) -> None:
    replies = asyncio.run(
        post_all(small, [{"prompt": "hello", "max_tokens": 2, "ignore_eos": True}] * 6)
    )
    assert [r.status_code for r in replies] == [200] * 6


def test_openai_python_retries_by_itself(small: Running) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{small.url}/v1", api_key="x", max_retries=20
        ) as client:
            calls = (
                client.completions.create(model=NAME, prompt="hello", max_tokens=10, temperature=0)
                for _ in range(16)
            )
            return [reply.choices[0].text for reply in await asyncio.gather(*calls)]

    assert len(set(asyncio.run(run()))) == 1


def test_too_long_in_the_queue(small: Running) -> None:
    async def run() -> list[httpx.Response]:
        return await post_all(small, [BUSY] * 2 + [{**BUSY, "max_tokens": 1}] * 2)

    replies = asyncio.run(run())
    late = [r for r in replies if r.status_code != 200]
    for reply in late:
        check_error(reply, 429, code="queue_timeout")
        assert "retry-after" in reply.headers
    # two rows are taken for as long as the two long ones last: on a quick machine that may be less
    # than the second
    assert sorted(r.status_code for r in replies)[:2] == [200, 200]
    assert small.metrics()["octavo:num_requests_waiting"] == 0


def test_too_long_in_total(small: Running) -> None:
    for options in (
        {"json": {**BUSY, "timeout": 0.1}},
        {"json": BUSY, "headers": {"x-request-timeout": "0.1"}},
    ):
        begun = time.monotonic()
        reply = small.http.post("/v1/completions", **options)
        error = check_error(reply, 504, code="deadline_exceeded")
        assert error["type"] == "timeout_error" and time.monotonic() - begun < 1
    found = events(small.post("/v1/completions", {**BUSY, "timeout": 0.2, "stream": True}).text)
    assert found[-1]["error"]["code"] == "deadline_exceeded" and len(found) > 1, (
        "what came before it was sent"
    )


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "0", "1e9", "1_0", "+1", "1e1"])
def test_a_bad_timeout_header(small: Running, value: str) -> None:
    check_error(
        small.post("/v1/completions", BUSY, headers={"x-request-timeout": value}), 400, "timeout"
    )


def test_a_request_that_can_never_fit_is_refused_at_once(small: Running) -> None:
    """The context would hold it, the KV pool would not, even when empty."""
    reply = small.post("/v1/completions", {"prompt": [1] * 700})
    check_error(reply, 400, "prompt", "kv_capacity_exceeded")
    reply = small.post(
        "/v1/completions", {"prompt": [1] * 600, "max_tokens": 500, "ignore_eos": True}
    )
    assert (
        reply.json()["usage"]["completion_tokens"] == 41 and reply.headers["x-max-tokens"] == "41"
    )


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1000}])
def test_a_reply_that_the_pool_limits_says_so(small: Running, fields: dict[str, Any]) -> None:
    """It ends with `length` in any case: the headers tell the pool's limit from the client's."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "ignore_eos": True, **fields}
    reply = small.post("/v1/chat/completions", body)
    count = reply.json()["usage"]["completion_tokens"]
    assert reply.json()["choices"][0]["finish_reason"] == "length" and count < 1000
    assert reply.headers["x-max-tokens"] == str(count)
    assert reply.headers["x-max-tokens-limit"] == "kv_pool"
    limited = small.post("/v1/chat/completions", {**body, "max_tokens": 5})
    assert "x-max-tokens" not in limited.headers


def test_where_the_context_is_the_limit_the_pool_is_not_named(running: Running) -> None:
    body = {"prompt": [5] * 1000, "max_tokens": 100, "ignore_eos": True}
    reply = running.post("/v1/completions", body)
    assert reply.headers["x-max-tokens"] == "24" and "x-max-tokens-limit" not in reply.headers


def test_a_full_pool_goes_on(small: Running) -> None:
    """Two sequences that together outgrow the pool: one gives way, and both end with the tokens
    they have alone."""
    bodies = [
        {"prompt": [k] * 30, "max_tokens": 500, "ignore_eos": True, "temperature": 0}
        for k in (1, 2)
    ]
    alone = [small.complete(**b)["choices"][0]["text"] for b in bodies]
    together = asyncio.run(post_all(small, bodies))
    assert [r.json()["choices"][0]["text"] for r in together] == alone
    assert small.metrics()["octavo:num_preemptions_total"] > 0


@pytest.mark.slow
def test_a_minute_of_ten_times_overload(tmp_path: Path) -> None:
    """No 5xx, goodput near the peak, memory flat."""
    engine = {"max_num_seqs": 16}
    with server(tmp_path, engine=engine, max_queue=32) as front:

        async def load(clients: int, seconds: float) -> tuple[Counter[int], int]:
            codes: Counter[int] = Counter()
            tokens = 0
            end = time.monotonic() + seconds
            body = http_request(
                "/v1/completions", b'{"prompt": "hello", "max_tokens": 30, "ignore_eos": true}'
            )

            async def client() -> None:
                nonlocal tokens
                reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
                while time.monotonic() < end:
                    writer.write(body)
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                    reply = json.loads(
                        await reader.readexactly(int(re.findall(r"content-length: (\d+)", head)[0]))
                    )
                    status = int(head[9:12])
                    codes[status] += 1
                    if status == 200:
                        tokens += reply["usage"]["completion_tokens"]
                    else:
                        await asyncio.sleep(
                            int(re.findall(r"retry-after-ms: (\d+)", head)[0]) / 1000
                        )
                writer.close()

            # httpx would do, but with 480 connections it takes more time than the server
            await asyncio.gather(*(client() for _ in range(clients)))
            return codes, tokens

        def rss() -> int:
            return int(Path(f"/proc/{front.process.pid}/statm").read_text().split()[1]) * 4096

        asyncio.run(load(48, 5))
        peak = asyncio.run(load(48, 10))[1]
        before = rss()
        codes, tokens = asyncio.run(load(480, 60))
        assert set(codes) == {200, 429}, codes
        assert rss() - before < 20 * 2**20, (before, rss())
        # before and after: other work on the machine comes and goes
        peak += asyncio.run(load(48, 10))[1]
        assert tokens / 60 >= 0.9 * peak / 20, (tokens / 60, peak / 20)
