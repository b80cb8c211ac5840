"""What is logged when the event loop is blocked."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from octavo.serve.front.loop_watchdog import WARNING_SECONDS, LoopWatchdog
from octavo.serve.front.metrics import Metrics


def blocked(clients: int) -> LoopWatchdog:
    found = LoopWatchdog(lambda: clients)
    found.last_tick -= WARNING_SECONDS + 1
    return found


def test_a_blocked_loop_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = blocked(clients=1)
    watchdog.check()
    watchdog.check()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "blocked for 1.9 s" in record.getMessage()
    assert "thread" not in record.getMessage(), "stacks are for those who ask for them"


def test_without_clients_there_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    blocked(clients=0).check()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def hold_the_interpreter(released: threading.Event) -> None:
    released.wait(10)


def test_the_log_shows_what_other_threads_do(caplog: pytest.LogCaptureFixture) -> None:
    """Native code that keeps the interpreter lock blocks the loop from another thread."""
    released = threading.Event()
    thread = threading.Thread(target=hold_the_interpreter, args=(released,), name="worker")
    thread.start()
    caplog.set_level(logging.INFO)
    try:
        blocked(clients=1).check()
    finally:
        released.set()
        thread.join()
    assert "thread worker" in caplog.text and "hold_the_interpreter" in caplog.text
    assert "in check" not in caplog.text, "not the watchdog's own stack"


def test_time_before_the_loop_ran_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = blocked(clients=1)

    async def run() -> None:
        task = asyncio.create_task(watchdog.run(Metrics("octavo", "tiny")))
        await asyncio.sleep(0.5)
        task.cancel()

    begun = time.monotonic()
    asyncio.run(run())
    if time.monotonic() - begun < 1:
        assert "blocked" not in caplog.text
