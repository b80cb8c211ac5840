"""A solution of exercises/priority.py."""

from __future__ import annotations

from octavo.core.policy import Policy
from octavo.types import Sequence


class AgeingPriority(Policy):
    ageing = 5.0

    def rank(self, seq: Sequence) -> float:
        return seq.request.arrival + self.ageing * seq.request.priority
