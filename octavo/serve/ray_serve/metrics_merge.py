"""Joins the metrics of several replicas into one text, in which the label `replica` names each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class MergedMetrics:
    """A collector of prometheus_client that returns metrics which are known already."""

    def __init__(self, metrics: Iterable[Metric]):
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Return the metrics of all replicas. `texts` has the metrics of each by its name."""
    merged: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            merged_family = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {"replica": name, **sample.labels}
                merged_family.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MergedMetrics(merged.values()))
    return generate_latest(registry)
