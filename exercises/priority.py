"""Exercise of the lesson priority: an urgent request may overtake, but nobody starves.

Complete the policy. A request with priority p ranks like a request with priority 0 that arrived
p * `ageing` seconds later, so a low priority waits longer, but not for ever."""

from __future__ import annotations

from exercises.engine import add, new_engine, run
from octavo.core.policy import Policy
from octavo.events import Admitted
from octavo.types import Sequence


class AgeingPriority(Policy):
    ageing = 5.0  # seconds per level

    def rank(self, seq: Sequence) -> float:
        """Use `seq.request.arrival`, in seconds, and `seq.request.priority`. Lower ranks first."""
        raise NotImplementedError("complete this method")


def test_a_request_that_has_waited_long_enough_is_not_overtaken() -> None:
    engine = new_engine(slots=1, policy="exercises.priority:AgeingPriority")
    order = []
    engine.events.subscribe(lambda event: order.append(event.seq.request.id), Admitted)
    requests = [("low", 0.0, 3), ("normal", 1.0, 0), ("urgent", 2.0, -1), ("late", 16.0, 0)]
    for name, arrival, priority in requests:
        add(engine, name, prompt=4, reply=3, arrival=arrival, priority=priority)
    run(engine)
    assert order == ["urgent", "normal", "low", "late"]
