"""vLLM's public Grafana dashboards have data in every panel, with `--metrics-prefix vllm`.

Needs the programs of Debian's package `prometheus`, and a clone of vLLM whose path is in
OCTAVO_VLLM_SOURCE. The dashboards are not part of this project.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("starlette")

from tests import tiny
from tests.deploy.test_prometheus import (
    Prometheus,
    Worker,
    numbers,
    program,
    put_under_load,
    wait_until_ok,
)
from tests.serve.running import free_port

SOURCE = os.environ.get("OCTAVO_VLLM_SOURCE")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SOURCE and shutil.which("prometheus")),
        reason="needs prometheus, and OCTAVO_VLLM_SOURCE with a clone of vLLM",
    ),
]
DASHBOARDS = (
    "prometheus_grafana/grafana.json",
    "dashboards/grafana/performance_statistics.json",
    "dashboards/grafana/query_statistics.json",
)
LOAD_SECONDS = 30
# What a user selects on the dashboard, and what Grafana fills in.
VARIABLES = {
    "__rate_interval": "20s",
    "__interval": "20s",
    "__range": "20s",
    "model_name": "tiny",
    "Deployment_id": ".*",
}


def panels_of(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard.get("panels", []):
        yield from panels_of(panel)
        if panel.get("targets"):
            yield panel


def all_panels() -> list[tuple[str, dict[str, Any]]]:
    if not SOURCE:
        return []
    folder = Path(SOURCE) / "examples" / "observability"
    return [
        (f"{name.rpartition('/')[2]}: {panel.get('title')}", panel)
        for name in DASHBOARDS
        for panel in panels_of(json.loads((folder / name).read_text()))
    ]


def filled_in(expression: str) -> str:
    def value(found: re.Match[str]) -> str:
        return VARIABLES.get(found[1] or found[2], ".*")

    return re.sub(r"\$\{(\w+)(?::\w+)?\}|\$(\w+)", value, expression)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("vllm-dashboards")
    port, prometheus_port = free_port(), free_port()
    serve = [sys.executable, "-m", "octavo", "serve", tiny.model_dir(), "--port", str(port)]
    serve += ["--served-model-name", "tiny", "--metrics-prefix", "vllm", "--max-num-seqs", "4"]
    with program(serve, folder / "server") as (server, log):
        url = f"http://127.0.0.1:{port}"
        wait_until_ok(f"{url}/readyz", server, log)
        target = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        config = folder / "prometheus.yml"
        settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}
        config.write_text(yaml.safe_dump(settings))
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb"]
        command.append(f"--web.listen-address=127.0.0.1:{prometheus_port}")
        with program(command, folder / "prometheus") as (process, prometheus_log):
            found = f"http://127.0.0.1:{prometheus_port}"
            wait_until_ok(f"{found}/-/ready", process, prometheus_log)
            start = time.time()
            workers = [Worker(server, url)]
            put_under_load(workers, LOAD_SECONDS)
            yield Prometheus(found, workers, start, time.time())


@pytest.mark.parametrize(("name", "panel"), all_panels(), ids=lambda value: str(value)[:60])
def test_every_panel_has_data(observed: Prometheus, name: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        if target.get("hide") or not target.get("expr"):
            continue
        expression = filled_in(target["expr"])
        values = [n for series in observed.series(expression) for n in numbers(series)]
        assert values, f"{name}: no data for {expression}"
