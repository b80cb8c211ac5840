"""The Dockerfile and the Compose files agree with the code and with each other: images, commands,
mounts, ports, targets, health checks and times."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette")

from octavo.serve.endpoints.application import GET
from tests.deploy.deployment import CLOSING, DEPLOY, ROOT, instructions, options, read, seconds

COMPOSE = read("compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]
WORKERS = [name for name, service in SERVICES.items() if service.get("command", [""])[0] == "serve"]


def values(instruction: str) -> list[str]:
    return [value for name, value in instructions() if name == instruction]


def mounts(service: str) -> dict[Path, Path]:
    """Where the container sees the files of deploy/."""
    found = {}
    for volume in SERVICES[service].get("volumes", []):
        source, target = volume.split(":")[:2]
        if source.startswith("."):
            found[Path(target)] = DEPLOY / source
        else:
            assert source in COMPOSE["volumes"], f"{service}: no volume {source}"
    return found


def on_the_host(service: str, path: str) -> Path:
    """The file of the repository that a container sees under this path."""
    for target, source in mounts(service).items():
        if Path(path).is_relative_to(target):
            return source / Path(path).relative_to(target)
    raise AssertionError(f"{service}: {path} is not in a mounted folder")


def listens(service: str) -> set[int]:
    """The ports on which a service listens."""
    if service in WORKERS:
        given = options(SERVICES[service]["command"])
        return {given["port"], given["health_port"]}
    if service == "router":
        given = options(SERVICES[service]["command"])
        return {given["port"], given["metrics_port"]}
    return {"prometheus": {9090}, "grafana": {3000}}[service]


# ---- the image -----------------------------------------------------------------------------------


def locked(text: str) -> set[str]:
    return {line.split("==")[0] for line in text.splitlines() if "==" in line}


def test_the_image_has_the_packages_of_a_server_and_none_of_the_tests() -> None:
    pattern = next(value for value in values("RUN") if "serve.lock" in value)
    assert pattern.startswith("sed '/^# tests and checks/,/^$/d' requirements.lock > serve.lock")
    lock = (ROOT / "requirements.lock").read_text()
    kept = locked(re.sub(r"^# tests and checks.*?^$", "", lock, flags=re.MULTILINE | re.DOTALL))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["serve"], *extras["cpu"], *extras["gguf"]]
    assert {name.replace("_", "-") for name in needed} - {"torch"} <= kept
    assert "setuptools" in kept, "it installs octavo itself"
    assert not kept & {"pytest", "ruff", "mypy", "transformers"}


def test_the_image_has_the_torch_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    wanted = re.search(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)
    assert wanted
    found = re.findall(r"torch==\S+", (DEPLOY / "Dockerfile").read_text())
    assert found == [wanted[1]] * 2


def test_the_image_gets_the_files_that_the_package_consists_of() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and sent == {
        "LICENSE",
        "README.md",
        "octavo",
        "pyproject.toml",
        "requirements.lock",
    }
    assert all((ROOT / name).exists() for name in sent)
    for value in values("COPY"):
        source = value.split()[0]
        assert source == "." or source in sent


def test_the_image_starts_a_server_on_the_ports_that_it_exposes() -> None:
    (command,) = values("CMD")
    (entry,) = values("ENTRYPOINT")
    assert json.loads(entry) == ["octavo"]
    given = options(json.loads(command))
    assert {str(given["port"]), str(given["health_port"])} == set(values("EXPOSE")[0].split())
    assert given["host"] == "0.0.0.0"


def test_the_stages_of_the_image_are_the_devices() -> None:
    stages = [value.split(" AS ")[1] for value in values("FROM") if " AS " in value]
    assert stages == ["base", "cpu", "cuda"] and values("FROM")[-1] == "${DEVICE}"
    assert values("ARG") == ["DEVICE=cpu"]
    overlay = read("compose.cuda.yaml")["services"]
    for service in WORKERS:
        assert SERVICES[service]["build"]["args"]["DEVICE"] == "cpu"
        assert overlay[service]["build"]["args"]["DEVICE"] == "cuda"


# ---- compose.yaml --------------------------------------------------------------------------------


def test_there_are_two_workers_a_router_prometheus_and_grafana() -> None:
    assert set(SERVICES) == {"worker-1", "worker-2", "router", "prometheus", "grafana"}
    assert WORKERS == ["worker-1", "worker-2"]


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_an_image_with_a_version_and_files_that_exist(service: str) -> None:
    image = SERVICES[service]["image"]
    assert ":" in image and not image.endswith(":latest")
    build = SERVICES[service].get("build")
    if build:
        context = (DEPLOY / build["context"]).resolve()
        assert context == ROOT and (context / build["dockerfile"]).is_file()
    for source in mounts(service).values():
        assert source.exists(), source
    for other in SERVICES[service].get("depends_on", []):
        assert other in SERVICES


@pytest.mark.parametrize("service", SERVICES)
def test_published_ports_are_listened_on_and_only_this_machine_reaches_them(service: str) -> None:
    for port in SERVICES[service].get("ports", []):
        address, _, inside = port.split(":")
        assert address == "127.0.0.1" and int(inside) in listens(service)


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_is_healthy_when_it_is_ready(service: str) -> None:
    check = SERVICES[service]["healthcheck"]["test"]
    found = re.search(r'urlopen\("([^"]+)"', check[-1])
    assert found and check[:3] == ["CMD", "python", "-c"]
    compile(check[-1], "healthcheck", "exec")
    url = urlsplit(found[1])
    assert url.path == "/readyz" and url.path in GET and url.port in listens(service)


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_has_time_to_drain(service: str) -> None:
    given = options(SERVICES[service]["command"])
    assert seconds(SERVICES[service]["stop_grace_period"]) >= given["drain_timeout"] + CLOSING


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_uses_what_the_dashboard_shows(service: str) -> None:
    given = options(SERVICES[service]["command"])
    assert given["swap_space"] > 0 and given["speculative_config"]
    assert given["metrics_prefix"] == "octavo"


def test_the_router_knows_every_worker() -> None:
    given = options(SERVICES["router"]["command"])
    urls = [urlsplit(url) for url in given["workers"]]
    assert [url.hostname for url in urls] == WORKERS
    assert all(url.port in listens(str(url.hostname)) for url in urls)
    assert given["host"] == "0.0.0.0" and "--prometheus-host=0.0.0.0" in given["more"]
    assert set(WORKERS) == set(SERVICES["router"]["depends_on"])


def test_the_image_has_the_router_that_was_tested() -> None:
    (found,) = re.findall(r"vllm-router==\S+", (DEPLOY / "Dockerfile").read_text())
    assert found in (ROOT / "requirements-clients.lock").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found.split("==")[0] in project["optional-dependencies"]["route"]


# ---- Prometheus and Grafana ----------------------------------------------------------------------


def test_prometheus_reads_every_worker_and_the_router() -> None:
    flags = dict(flag.split("=", 1) for flag in SERVICES["prometheus"]["command"])
    path = on_the_host("prometheus", flags["--config.file"])
    assert path == DEPLOY / "prometheus" / "prometheus.yml"
    config = read("prometheus/prometheus.yml")
    jobs = config["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["octavo", "router"]
    assert jobs[0].get("metrics_path", "/metrics") in GET
    targets = [t for job in jobs for group in job["static_configs"] for t in group["targets"]]
    assert [target.split(":")[0] for target in targets] == [*WORKERS, "router"]
    for target in targets:
        name, port = target.split(":")
        assert int(port) in listens(name)
    for pattern in config["rule_files"]:
        assert fnmatch.filter([file.name for file in path.parent.iterdir()], pattern)


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = "/etc/grafana/provisioning"
    (source_file,) = on_the_host("grafana", f"{provisioning}/datasources").iterdir()
    (source,) = read(str(source_file.relative_to(DEPLOY)))["datasources"]
    url = urlsplit(source["url"])
    assert source["type"] == "prometheus" and url.port in listens(str(url.hostname))
    interval = read("prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider_file,) = on_the_host("grafana", f"{provisioning}/dashboards").iterdir()
    (provider,) = read(str(provider_file.relative_to(DEPLOY)))["providers"]
    folder = on_the_host("grafana", provider["options"]["path"])
    assert (folder / "octavo.json").is_file()
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert on_the_host("grafana", home).is_file()
