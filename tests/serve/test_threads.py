"""Threads that read texts: one that hangs or panics costs its own request an answer, and nobody else anything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from octavo.serve import threads as module
from octavo.serve.errors import ApiError
from octavo.serve.threads import Threads
from octavo.serve.tokenize import TextWorker
from tests.serve.running import Running, check_error, events, server
from tests.serve.test_streams import settled


class Panic(BaseException):
    """As native code raises it: no Exception."""


def panic() -> None:
    raise Panic("index out of bounds")


async def soon(threads: Threads, count: int = 3) -> list[int]:
    """What so many small pieces of work return, in less than a second."""
    async with asyncio.timeout(1):
        return await asyncio.gather(*(threads.run(lambda k=k: k) for k in range(count)))


def test_results_and_errors_come_back_in_their_own_place() -> None:
    async def run() -> None:
        threads = Threads(2, 5, "test")
        assert await soon(threads, 50) == list(range(50))
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
                await threads.run(panic)
        assert await soon(threads) == [0, 1, 2] and threads.lost == 0
        threads.close()

    asyncio.run(run())


def test_one_that_hangs_is_replaced_and_what_waits_behind_it_is_done() -> None:
    async def run() -> None:
        threads, over = Threads(2, 0.1, "test"), threading.Event()
        hanging = [asyncio.create_task(threads.run(over.wait)) for _ in range(4)]
        await asyncio.sleep(0)
        behind = asyncio.create_task(soon(threads))
        for task in hanging:
            with pytest.raises(ApiError) as caught:
                await task
            assert caught.value.status == 408 and caught.value.code == "text_timeout"
        assert await behind == [0, 1, 2] and threads.lost == 4
        over.set()
        while threads.lost:
            await asyncio.sleep(0.01)
        assert await soon(threads) == [0, 1, 2]
        assert len(threads._members) == 2, "those that came back have ended"
        threads.close()

    asyncio.run(run())


def test_who_left_does_not_hide_a_thread_that_hangs() -> None:
    async def run() -> None:
        threads, over = Threads(1, 0.1, "test"), threading.Event()
        task = asyncio.create_task(threads.run(over.wait))
        await asyncio.sleep(0.05)
        task.cancel()
        assert await soon(threads) == [0, 1, 2] and threads.lost == 1
        over.set()
        threads.close()

    asyncio.run(run())


def test_there_is_an_end_to_replacing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LOST", 3)

    async def run() -> None:
        threads, over = Threads(1, 0.02, "test"), threading.Event()
        for _ in range(3):
            with pytest.raises(ApiError, match="too long"):
                await threads.run(over.wait)
        with pytest.raises(ApiError) as caught:
            await threads.run(over.wait)
        assert caught.value.status == 503
        over.set()
        threads.close()

    asyncio.run(run())


def test_a_panic_over_a_short_text_is_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="Panic"):
        asyncio.run(TextWorker(1, 1.0).run(5, panic))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("faulty")
    with server(folder, faulty_text=True, limits={"text_seconds": 0.3}) as found:
        yield found


@pytest.mark.parametrize("length", [10, 600])
def test_a_tokenizer_that_panics(faulty: Running, length: int) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "PANIC".ljust(length)}),
        ("/tokenize", {"prompt": "PANIC".ljust(length)}),
    ):
        check_error(faulty.post(path, body), 500, code="internal_error")
    assert faulty.complete()["usage"]["completion_tokens"] == 4
    settled(faulty)


def test_tokenizers_that_hang_starve_nobody(faulty: Running) -> None:
    """More of them than there are threads, one after another."""
    for _ in range(4):
        begun = time.monotonic()
        check_error(
            faulty.post("/v1/completions", {"prompt": "HANG".ljust(600)}), 408, code="text_timeout"
        )
        assert time.monotonic() - begun < 1
    assert faulty.get("/livez").status_code == 200
    assert faulty.complete(prompt="x" * 700)["usage"]["completion_tokens"] == 4
    settled(faulty)


def test_text_that_cannot_be_made_of_tokens_ends_its_own_request_only(faulty: Running) -> None:
    """After 200 was sent it is a typed error in the stream, with the usage so far; others in the same step get their tokens."""
    body = {"prompt": [17, 17, 3], "max_tokens": 50, "ignore_eos": True, "temperature": 0}
    other = {**body, "prompt": [18, 18, 3]}
    alone = faulty.complete(**other)["choices"][0]["text"]

    async def both() -> list[str]:
        async with httpx.AsyncClient(base_url=faulty.url, timeout=30) as http:
            more = {"stream": True, "stream_options": {"include_usage": True}}
            bodies = [{**body, **more}, {**other, **more}] * 4
            return [
                r.text
                for r in await asyncio.gather(
                    *(http.post("/v1/completions", json=b) for b in bodies)
                )
            ]

    for k, text in enumerate(asyncio.run(both())):
        found = events(text)
        if k % 2:
            assert "".join(e["choices"][0]["text"] for e in found if e["choices"]) == alone
            continue
        assert (
            found[-1]["error"]["code"] == "internal_error"
            and found[-1]["error"]["type"] == "server_error"
        )
        assert found[-2]["usage"]["completion_tokens"] == 3 and "passwd" not in text
    check_error(faulty.post("/v1/completions", body), 500, code="internal_error")
    settled(faulty)
