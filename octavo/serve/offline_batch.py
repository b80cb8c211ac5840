"""Runs a file of requests with an engine process and the HTTP application, but without a port.

Replies are appended to FILE.partial, which is copied to FILE at the end. A run that was interrupted
continues with the requests that have no reply in FILE.partial.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelError
from octavo.serve.api.batch_lines import LineError, completed_ids, error_line, lines_of
from octavo.serve.endpoints.application import RouteTable
from octavo.serve.endpoints.batch_runner import LineRunner, requests_of, run_lines
from octavo.serve.front.front import Front
from octavo.serve.serve_config import ServeConfig


@dataclass
class BatchProgress:
    """The progress of a run."""

    total: int = 0
    done: int = 0  # Requests with a reply, including the replies of an earlier run.
    failed: int = 0  # Requests of this run that failed.
    earlier: int = 0  # Replies of an earlier run.
    invalid: int = 0  # Lines of this run that are not valid requests.


async def run_file(
    config: ServeConfig,
    source: Path,
    target: Path,
    report: Callable[[str, BatchProgress], None],
) -> BatchProgress:
    """Run the requests of `source`, and write the lines of their replies to `target`.

    `report` is called repeatedly with the phase of the engine and the progress.
    """
    progress = BatchProgress(total=sum(1 for _ in lines_of(source)))
    partial = target.with_name(target.name + ".partial")
    done = completed_ids(partial)
    progress.earlier = progress.done = len(done)
    front = Front(config)
    supervisor = front.engine_client.supervisor
    engine = asyncio.create_task(supervisor.run())
    try:
        while not front.engine_client.ready:
            report(supervisor.phase, progress)
            if engine.done():
                engine.result()
                raise ModelError("the engine process has ended before it was ready")
            await asyncio.sleep(0.05)
        with partial.open("ab", buffering=0) as file:

            def write(line: bytes, succeeded: bool) -> None:
                file.write(line)
                progress.done += 1
                progress.failed += not succeeded
                report("running", progress)

            def refuse(error: LineError) -> None:
                message = f"line {error.number}: {error}"
                name = error.custom_id or f"line-{error.number}"
                if name not in done:
                    progress.invalid += 1
                    write(error_line(name, "invalid_line", message), False)

            runner = LineRunner(front, RouteTable(front), config.batch_concurrency)
            lines = requests_of(source, None, done, refuse)
            await run_lines(runner, lines, None, write)
    finally:
        await supervisor.stop()
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        front.files.close()
        await front.pool.close()
    # Writing into an existing file serves programs that have opened it. If this is interrupted,
    # FILE.partial remains, and the next run copies it again.
    with partial.open("rb") as finished, target.open("wb") as replies:
        shutil.copyfileobj(finished, replies)
    partial.unlink()
    return progress
