"""The request routers of Ray Serve: one prefers cached prefixes, the other takes replicas in turn.

Ray Serve calls `choose_replicas` for every lease, probes the replicas of the first group that is
not full, and takes the one with the fewest requests. A request that continues an earlier one goes
to the replica that has it, with both routers.
"""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.round_robin_router import RoundRobinRouter
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from octavo.serve.ray_serve.prefix_index import PrefixIndex, rank_replicas


class PrefixRouter(RequestRouter):
    def initialize_state(self, max_age: float, slack: int) -> None:
        """Ray Serve calls this with `request_router_kwargs`."""
        self.index = PrefixIndex(max_age)
        self.slack = slack

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Without this, Ray Serve would try again at once while every replica is full.
        pending_request.routing_context.should_backoff = True
        hashes, failed, preferred = routing_arguments(pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if preferred in by_name:
            return [[by_name[preferred]]]
        loads = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in by_name.items()
        }
        groups = rank_replicas(self.index, hashes, loads, failed, self.slack)
        return [[by_name[name] for name in group] for group in groups if group]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        hashes, *_ = routing_arguments(pending_request)
        self.index.add(replica_id.unique_id, hashes)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.index.keep(replica.replica_id.unique_id for replica in replicas)
        for replica in replicas:
            stats: dict[str, Any] = replica.routing_stats
            if stats:
                self.index.update(
                    replica.replica_id.unique_id, stats["kv_tokens"], stats["generation"]
                )


class TurnRouter(RoundRobinRouter):
    """Takes the replicas in turn."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            *_, preferred = routing_arguments(pending_request)
            for replica in candidate_replicas:
                if replica.replica_id.unique_id == preferred:
                    return [[replica]]
        groups: list[list[RunningReplica]] = await super().choose_replicas(
            candidate_replicas, pending_request
        )
        return groups


def routing_arguments(pending_request: PendingRequest) -> tuple[list[bytes], list[str], str]:
    """Return the arguments of Replica.lease. A call of another method has none."""
    if len(pending_request.args) != 3:
        return [], [], ""
    hashes, failed, preferred = pending_request.args
    return hashes, failed, preferred
