"""Every new spec of structured output is tried in a worker process before the engine compiles it.

    if not trials.passed(spec, param):      raises ApiError; `param` names the client's field in it
        await trials.run(spec, param)       raises ApiError

Compiling runs native code on what a client wrote. A spec that crashes it, or takes too long or too
much memory, ends a worker process and costs nobody else anything. The verdict is remembered by the
spec, whatever prompt comes with it: one that passed is not tried again, one that failed is
quarantined, and refused at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from octavo.params import StructuredOutputs
from octavo.serve.api.api_errors import ApiError, api_error
from octavo.serve.channel.jobs import Compile
from octavo.serve.front.worker_pool import WorkerPool
from octavo.text.spec_errors import SPEC_NAMES, compilation_timed_out

log = logging.getLogger(__name__)
QUARANTINE = 600.0  # seconds
REMEMBERED = 16_384  # specs
HEAVY = 16 * 2**10  # characters: compiling a longer spec may take seconds
CRASHED = ("text_worker_crashed", "text_memory_exceeded")
LATE = "text_timeout"


@dataclass(frozen=True)
class Verdict:
    """What came of a trial. `error` is None if the spec passed."""

    error: ApiError | None
    until: float

    def check(self, param: str | None) -> None:
        """Raise the error anew: many requests may share a verdict."""
        error = self.error
        if error is not None:
            raise ApiError(
                error.status, error.message, error.code, param, retry_after=error.retry_after
            )


def fingerprint(spec: StructuredOutputs) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in spec.key:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return digest.digest()


class Trials:
    def __init__(
        self, pool: WorkerPool, seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        """`seconds`: how long one trial may take."""
        self._pool = pool
        self._seconds = seconds
        self._clock = clock
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # the latest used last
        self._running: dict[bytes, asyncio.Task[Verdict]] = {}

    def passed(self, spec: StructuredOutputs, param: str | None) -> bool:
        """Whether the spec passed a trial. Raises ApiError while it is quarantined."""
        mark = fingerprint(spec)
        verdict = self._verdicts.get(mark)
        if verdict is None:
            return False
        if verdict.error is not None and self._clock() >= verdict.until:
            del self._verdicts[mark]
            return False
        self._verdicts.move_to_end(mark)
        verdict.check(param)
        return True

    async def run(self, spec: StructuredOutputs, param: str | None) -> None:
        """Try a spec. Requests with the same spec wait for the same trial. Raises ApiError."""
        mark = fingerprint(spec)
        task = self._running.get(mark)
        if task is None:
            task = self._running[mark] = asyncio.create_task(self._try(mark, spec))
        (await asyncio.shield(task)).check(param)

    async def _try(self, mark: bytes, spec: StructuredOutputs) -> Verdict:
        heavy = len(spec.key[1]) > HEAVY
        error: ApiError | None = None
        try:
            await self._pool.run(Compile(spec), None, heavy=heavy, seconds=self._seconds)
        except ApiError as found:
            error = self._translate(spec, found)
        except Exception as found:
            log.exception("a trial of structured output failed")
            error = api_error(found)
        finally:
            del self._running[mark]
        verdict = Verdict(error, self._clock() + QUARANTINE)
        if error is None or error.status == 400:  # others are not the fault of the spec
            self._verdicts[mark] = verdict
            while len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        return verdict

    def _translate(self, spec: StructuredOutputs, error: ApiError) -> ApiError:
        """An error of the pool, in terms of structured output."""
        if error.code == LATE:
            return api_error(compilation_timed_out(spec, self._seconds))
        if error.code in CRASHED:
            return ApiError(
                400,
                f"{SPEC_NAMES[spec.kind]} cannot be used: compiling it crashed or took too much memory, simplify it",
                "invalid_structured_output",
            )
        return error
