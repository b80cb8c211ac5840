"""How much may wait: a bound on requests and one on the tokens of their prompts, and when it is worth coming back.

Knows who waits, not why. Beyond the bound a request is refused at once, unless it may push out one of lower priority.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from octavo.serve.api.api_errors import MAX_RETRY_AFTER, ApiError, queue_full

HALF_LIFE = 10.0  # seconds after which a measurement counts half
MAX_TOLD = 10_000
# somewhat sooner than needed: not all come back, and a queue that runs empty costs more than a
# refusal
EAGER = 0.7


class Waiting(Protocol):
    """What the queue knows of a call."""

    priority: int

    def fail(self, error: ApiError) -> None: ...


class Queue:
    def __init__(self, max_requests: int, max_tokens: int):
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.waiting: dict[str, tuple[Waiting, int]] = {}  # request id -> whose it is, tokens
        self.tokens = 0
        self._since = 0.0  # while somebody waits: when the last one began, or the first came
        # time in which somebody waited, and how many began in it; older counts less
        self._seconds = 0.0
        self._begun = 0.0
        # when those who were turned away should come back, about in order
        self._told: deque[float] = deque()

    def check(self, requests: int, tokens: int, priority: int = 0, free: int = 0) -> None:
        """Raise queue_full if so much more cannot wait, after refusing waiting requests of lower priority. `free`: so many will
        have a row as soon as the engine looks."""
        while (what := self._excess(requests, tokens, free)) is not None:
            youngest = self._youngest_below(priority)
            if youngest is None:
                raise queue_full(what, self.retry_after())
            youngest.fail(queue_full("requests of higher priority came", self.retry_after()))

    def check_full(self, priority: int = 0, free: int = 0) -> None:
        """Raise queue_full if `check` would for a request of one token. Changes nothing in the queue."""
        what = self._excess(1, 1, free)
        if what is not None and self._youngest_below(priority) is None:
            raise queue_full(what, self.retry_after())

    def _excess(self, requests: int, tokens: int, free: int) -> str | None:
        """What there is too much of, if so much more should wait."""
        if not self.waiting:
            # Alone, any request may wait: a batch larger than the queue could never be sent.
            return None
        if len(self.waiting) + requests > self.max_requests + free:
            return f"{len(self.waiting)} requests"
        if self.tokens + tokens > self.max_tokens:
            return f"{self.tokens} prompt tokens"
        return None

    def _youngest_below(self, priority: int) -> Waiting | None:
        """The waiting request of lower priority that came last."""
        return next((w for w, _ in reversed(self.waiting.values()) if w.priority < priority), None)

    def enter(self, id: str, owner: Waiting, tokens: int) -> None:
        if not self.waiting:
            self._since = time.monotonic()
        self.waiting[id] = owner, tokens
        self.tokens += tokens

    def leave(self, id: str, begun: bool) -> None:
        """It began, or it is gone. Unknown ids are nothing to do."""
        found = self.waiting.pop(id, None)
        if found is None:
            return
        self.tokens -= found[1]
        if begun:
            now = time.monotonic()
            passed = now - self._since
            self._since = now
            kept = 0.5 ** (passed / HALF_LIFE)
            self._seconds = self._seconds * kept + passed
            self._begun = self._begun * kept + 1

    def retry_after(self) -> float:
        """Seconds in which what waits now should have begun, at the rate of late: and whoever was turned away before and has
        not come back yet. So a crowd comes back one by one, as fast as it can be served, and not all at once again and again."""
        now = time.monotonic()
        while self._told and self._told[0] < now:
            self._told.popleft()
        each = self._seconds / self._begun if self._begun else 0.05
        wait = min((len(self.waiting) + EAGER * len(self._told)) * each, MAX_RETRY_AFTER)
        if len(self._told) < MAX_TOLD:
            self._told.append(now + wait)
        return wait
