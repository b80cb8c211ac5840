"""A solution of exercises/preemption.py."""

from __future__ import annotations

from octavo.core.policy import Policy
from octavo.types import Sequence


class CheapestVictim(Policy):
    def victim(self, candidates: list[Sequence]) -> Sequence:
        return min(candidates, key=lambda seq: (seq.planned, [-part for part in seq.rank]))
