"""A solution of exercises/fairness.py."""

from __future__ import annotations

from collections import Counter

from octavo.core.policy import Policy
from octavo.types import Sequence


class TakeTurns(Policy):
    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def rank(self, seq: Sequence) -> float:
        tenant = seq.request.tenant
        self.sent[tenant] += 1
        return self.sent[tenant] - 1
