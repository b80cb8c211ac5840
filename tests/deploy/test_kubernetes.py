"""The manifests agree with the code and with each other: options, probes, ports, labels, times and
the metrics of the autoscaler."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("starlette")

from octavo.serve.endpoints.application import GET
from tests.deploy.deployment import (
    CLOSING,
    DEPLOY,
    METRIC,
    environment,
    exported,
    instructions,
    options,
    read,
    read_all,
)

BASE = "kubernetes/base"


def manifests() -> list[dict[str, Any]]:
    files = read(f"{BASE}/kustomization.yaml")["resources"]
    return [document for file in files for document in read_all(f"{BASE}/{file}")]


def one(kind: str) -> dict[str, Any]:
    documents = [*manifests(), *read_all("kubernetes/monitoring.yaml")]
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


POD = one("Deployment")["spec"]["template"]
(WORKER,) = POD["spec"]["containers"]
GIVEN = options(WORKER["args"])
PORTS = {port["name"]: port["containerPort"] for port in WORKER["ports"]}


def test_the_container_listens_on_the_ports_that_it_names() -> None:
    assert {"http": GIVEN["port"], "health": GIVEN["health_port"]} == PORTS
    assert GIVEN["host"] == "0.0.0.0"


@pytest.mark.parametrize(
    ("probe", "path", "port"),
    [
        ("startupProbe", "/startupz", "http"),
        ("livenessProbe", "/livez", "health"),
        ("readinessProbe", "/readyz", "http"),
    ],
)
def test_every_probe_asks_its_own_route(probe: str, path: str, port: str) -> None:
    asked = WORKER[probe]["httpGet"]
    assert asked == {"path": path, "port": port} and path in GET and port in PORTS


def test_a_worker_has_a_thread_for_every_core_that_it_requests() -> None:
    (variable,) = WORKER["env"]
    found = variable["valueFrom"]["resourceFieldRef"]
    assert variable["name"] == "OMP_NUM_THREADS"
    assert found["containerName"] == WORKER["name"]
    assert found["resource"] == "requests.cpu" and "cpu" in WORKER["resources"]["requests"]


def test_a_worker_may_start_slowly() -> None:
    probe = WORKER["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_a_worker_has_time_to_drain() -> None:
    command = WORKER["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    # The endpoints must have forgotten the pod before the server refuses requests.
    assert int(command[1]) >= 5
    needed = int(command[1]) + GIVEN["drain_timeout"] + CLOSING
    assert POD["spec"]["terminationGracePeriodSeconds"] >= needed


def test_all_selectors_find_the_workers() -> None:
    labels = POD["metadata"]["labels"]
    selectors = [
        one("Deployment")["spec"]["selector"]["matchLabels"],
        one("Service")["spec"]["selector"],
        one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one("PodMonitor")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector == labels for selector in selectors)


def test_services_and_monitors_use_the_named_ports() -> None:
    assert [port["targetPort"] for port in one("Service")["spec"]["ports"]] == ["http"]
    (endpoint,) = one("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "http" and endpoint["path"] in GET
    (ingress,) = one("NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in ingress["ports"]] == ["http"]


def test_the_label_of_the_job_is_the_one_that_the_alert_rules_ask_for() -> None:
    label = one("PodMonitor")["spec"]["jobLabel"]
    assert (
        f'job="{POD["metadata"]["labels"][label]}"'
        in (DEPLOY / "prometheus" / "alerts.yml").read_text()
    )


def test_the_pod_runs_as_the_user_of_the_image_and_can_write_where_the_server_writes() -> None:
    (user,) = [value for name, value in instructions() if name == "USER"]
    assert POD["spec"]["securityContext"]["runAsUser"] == int(user)
    assert WORKER["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["mountPath"]: mount["name"] for mount in WORKER["volumeMounts"]}
    assert set(mounted.values()) == {volume["name"] for volume in POD["spec"]["volumes"]}
    (volume,) = [value for name, value in instructions() if name == "VOLUME"]
    caches = [environment()[name] for name in ("HF_HOME", "OCTAVO_CACHE", "TRITON_CACHE_DIR")]
    assert volume in mounted and "/tmp" in mounted
    assert all(cache.startswith(f"{volume}/") for cache in caches)


def test_the_autoscaler_scales_the_workers_by_metrics_that_they_export() -> None:
    scaler = one("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == one("Deployment")["metadata"]["name"]
    assert "replicas" not in one("Deployment")["spec"], "the autoscaler sets the number"
    (rule,) = read("kubernetes/prometheus-adapter.yaml")["rules"]["custom"]
    pattern = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert pattern
    series = [name for name in exported() if re.fullmatch(pattern[1], name)]
    replacement = rule["name"]["as"].replace("$1", r"\1")
    offered = {re.sub(rule["name"]["matches"], replacement, name) for name in series}
    wanted = [metric["pods"]["metric"]["name"] for metric in scaler["metrics"]]
    assert set(wanted) == offered and "octavo_num_requests_waiting" in wanted


def test_the_kustomizations_name_files_and_the_image_that_exist() -> None:
    for path in DEPLOY.rglob("kustomization.yaml"):
        content = read(str(path.relative_to(DEPLOY)))
        files = [file for made in content.get("configMapGenerator", []) for file in made["files"]]
        for name in [*content["resources"], *files]:
            assert (path.parent / name).exists(), f"{path}: {name}"
        for image in content.get("images", []):
            assert image["name"] == WORKER["image"]
    tags = [
        read(f"kubernetes/{folder}/kustomization.yaml")["images"][0]["newTag"]
        for folder in ("base", "cuda")
    ]
    assert tags == ["cpu", "cuda"]


def test_the_gpu_is_added_to_the_container_of_the_worker() -> None:
    (patch,) = read("kubernetes/cuda/kustomization.yaml")["patches"]
    assert patch["target"] == {"kind": "Deployment", "name": one("Deployment")["metadata"]["name"]}
    assert "containers/0/resources/limits/nvidia.com~1gpu" in patch["patch"]
    assert "limits" in WORKER["resources"]


def test_the_adapter_reads_no_metric_without_a_pod() -> None:
    (rule,) = read("kubernetes/prometheus-adapter.yaml")["rules"]["custom"]
    assert 'pod!=""' in rule["seriesQuery"] and not METRIC.findall(rule["metricsQuery"])
