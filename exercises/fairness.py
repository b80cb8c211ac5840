"""Exercise of the lesson fairness: tenants take turns.

Complete the policy: the n-th request of a tenant ranks after all n-1-th requests of other tenants.
Requests of one tenant keep their order."""

from __future__ import annotations

from exercises.engine import add, new_engine, run
from octavo.core.policy import Policy
from octavo.events import Admitted
from octavo.types import Sequence


class TakeTurns(Policy):
    def rank(self, seq: Sequence) -> float:
        """Return the number of requests that the tenant of the sequence has sent before it. This
        method is called once for each request, in the order of arrival. `seq.request.tenant` is
        the tenant. Equal ranks go by arrival."""
        raise NotImplementedError("complete this method")


def test_tenants_take_turns() -> None:
    engine = new_engine(slots=1, policy="exercises.fairness:TakeTurns")
    order = []
    engine.events.subscribe(lambda event: order.append(event.seq.request.id), Admitted)
    for name in ("ann 1", "ann 2", "ann 3", "ben 1", "ann 4", "ben 2", "eve 1"):
        add(engine, name, prompt=4, reply=3, tenant=name.split()[0])
    run(engine)
    assert order == ["ann 1", "ben 1", "eve 1", "ann 2", "ben 2", "ann 3", "ann 4"]
