"""Limits the cost of waiting requests: their memory, and the time that the last of them waits.

A request above a limit displaces a waiting request whose key has a lower priority, if there is one.
Otherwise it is refused at once, with the time after which the client should retry. A number of
requests says little about the cost: a GPU admits thousands of short requests within seconds. An
administrator may limit the number of requests and of prompt tokens nevertheless.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

from octavo.serve.api.api_errors import MAX_RETRY_AFTER, ApiError, queue_full

HALF_LIFE = 10.0  # The weight of a measurement halves in this many seconds.
MAX_RETRY_TIMES = 10_000
# The time between two admissions of waiting requests, until there is a measurement.
DEFAULT_SECONDS_PER_REQUEST = 0.05
# The share of refused clients that is assumed to retry. The value is low on purpose, because an
# empty queue costs more than a second refusal.
RETURNING_SHARE = 0.7
# The expected waiting time is used after requests have waited for this many seconds in total.
# Before that, the rate of admissions says little: a burst fills all batch slots at once.
MEASURED_SECONDS = 5.0
# The memory of a waiting request in both processes: its connection, its objects, and the copies of
# its prompt. docs/serving.md has the measurement.
REQUEST_BYTES = 32 * 2**10
TOKEN_BYTES = 96


class QueueLimits(NamedTuple):
    memory: int  # The bytes that the constants above estimate for the queue.
    seconds: float  # The expected waiting time of a new request.
    requests: int | None = None
    tokens: int | None = None  # The tokens of the requests' prompts.


class Waiting(Protocol):
    """The part of a call that this module uses."""

    key_priority: int

    def fail(self, error: ApiError) -> None: ...


class QueueBound:
    def __init__(self, limits: QueueLimits):
        self.limits = limits
        # request id -> (its call, number of tokens in its prompt)
        self.waiting: dict[str, tuple[Waiting, int]] = {}
        self.tokens = 0
        # While requests wait, the time at which the last one was admitted or the first one arrived.
        self._measured_at = 0.0
        # The time during which requests waited, and how many were admitted in it. Both decay.
        self._measured_seconds = 0.0
        self._measured_admissions = 0.0
        # The times at which refused clients should retry, in approximately ascending order.
        self._retry_times: deque[float] = deque()

    def check(self, requests: int, tokens: int, key_priority: int = 0, free: int = 0) -> None:
        """Raise queue_full if the queue has no room for these requests.

        Waiting requests of lower key priority are refused first to make room. `free` is the number
        of requests that the engine can admit at once.
        """
        while (excess := self._excess(requests, tokens, free)) is not None:
            victim = self._latest_below(key_priority)
            if victim is None:
                raise queue_full(excess, self.retry_after())
            victim.fail(queue_full("requests of higher priority arrived", self.retry_after()))

    def check_full(self, key_priority: int = 0, free: int = 0) -> None:
        """Raise queue_full if `check` would raise it for a request of one token.

        This method does not change the waiting requests.
        """
        excess = self._excess(1, 1, free)
        if excess is not None and self._latest_below(key_priority) is None:
            raise queue_full(excess, self.retry_after())

    def _excess(self, requests: int, tokens: int, num_free: int) -> str | None:
        """Return the content of the queue that leaves no room for these requests, in words.

        Returns None if there is room.
        """
        if not self.waiting:
            # An empty queue admits any request. Otherwise a batch above the limit could never run.
            return None
        limits = self.limits
        count = len(self.waiting) + requests
        if limits.requests is not None and count > limits.requests + num_free:
            return f"{len(self.waiting)} requests"
        if limits.tokens is not None and self.tokens + tokens > limits.tokens:
            return f"{self.tokens} prompt tokens"
        if count * REQUEST_BYTES + (self.tokens + tokens) * TOKEN_BYTES > limits.memory:
            return f"{len(self.waiting)} requests with {self.tokens} prompt tokens"
        if self._measured_seconds > MEASURED_SECONDS:
            seconds = (count - num_free) * self._seconds_per_request()
            if seconds > limits.seconds:
                return f"a request would wait for about {seconds:.0f} s"
        return None

    def _seconds_per_request(self) -> float:
        """Return the measured time between two admissions of waiting requests."""
        if not self._measured_admissions:
            return DEFAULT_SECONDS_PER_REQUEST
        return self._measured_seconds / self._measured_admissions

    def _latest_below(self, key_priority: int) -> Waiting | None:
        """Return the call of lower key priority that arrived last, or None."""
        for call, _ in reversed(self.waiting.values()):
            if call.key_priority < key_priority:
                return call
        return None

    def enter(self, request_id: str, call: Waiting, tokens: int) -> None:
        if not self.waiting:
            self._measured_at = time.monotonic()
        self.waiting[request_id] = (call, tokens)
        self.tokens += tokens

    def leave(self, request_id: str, admitted: bool) -> None:
        """Remove a request, because the engine has admitted it or because it was aborted.

        A request that does not wait is ignored.
        """
        entry = self.waiting.pop(request_id, None)
        if entry is None:
            return
        self.tokens -= entry[1]
        if admitted:
            now = time.monotonic()
            elapsed = now - self._measured_at
            self._measured_at = now
            decay = 0.5 ** (elapsed / HALF_LIFE)
            self._measured_seconds = self._measured_seconds * decay + elapsed
            self._measured_admissions = self._measured_admissions * decay + 1

    def retry_after(self) -> float:
        """Return the seconds after which a refused client should retry.

        At the measured rate, the engine should by then have admitted all waiting requests and the
        requests of clients that were refused earlier. So refused clients return one after another
        instead of all at once.
        """
        now = time.monotonic()
        while self._retry_times and self._retry_times[0] < now:
            self._retry_times.popleft()
        num_ahead = len(self.waiting) + RETURNING_SHARE * len(self._retry_times)
        delay = min(num_ahead * self._seconds_per_request(), MAX_RETRY_AFTER)
        if len(self._retry_times) < MAX_RETRY_TIMES:
            self._retry_times.append(now + delay)
        return delay
