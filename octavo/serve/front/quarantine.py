"""Quarantines a request that makes the engine fail, so that it cannot cause repeated failures.

At the first failure, every request that took part is recorded, and clients may retry all of them.
At the second failure, there are two cases. If a single request took part in more failures than all
others, it is the cause and is refused for QUARANTINE_SECONDS. If there are several such requests,
they are admitted one at a time, so that the next failure shows the cause.

A request that finishes without an error is removed from the records. Requests are recognised by a
hash of their prompt and parameters. The number of records is bounded, and they expire.
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

QUARANTINE_SECONDS = 600.0
MAX_RECORDS = 4096
QUARANTINED = 1 << 30  # A quarantined request has this number of failures.


def fingerprint(request: Request) -> bytes:
    digest = hashlib.blake2b(array("q", request.prompt).tobytes(), digest_size=16)
    digest.update(encode(request.params))
    return digest.digest()


class Quarantine:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        # fingerprint -> (number of failures, time at which the record expires)
        self.records: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def failures(self, request_hash: bytes) -> int:
        count, expiry = self.records.get(request_hash, (0, 0.0))
        return count if self.clock() < expiry else 0

    def check(self, requests: Iterable[Request], running: Iterable[Request]) -> None:
        """Raise ApiError if a request is quarantined, or must wait until others have finished."""
        if not self.records:
            return
        most_failures = max(
            (self.failures(fingerprint(request)) for request in requests), default=0
        )
        if most_failures >= QUARANTINED:
            raise api_errors.poisoned()
        if most_failures < 2:
            return
        if any(self.failures(fingerprint(request)) >= 2 for request in running):
            raise api_errors.tried_alone()

    def record_failure(self, requests: Iterable[Request]) -> set[bytes]:
        """Record a failure in which these requests took part.

        Returns the fingerprint of the request that is found to be the cause, or an empty set.
        """
        counts = {
            request_hash: self.failures(request_hash) for request_hash in map(fingerprint, requests)
        }
        most_failures = max(counts.values(), default=0)
        candidates = [
            request_hash for request_hash, count in counts.items() if count == most_failures
        ]
        quarantined: set[bytes] = set()
        if most_failures >= 1 and len(candidates) == 1:
            quarantined = set(candidates)
        expiry = self.clock() + QUARANTINE_SECONDS
        for request_hash, count in counts.items():
            new_count = QUARANTINED if request_hash in quarantined else count + 1
            self.records[request_hash] = (new_count, expiry)
            self.records.move_to_end(request_hash)
        while len(self.records) > MAX_RECORDS:
            self.records.popitem(last=False)
        return quarantined

    def clear(self, request: Request) -> None:
        """Remove the record of a request that has finished without an error."""
        if self.records:
            self.records.pop(fingerprint(request), None)
