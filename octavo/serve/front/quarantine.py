"""Requests that were there when a step failed or the engine died, so that one that kills it is not tried for ever.

    first failure     everything that was in it is suspected; trying again is free
    second            what alone had been suspected before is the cause, and refused for a while (BLOCKED)
                      if there are several of those, they are let in one at a time from now on: the next failure tells

A request that ends well is no longer suspected. Known by a hash of prompt and parameters; bounded, and forgotten with time.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

from octavo.serve.api import api_errors
from octavo.serve.channel.messages import encode
from octavo.types import Request

BLOCKED = 600.0  # seconds
REMEMBERED = 4096
GUILTY = 1 << 30  # failures, as it were


def fingerprint(request: Request) -> bytes:
    digest = hashlib.blake2b(array("q", request.prompt).tobytes(), digest_size=16)
    digest.update(encode(request.params))
    return digest.digest()


class Suspects:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        # failures it was in, until when that counts
        self.known: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def failures(self, mark: bytes) -> int:
        count, until = self.known.get(mark, (0, 0.0))
        return count if self.clock() < until else 0

    def check(self, requests: Iterable[Request], running: Iterable[Request]) -> None:
        """Raise for a request that may not run, or not beside those that run now."""
        if not self.known:
            return
        worst = max((self.failures(fingerprint(r)) for r in requests), default=0)
        if worst >= GUILTY:
            raise api_errors.poisoned()
        if worst >= 2 and any(self.failures(fingerprint(r)) >= 2 for r in running):
            raise api_errors.tried_alone()

    def blame(self, requests: Iterable[Request]) -> set[bytes]:
        """A failure hit these. Returns the marks of what is found to be its cause."""
        before = {mark: self.failures(mark) for mark in map(fingerprint, requests)}
        most = max(before.values(), default=0)
        worst = [mark for mark, count in before.items() if count == most]
        guilty = set(worst) if most >= 1 and len(worst) == 1 else set()
        until = self.clock() + BLOCKED
        for mark, count in before.items():
            self.known[mark] = (GUILTY if mark in guilty else count + 1), until
            self.known.move_to_end(mark)
        while len(self.known) > REMEMBERED:
            self.known.popitem(last=False)
        return guilty

    def acquit(self, request: Request) -> None:
        """It ended well."""
        if self.known:
            self.known.pop(fingerprint(request), None)
