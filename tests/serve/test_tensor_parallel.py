"""A server whose engine has several ranks: it serves, it survives the death of a rank, and it leaves
no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.serve.running import Running, alive, events, server
from tests.serve.test_lifecycle import gone, streams

TWO_RANKS = {"tensor_parallel_size": 2, "kv_cache_dtype": "float32"}


def ranks_of(running: Running) -> list[int]:
    """The rank processes. A thread of the engine has started them."""
    (engine,) = running.engines()
    threads = Path(f"/proc/{engine}/task").iterdir()
    found = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    return [pid for pid in found if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def await_rank(running: Running, seconds: float = 60) -> int:
    """The rank of a new engine process. The front may not have noticed yet that the old one died."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError, OSError):
            (rank,) = ranks_of(running)
            return rank
        time.sleep(0.05)
    raise AssertionError("no rank was started again")


@pytest.mark.slow
def test_a_killed_rank_is_named_and_all_ranks_are_restarted(tmp_path: Path) -> None:
    with server(tmp_path, engine=TWO_RANKS) as running:
        wanted = running.complete(max_tokens=16, temperature=0)["choices"][0]["text"]
        (engine,) = running.engines()
        (rank,) = ranks_of(running)
        killed_at = 0.0

        def kill() -> None:
            nonlocal killed_at
            killed_at = time.monotonic()
            os.kill(rank, signal.SIGKILL)

        with alive(running):
            texts = asyncio.run(streams(running, 8, kill))
            assert time.monotonic() - killed_at < 5
            assert gone(engine, 5)
            for text in texts:
                assert events(text)[-1]["error"]["code"] == "engine_restarting"
            running.wait("/readyz", 120)
        assert f"rank 1 (process {rank}) has ended: SIGKILL" in running.log.read_text()
        assert running.complete(max_tokens=16, temperature=0)["choices"][0]["text"] == wanted
        (new_rank,) = ranks_of(running)
        assert new_rank != rank

        # The same while the engine is idle.
        (engine,) = running.engines()
        os.kill(new_rank, signal.SIGKILL)
        assert gone(engine, 5)
        last_rank = await_rank(running)
        assert last_rank != new_rank
        running.wait("/readyz", 120)
        running.stop()
        assert gone(last_rank)
        assert not running.left_behind()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "front"])
def test_ranks_die_with_the_engine_and_with_the_front(tmp_path: Path, victim: str) -> None:
    with server(tmp_path, engine=TWO_RANKS) as running:
        (engine,) = running.engines()
        (rank,) = ranks_of(running)
        os.kill(engine if victim == "engine" else running.process.pid, signal.SIGKILL)
        assert gone(rank, 5)
        if victim == "engine":
            assert await_rank(running) != rank
        else:
            assert gone(engine, 5)
