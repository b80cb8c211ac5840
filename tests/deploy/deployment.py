"""Reads the files of deploy/, and says what the code offers: options, routes and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo.cli import app
from octavo.serve import server
from octavo.serve.channel.messages import Heartbeat
from octavo.serve.front import supervisor
from octavo.serve.front.metrics import HOST_BLOCKS, TIERS, Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "octavo.json"
# The time that a server takes to end after its drain timeout: it sends the last errors, closes the
# connections and stops the engine process.
CLOSING = 1 + 2 * server.CLOSE_SECONDS + supervisor.STOP_SECONDS
METRIC = re.compile(r"\b((?:octavo|vllm):\w+)")
MATCHER = re.compile(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"")


@cache
def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


@cache
def read_all(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def options(arguments: Sequence[str]) -> dict[str, Any]:
    """The options of an `octavo` command line. An unknown flag or a bad value is an error."""
    group = typer.main.get_command(app)
    name, *rest = arguments
    command = group.commands[name]  # type: ignore[attr-defined]
    found: dict[str, Any] = command.make_context(name, list(rest)).params
    return found


def seconds(text: str) -> float:
    """A duration as Compose and Prometheus write it."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    found = re.fullmatch(r"(\d+)([smhd])", text)
    assert found, text
    return int(found[1]) * units[found[2]]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with their continued lines joined."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line]  # type: ignore[misc]


def environment() -> dict[str, str]:
    """The variables that the Dockerfile sets."""
    found = " ".join(value for name, value in instructions() if name == "ENV")
    return dict(re.findall(r"(\w+)=(\S+)", found))


@cache
def exported(prefix: str = "octavo") -> dict[str, set[str]]:
    """The names of all samples of /metrics, with the names of their labels."""
    tiers = {f"host_blocks_{state}": 0.0 for state in HOST_BLOCKS}
    tiers |= dict.fromkeys([*TIERS, "host_tokens", "disk_tokens"], 0.0)
    heartbeat = Heartbeat(tiers=tiers, tier_misses={"corrupt": 1}, accepted_at=[1])
    metrics = Metrics(prefix, "m")
    metrics.rejections.labels("queue_full").inc()
    metrics.source.engine_client = SimpleNamespace(  # type: ignore[assignment]
        supervisor=SimpleNamespace(
            heartbeat=heartbeat, starts=1, recovery=0.0, loaded=None, sleep_level=0
        ),
        engine_saturated=False,
        queue_bound=SimpleNamespace(waiting=[], tokens=0),
        open_requests={},
        ready=True,
    )
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard that have queries."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("prometheus/alerts.yml")["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard and the alert rules, with the name of its panel or alert."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]
