"""A real Prometheus reads two real servers under load: every query of the dashboard shows data, the
alert rules stay quiet, and they fire when an engine dies and when a server ends.

The servers have the options of compose.yaml, and little memory for KV, so that the KV tiers are
used. Prometheus has the configuration of compose.yaml with other addresses and shorter intervals.
Needs the programs of Debian's package `prometheus`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest
import yaml

pytest.importorskip("starlette")

from tests import tiny
from tests.deploy.deployment import DEPLOY, ROOT, panels, read, rules
from tests.serve.running import free_port
from tools import dashboard_picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="needs prometheus and promtool: apt-get install prometheus",
    ),
]
LOAD_SECONDS = 40
SUBSTITUTES = {"$__rate_interval": "20s", "$worker": ".*"}
# What must have happened under the load: these panels show more than zeros.
BUSY = {
    "Generated tokens per second",
    "Prompt tokens per second",
    "Finished sequences per second",
    "Time to first token (TTFT)",
    "Inter-token latency (ITL)",
    "End-to-end latency",
    "Running sequences",
    "KV blocks in use",
    "Prefix cache hit rate",
    "KV tiers: prompt tokens found",
    "KV tiers: bytes moved per second",
    "Acceptance rate",
    "Tokens per verification",
    "Refused requests per second",
}


class Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str


class Prometheus(NamedTuple):
    url: str
    workers: list[Worker]
    start: float
    end: float

    def get(self, path: str, **query: Any) -> Any:
        reply = httpx.get(f"{self.url}/api/v1/{path}", params=query, timeout=30)
        assert reply.status_code == 200, reply.text
        return reply.json()["data"]

    def series(self, expression: str) -> list[dict[str, Any]]:
        """The series of a query during the second half of the load."""
        found: list[dict[str, Any]] = self.get(
            "query_range",
            query=expression,
            start=(self.start + self.end) / 2,
            end=self.end,
            step=1,
        )["result"]
        return found

    def alerts(self) -> dict[str, str]:
        return {a["labels"]["alertname"]: a["state"] for a in self.get("alerts")["alerts"]}

    def wait_for_alert(self, name: str, state: str) -> None:
        deadline = time.monotonic() + 60
        while self.alerts().get(name) != state:
            assert time.monotonic() < deadline, self.alerts()
            time.sleep(0.5)


def wait_until_ok(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"{url} was never ready:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def program(command: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    folder.mkdir()
    log = folder / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    try:
        yield process, log
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def worker(folder: Path, name: str) -> Iterator[Worker]:
    """A server with the options of compose.yaml."""
    port = free_port()
    own = {"--host": "127.0.0.1", "--port": port, "--health-port": free_port()}
    given = read("compose.yaml")["services"][name]["command"][1:]
    options = [flag for flag in given if flag.split("=")[0] not in own]
    options += [f"{flag}={value}" for flag, value in own.items()]
    # Little memory for KV, so that cached blocks move to the tiers.
    options += ["--num-blocks=96", "--max-num-seqs=8", "--max-model-len=512"]
    options += [f"--kv-disk={folder / name}-disk", "--dtype=float32"]
    model = [tiny.model_dir(), "--served-model-name=tiny"]
    command = [sys.executable, "-m", "octavo", "serve", *model, *options]
    with program(command, folder / name) as (process, log):
        wait_until_ok(f"http://127.0.0.1:{port}/readyz", process, log)
        yield Worker(process, f"http://127.0.0.1:{port}")


def configuration(workers: list[Worker]) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(read("prometheus/prometheus.yml"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    config["scrape_configs"] = config["scrape_configs"][:1]
    # The names of Compose, and labels that the Prometheus Operator adds to the metrics of a pod.
    config["scrape_configs"][0]["static_configs"] = [
        {
            "targets": [worker.url.removeprefix("http://")],
            "labels": {
                "instance": f"worker-{number + 1}",
                "namespace": "default",
                "pod": f"octavo-{number}",
            },
        }
        for number, worker in enumerate(workers)
    ]
    return config


def send_requests(url: str, client: int, until: float) -> None:
    """Conversations that grow, as clients have them. Now and then a request is invalid."""
    with httpx.Client(base_url=url, timeout=120) as http:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            topic = f"client {client} topic {turn % 6} "
            prompt = topic + "one two three four one two three four " * (1 + turn % 4)
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 48, "temperature": 0}
            reply = http.post("/v1/completions", json={**body, "ignore_eos": True})
            assert reply.status_code == 200, reply.text
            if turn % 5 == 0:
                assert http.post("/v1/completions", json={"prompt": 1.5}).status_code == 400


def put_under_load(workers: list[Worker], duration: float) -> None:
    until = time.monotonic() + duration
    failures: list[BaseException] = []

    def client(url: str, number: int) -> None:
        try:
            send_requests(url, number, until)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=client, args=(worker.url, number))
        for worker in workers
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("deploy")
    port = free_port()
    with worker(folder, "worker-1") as first, worker(folder, "worker-2") as second:
        workers = [first, second]
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(configuration(workers)))
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        with program(command, folder / "prometheus") as (process, log):
            url = f"http://127.0.0.1:{port}"
            wait_until_ok(f"{url}/-/ready", process, log)
            start = time.time()
            put_under_load(workers, LOAD_SECONDS)
            yield Prometheus(url, workers, start, time.time())


def substitute(expression: str) -> str:
    for name, value in SUBSTITUTES.items():
        expression = expression.replace(name, value)
    return expression


def numbers(series: dict[str, Any]) -> list[float]:
    return [float(value) for _, value in series["values"] if math.isfinite(float(value))]


def test_prometheus_reads_both_servers(observed: Prometheus) -> None:
    targets = observed.get("targets")["activeTargets"]
    assert [target["health"] for target in targets] == ["up", "up"]
    assert {target["labels"]["job"] for target in targets} == {"octavo"}


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"].replace(" ", "-"))
def test_every_query_of_every_panel_shows_data(observed: Prometheus, panel: dict) -> None:
    shown: list[float] = []
    for target in panel["targets"]:
        found = observed.series(substitute(target["expr"]))
        values = [number for series in found for number in numbers(series)]
        assert values, f"{panel['title']}: no data for {target['expr']}"
        shown += values
        if "instance}}" in target["legendFormat"]:
            assert len({series["metric"]["instance"] for series in found}) == 2, found
    if panel["title"] in BUSY:
        assert max(shown) > 0


def test_shares_are_between_0_and_1_and_totals_are_sums(observed: Prometheus) -> None:
    for panel in panels():
        if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
            for target in panel["targets"]:
                found = observed.series(substitute(target["expr"]))
                assert all(0 <= number <= 1 for series in found for number in numbers(series))
    (panel,) = [p for p in panels() if p["title"] == "Prompt tokens per second"]
    total, each = (observed.series(substitute(t["expr"])) for t in panel["targets"])
    sums = [sum(float(series["values"][i][1]) for series in each) for i in range(10)]
    assert sums == pytest.approx([float(value) for _, value in total[0]["values"][:10]])


def test_the_query_of_the_autoscaler_has_a_value_for_every_pod(observed: Prometheus) -> None:
    (rule,) = read("kubernetes/prometheus-adapter.yaml")["rules"]["custom"]
    names = {
        series["__name__"] for series in observed.get("series", **{"match[]": rule["seriesQuery"]})
    }
    assert names == {"octavo:num_requests_waiting", "octavo:kv_cache_usage_perc"}
    for name in names:
        query = rule["metricsQuery"].replace("<<.Series>>", name)
        query = query.replace("<<.LabelMatchers>>", 'namespace="default"')
        found = observed.series(query.replace("<<.GroupBy>>", "pod"))
        assert {series["metric"]["pod"] for series in found} == {"octavo-0", "octavo-1"}


def test_every_alert_rule_is_evaluated_and_no_alert_is_raised(observed: Prometheus) -> None:
    (group,) = observed.get("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in rules()]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}, group
    raised = observed.series("ALERTS")
    assert not raised, raised


def test_the_picture_of_the_documentation_shows_these_panels(
    observed: Prometheus, tmp_path: Path
) -> None:
    """With OCTAVO_DOCS=write the picture of docs/deploy.md is drawn again."""
    path = tmp_path / "dashboard.svg"
    if os.environ.get("OCTAVO_DOCS") == "write":
        path = ROOT / "docs" / "pictures" / "dashboard.svg"
    dashboard_picture.picture(observed.url, path, observed.start, observed.end)
    text = path.read_text()
    assert all(title in text for row in dashboard_picture.TITLES for title in row)
    assert text.count("<polyline") > 20


def test_the_router_of_compose_serves_requests(observed: Prometheus, tmp_path: Path) -> None:
    if not shutil.which("vllm-router", path=str(Path(sys.executable).parent)):
        pytest.skip("needs vllm-router: pip install 'octavo[route]'")
    port = free_port()
    metrics = free_port()
    replaced = {
        "--port=8000": f"--port={port}",
        "--metrics-port=29000": f"--metrics-port={metrics}",
    }
    for number, worker in enumerate(observed.workers, 1):
        replaced[f"--worker=http://worker-{number}:8000"] = f"--worker={worker.url}"
    given = read("compose.yaml")["services"]["router"]["command"]
    assert set(replaced) < set(given)
    command = [sys.executable, "-m", "octavo", *(replaced.get(flag, flag) for flag in given)]
    with program(command, tmp_path / "router") as (process, log):
        url = f"http://127.0.0.1:{port}"
        wait_until_ok(f"{url}/health", process, log)
        for number in range(24):
            body = {"model": "tiny", "prompt": f"{number} is a number" * 9, "max_tokens": 4}
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert reply.status_code == 200, reply.text
        text = httpx.get(f"http://127.0.0.1:{metrics}/metrics").text
        assert 'vllm_router_requests_total{route="/v1/completions"} 24' in text


def test_alerts_are_raised_when_an_engine_dies_and_a_server_ends(observed: Prometheus) -> None:
    """This test stops the servers, so it must be the last that uses them."""
    first, second = observed.workers
    children = Path(f"/proc/{first.process.pid}/task/{first.process.pid}/children").read_text()
    (engine,) = [
        int(pid)
        for pid in children.split()
        if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(engine, signal.SIGKILL)
    observed.wait_for_alert("OctavoEngineRestarted", "firing")
    second.process.terminate()
    second.process.wait(60)
    observed.wait_for_alert("OctavoWorkerDown", "pending")


def test_the_unit_tests_of_the_alert_rules_pass() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yml"]
    result = subprocess.run(
        command, cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    for check in (["config", "prometheus.yml"], ["rules", "alerts.yml"]):
        result = subprocess.run(
            ["promtool", "check", *check],
            cwd=DEPLOY / "prometheus",
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, result.stdout + result.stderr
