"""The stateful sessions of SageMaker.

SageMaker sends all requests of a session to the same server, whose prefix cache then has the KV of
the earlier turns. So the server stores only the owner of a session and the time of its expiry.
"""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple

from octavo.serve.api.api_errors import ApiError, invalid_field
from octavo.serve.limits import Limits

NO_SESSION = ("", "NEW_SESSION")  # Values of the header in requests that belong to no session.


class SagemakerSession(NamedTuple):
    owner: str
    expires: float  # A time of time.time(), which the client sees.


class SagemakerSessions:
    def __init__(self, limits: Limits):
        self._limits = limits
        self._sessions: dict[str, SagemakerSession] = {}  # The oldest is first, and expires first.

    def create(self, owner: str) -> tuple[str, float]:
        """Return the id of a new session, and when it expires."""
        self._drop_expired()
        if len(self._sessions) >= self._limits.sessions:
            raise ApiError(
                429,
                f"the server has {self._limits.sessions} sessions: close one, or wait until one "
                "expires",
                "too_many_sessions",
                retry_after=1.0,
            )
        id = f"session-{secrets.token_hex(16)}"
        self._sessions[id] = SagemakerSession(owner, time.time() + self._limits.session_seconds)
        return id, self._sessions[id].expires

    def check(self, id: str, owner: str) -> None:
        """Raise ApiError if the owner has no such session."""
        self._drop_expired()
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            raise invalid_field(
                None,
                "session not found: it was closed, or it expired, or another server has it",
                "session_not_found",
            )

    def close(self, id: str, owner: str) -> None:
        if id in NO_SESSION:
            raise ApiError(
                424,
                "invalid session_id: name the session to close in the header "
                "X-Amzn-SageMaker-Session-Id",
                "invalid_session_id",
            )
        self.check(id, owner)
        del self._sessions[id]

    def _drop_expired(self) -> None:
        now = time.time()
        while self._sessions:
            id, oldest = next(iter(self._sessions.items()))
            if oldest.expires > now:
                return
            del self._sessions[id]
