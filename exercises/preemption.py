"""Exercise of the lesson preemption: preempt the sequence that loses the least.

The policy fcfs preempts the sequence that came last. A sequence that has computed less is cheaper
to compute again. Complete the policy. Each candidate ranks after the sequence that needs room, so
any choice is safe."""

from __future__ import annotations

from exercises.engine import add, new_engine, run
from octavo.core.policy import Policy
from octavo.events import Preempted
from octavo.types import Sequence


class CheapestVictim(Policy):
    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Return the candidate with the fewest planned positions (Sequence.planned). Among equals,
        return the one with the highest rank (Sequence.rank)."""
        raise NotImplementedError("complete this method")


def test_the_cheapest_sequence_is_preempted() -> None:
    engine = new_engine(num_blocks=10, policy="exercises.preemption:CheapestVictim")
    preempted = []
    engine.events.subscribe(lambda event: preempted.append(event.seq.request.id), Preempted)
    add(engine, "first", prompt=8, reply=24)
    add(engine, "short", prompt=3, reply=20)
    add(engine, "long", prompt=14, reply=12)
    run(engine)
    assert preempted[0] == "short", "it came before `long`, but it loses less"
