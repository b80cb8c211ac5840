"""Compiles every new spec of structured output as a trial before the engine compiles it.

    if not trials.passed(spec, param):
        await trials.run(spec, param)

Both methods raise ApiError if the spec failed. `param` is the field of the request that the error
names. A trial runs in a worker process, because compiling runs native code on untrusted input. A
spec that crashes the compiler, or needs too much time or memory, ends only a worker process. The
result is remembered for the spec: a spec that passed is not tried again, and a spec that failed is
quarantined and refused at once.
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
QUARANTINE_SECONDS = 600.0  # A spec that failed is refused for this time.
MAX_VERDICTS = 16_384  # The number of specs whose results are remembered.
HEAVY_CHARACTERS = 16 * 2**10  # Compiling a spec with more characters may take seconds.
CRASH_CODES = ("text_worker_crashed", "text_memory_exceeded")
TIMEOUT_CODE = "text_timeout"


@dataclass(frozen=True)
class Verdict:
    """The result of a trial. `error` is None if the spec passed."""

    error: ApiError | None
    expires: float  # A quarantined spec may be tried again at this time.

    def check(self, param: str | None) -> None:
        """Raise a copy of the error, because many requests may share a verdict."""
        error = self.error
        if error is not None:
            raise ApiError(
                error.status, error.message, error.code, param, retry_after=error.retry_after
            )


def fingerprint(spec: StructuredOutputs) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in spec.key:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(encoded) + encoded)
    return digest.digest()


class Trials:
    def __init__(
        self, pool: WorkerPool, seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        """Create the object. `seconds` limits the time of one trial."""
        self._pool = pool
        self._seconds = seconds
        self._clock = clock
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # In order of last use.
        self._running: dict[bytes, asyncio.Task[Verdict]] = {}

    def passed(self, spec: StructuredOutputs, param: str | None) -> bool:
        """Return whether the spec passed a trial. Raises ApiError while it is quarantined."""
        spec_hash = fingerprint(spec)
        verdict = self._verdicts.get(spec_hash)
        if verdict is None:
            return False
        if verdict.error is not None and self._clock() >= verdict.expires:
            del self._verdicts[spec_hash]
            return False
        self._verdicts.move_to_end(spec_hash)
        verdict.check(param)
        return True

    async def run(self, spec: StructuredOutputs, param: str | None) -> None:
        """Run a trial. Requests with the same spec share one trial. Raises ApiError if it fails."""
        spec_hash = fingerprint(spec)
        task = self._running.get(spec_hash)
        if task is None:
            task = self._running[spec_hash] = asyncio.create_task(self._try(spec_hash, spec))
        (await asyncio.shield(task)).check(param)

    async def _try(self, spec_hash: bytes, spec: StructuredOutputs) -> Verdict:
        heavy = len(spec.key[1]) > HEAVY_CHARACTERS
        error: ApiError | None = None
        try:
            await self._pool.run(Compile(spec), None, heavy=heavy, seconds=self._seconds)
        except ApiError as failure:
            error = self._translate(spec, failure).forget()
        except Exception as failure:
            log.exception("a trial compilation of structured output failed unexpectedly")
            error = api_error(failure)
        finally:
            del self._running[spec_hash]
        verdict = Verdict(error, self._clock() + QUARANTINE_SECONDS)
        if error is None or error.status == 400:  # Other errors are not caused by the spec.
            self._verdicts[spec_hash] = verdict
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _translate(self, spec: StructuredOutputs, error: ApiError) -> ApiError:
        """Return an error of the worker pool as an error about structured output."""
        if error.code == TIMEOUT_CODE:
            return api_error(compilation_timed_out(spec, self._seconds))
        if error.code in CRASH_CODES:
            return ApiError(
                400,
                f"{SPEC_NAMES[spec.kind]} cannot be used, because compiling it crashed or needed "
                "too much memory: simplify it",
                "invalid_structured_output",
            )
        return error
