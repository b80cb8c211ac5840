"""The autoscaling policy: enough replicas for the open requests, and for the KV that they use.

This module must not import Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ScalingConfig(Protocol):
    """The part of Ray Serve's AutoscalingConfig that the policy reads."""

    target_ongoing_requests: float


class ScalingContext(Protocol):
    """The part of Ray Serve's AutoscalingContext that the policy reads."""

    config: ScalingConfig
    total_num_requests: float  # The requests of all replicas, and those that wait for one.
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None  # Metric -> replica -> value.


class LoadPolicy:
    """Ray Serve rounds the result up, keeps it within the bounds and applies the delays."""

    def __init__(self, target_kv_use: float):
        self.target_kv_use = target_kv_use

    def __call__(self, context: ScalingContext) -> tuple[float, dict[str, Any]]:
        by_requests = context.total_num_requests / context.config.target_ongoing_requests
        kv_uses = (context.aggregated_metrics or {}).get("kv_use", {})
        by_kv_use = sum(kv_uses.values()) / self.target_kv_use
        return max(by_requests, by_kv_use), {}
