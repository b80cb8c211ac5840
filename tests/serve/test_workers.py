"""Worker processes: one that hangs, crashes or takes too much memory fails its own job, and nobody
else notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from octavo.params import StructuredOutputs
from octavo.serve.api.api_errors import ApiError
from octavo.serve.channel.jobs import Compile, Encode, Encoded, Setup, unpack
from octavo.serve.front import worker_pool
from octavo.serve.front.worker_pool import WorkerPool
from octavo.serve.limits import Limits
from octavo.text.tokenizer import Tokenizer
from tests import tiny
from tests.serve.running import Running, check_error, events, server
from tests.serve.test_streams import settled

FAULTY = (sys.executable, "-m", "tests.serve.faulty_worker")
TEXT = "a text that is not short"


def setup(**limits: Any) -> Setup:
    return Setup(
        tokenizer_directory=str(tiny.model_dir()),
        tokenizer_gguf=None,
        chat_template=None,
        vocab_size=512,
        max_model_len=1024,
        limits=Limits(**limits),
    )


@contextlib.asynccontextmanager
async def running(count: int = 1, seconds: float = 10, **limits: Any) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(count, seconds, FAULTY)
    pool.start(setup(**limits))
    try:
        yield pool
    finally:
        await pool.close()


def in_pool(
    test: Callable[[WorkerPool], Awaitable[None]],
    count: int = 1,
    seconds: float = 10,
    **limits: Any,
) -> None:
    async def run() -> None:
        async with running(count, seconds, **limits) as pool:
            while not pool._idle:
                await asyncio.sleep(0.01)
            await test(pool)

    asyncio.run(run())


async def encode(pool: WorkerPool, text: str = TEXT, **options: Any) -> list[int]:
    (found,) = await pool.run(Encode([text], context=10**6), list[Encoded], **options)
    return unpack(found.ids)


async def refusal(pool: WorkerPool, text: str, **options: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await encode(pool, text, **options)
    return caught.value


def expected(text: str = TEXT) -> list[int]:
    return Tokenizer.from_directory(tiny.model_dir()).encode(text)


def test_each_job_gets_its_own_result_or_error() -> None:
    async def test(pool: WorkerPool) -> None:
        texts = [f"text number {k}" for k in range(50)]
        found = await asyncio.gather(*(encode(pool, text) for text in texts))
        assert found == [expected(text) for text in texts]
        error = await refusal(pool, "REFUSE")
        assert (error.status, error.code, error.param) == (400, "refused", "prompt")
        with pytest.raises(RuntimeError, match="Panic") as caught:
            await encode(pool, "PANIC")
        assert "passwd" not in str(caught.value)
        assert await encode(pool) == expected()
        assert not pool.replaced

    in_pool(test, count=2)


@pytest.mark.parametrize(
    ("text", "status", "code", "reason"),
    [
        ("HANG", 408, "text_timeout", "timeout"),
        ("CRASH", 400, "text_worker_crashed", "crash"),
        ("MEMORY", 400, "text_memory_exceeded", "memory"),
    ],
)
def test_a_job_that_ends_its_worker_fails_alone(
    text: str, status: int, code: str, reason: str
) -> None:
    async def test(pool: WorkerPool) -> None:
        jobs = [encode(pool), encode(pool, text, seconds=1), *(encode(pool) for _ in range(5))]
        before, error, *behind = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(error, ApiError)
        assert (error.status, error.code) == (status, code)
        assert [before, *behind] == [expected()] * 6
        assert pool.replaced == {reason: 1}

    in_pool(test)


def test_a_worker_that_keeps_memory_is_replaced_and_its_job_is_not_lost() -> None:
    async def test(pool: WorkerPool) -> None:
        assert await encode(pool, "KEEP") == expected("KEEP")
        assert await encode(pool) == expected()
        assert pool.replaced == {"memory": 1}

    in_pool(test)


@pytest.mark.parametrize("busy", [True, False])
def test_a_worker_killed_from_outside_is_replaced(busy: bool) -> None:
    async def test(pool: WorkerPool) -> None:
        hanging = asyncio.create_task(refusal(pool, "HANG")) if busy else None
        await asyncio.sleep(0)
        (worker,) = pool._workers
        os.kill(worker.process.pid, signal.SIGKILL)
        while worker in pool._workers:
            await asyncio.sleep(0.01)
        assert await encode(pool) == expected()
        assert pool.replaced["crash"] == busy
        assert hanging is None or (await hanging).code == "text_worker_crashed"

    in_pool(test)


def test_heavy_jobs_leave_one_worker_to_the_others() -> None:
    async def test(pool: WorkerPool) -> None:
        heavy = [asyncio.create_task(refusal(pool, "HANG", heavy=True)) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(encode(pool), 3) == expected()
        assert not any(task.done() for task in heavy)
        for task in heavy:
            task.cancel()

    in_pool(test, count=2)


def test_the_queue_is_bounded_in_length_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MAX_QUEUED_JOBS", 2)
    monkeypatch.setattr(worker_pool, "QUEUE_SECONDS", 0.3)

    async def test(pool: WorkerPool) -> None:
        hanging = asyncio.create_task(refusal(pool, "HANG", seconds=60))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(refusal(pool, TEXT)) for _ in range(2)]
        await asyncio.sleep(0)
        error = await refusal(pool, TEXT)
        assert (error.status, error.code) == (503, "text_workers_busy")
        assert [(await task).code for task in waiting] == ["text_workers_busy"] * 2
        hanging.cancel()

    in_pool(test)


def test_a_caller_that_leaves_does_not_hide_a_job_that_hangs() -> None:
    async def test(pool: WorkerPool) -> None:
        task = asyncio.create_task(encode(pool, "HANG", seconds=0.2))
        await asyncio.sleep(0.05)
        task.cancel()
        assert await encode(pool) == expected()
        assert pool.replaced == {"timeout": 1}

    in_pool(test)


def test_a_worker_that_cannot_be_set_up_is_tried_again() -> None:
    async def run() -> None:
        pool = WorkerPool(1, 10, (sys.executable, "-c", "import sys; sys.exit(1)"))
        pool.start(setup())
        waiting = asyncio.create_task(encode(pool))
        await asyncio.sleep(0.3)
        pool.command = FAULTY
        assert await waiting == expected()
        await pool.close()

    asyncio.run(run())


def test_closing_ends_every_process_and_every_job() -> None:
    async def run() -> None:
        async with running(count=2) as pool:
            await encode(pool)
            tasks = [asyncio.create_task(refusal(pool, "HANG")) for _ in range(4)]
            await asyncio.sleep(0.1)
            pids = [worker.process.pid for worker in pool._workers]
        assert [(await task).code for task in tasks] == ["draining"] * 4
        for pid in pids:
            with contextlib.suppress(FileNotFoundError):
                assert ") Z " in Path(f"/proc/{pid}/stat").read_text()

    asyncio.run(run())


def test_a_specification_is_compiled_on_trial() -> None:
    async def test(pool: WorkerPool) -> None:
        assert await pool.run(Compile(StructuredOutputs(regex="[ab]+")), None) is None
        with pytest.raises(ApiError, match="regex") as caught:
            await pool.run(Compile(StructuredOutputs(regex="[ab")), None)
        assert (caught.value.status, caught.value.code) == (400, "invalid_structured_output")

    in_pool(test)


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


def test_tokenizers_that_hang_do_not_block_other_jobs(faulty: Running) -> None:
    for _ in range(4):
        begun = time.monotonic()
        check_error(
            faulty.post("/v1/completions", {"prompt": "HANG".ljust(600)}), 408, code="text_timeout"
        )
        assert time.monotonic() - begun < 5
    assert faulty.get("/livez").status_code == 200
    assert faulty.complete(prompt="x" * 700)["usage"]["completion_tokens"] == 4
    settled(faulty)


def test_text_that_cannot_be_made_of_tokens_ends_its_own_request_only(faulty: Running) -> None:
    """After 200 was sent it is a typed error in the stream, with the usage so far; others in the
    same step get their tokens."""
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
