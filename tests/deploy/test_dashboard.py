"""The dashboard and the alert rules are well formed, and read metrics that the server exports."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

pytest.importorskip("starlette")

from octavo.serve.api import api_errors
from tests.deploy.deployment import (
    MATCHER,
    METRIC,
    dashboard,
    exported,
    expressions,
    panels,
    read,
    read_all,
    rules,
    seconds,
)

PROMETHEUS_LABELS = {"instance", "job", "pod", "namespace"}  # Prometheus adds these labels.
BUILT_IN = {"__rate_interval"}  # Grafana sets these variables.
# What the public dashboards of vLLM read, in its folder examples/observability.
VLLM = [
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum",
    "iteration_tokens_total_count",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_sum",
    "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum",
]


@pytest.mark.parametrize("name", VLLM)
def test_the_dashboards_of_vllm_find_their_metrics(name: str) -> None:
    assert "model_name" in exported("vllm")[f"vllm:{name}"]


def test_every_query_reads_metrics_and_labels_that_the_server_exports() -> None:
    metrics = exported()
    for title, expression in expressions():
        names = METRIC.findall(expression)
        assert names or "up{" in expression, title
        for name in names:
            assert name in metrics, f"{title}: no metric {name}"
        labels = set(MATCHER.findall(expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            labels |= set(group.replace(" ", "").split(","))
        known = set().union(*(metrics[name] for name in names)) | PROMETHEUS_LABELS
        assert labels <= known, f"{title}: {labels - known}"


def test_label_values_in_queries_exist() -> None:
    text = "\n".join(expression for _, expression in expressions())
    assert set(re.findall(r'finished_reason="(\w+)"', text)) == {"error"}
    codes = {api_errors.queue_full("", 1).code, api_errors.queue_timeout(1, 1).code}
    assert set(re.findall(r'reason=~"([\w|]+)"', text)) == {"|".join(sorted(map(str, codes)))}


# ---- the dashboard -------------------------------------------------------------------------------


def test_the_dashboard_has_ids_places_and_variables_that_grafana_accepts() -> None:
    board = dashboard()
    assert board["schemaVersion"] >= 36 and board["uid"] == "octavo" and board["title"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for first, second in combinations([panel["gridPos"] for panel in board["panels"]], 2):
        apart = (
            first["x"] + first["w"] <= second["x"]
            or second["x"] + second["w"] <= first["x"]
            or first["y"] + first["h"] <= second["y"]
            or second["y"] + second["h"] <= first["y"]
        )
        assert apart, (first, second)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(expression for _, expression in expressions())))
    assert {"datasource", "worker"} == variables
    assert used & variables == {"worker"} and used - variables - BUILT_IN <= {"labels", "value"}
    (name,) = METRIC.findall(board["templating"]["list"][1]["definition"])
    assert name in exported()


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"].replace(" ", "-"))
def test_every_panel_has_the_data_source_and_shows_the_total_and_every_worker(panel: dict) -> None:
    assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"]
    for part in (panel, *panel["targets"]):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    letters = [target["refId"] for target in panel["targets"]]
    assert len(letters) == len(set(letters))
    legends = [target["legendFormat"] for target in panel["targets"]]
    for target in panel["targets"]:
        assert 'instance=~"$worker"' in target["expr"]
    if panel["type"] == "timeseries":
        assert any(legend.startswith("total") for legend in legends)
        assert any("{{instance}}" in legend for legend in legends)


@pytest.mark.parametrize(
    "metric",
    [
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "spec_decode_num_accepted_tokens_total",
        "prefix_cache_tier_hits_total",
        "rejections_total",
    ],
)
def test_the_dashboard_shows_what_an_operator_asks_for(metric: str) -> None:
    shown = {
        name for panel in panels() for t in panel["targets"] for name in METRIC.findall(t["expr"])
    }
    assert f"octavo:{metric}" in shown


# ---- the alert rules -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_says_how_severe_it_is_what_happened_and_what_to_do(rule: dict) -> None:
    assert rule["alert"].startswith("Octavo")
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
    assert "for" not in rule or seconds(rule["for"]) >= 60


def test_every_alert_has_a_unit_test_in_which_it_alone_fires() -> None:
    fired = []
    for case in read("prometheus/alerts_test.yml")["tests"][1:]:
        before, after = case["promql_expr_test"]
        assert not before["exp_samples"], "the alert waits for its time"
        (sample,) = after["exp_samples"]
        fired += re.findall(r'alertname="(\w+)"', sample["labels"])
    assert fired == [rule["alert"] for rule in rules()]


def test_kubernetes_has_the_same_alert_rules() -> None:
    (found,) = [d for d in read_all("kubernetes/monitoring.yaml") if d["kind"] == "PrometheusRule"]
    assert found["spec"] == read("prometheus/alerts.yml")
