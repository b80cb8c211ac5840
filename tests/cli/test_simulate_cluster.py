"""`octavo simulate-cluster`: a table, JSON last, a picture, and errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from octavo.bench.cluster_router import ROUTERS
from octavo.cli.simulate_cluster import ROUTING

Octavo = Callable[..., Result]
TRACE = "poisson:rate=8,n=60,prompt=4-20,output=2-8,shared=64,groups=9,skew=1"


def test_the_command_offers_every_policy() -> None:
    assert tuple(ROUTERS) == ROUTING


def test_policies_crashes_and_links_are_compared(octavo: Octavo, tmp_path: Path) -> None:
    options = ["--replicas", 4, "--mtbf", 5, "--restart", 1, "--prefill-replicas", 2]
    files = ["--json", tmp_path / "r.json", "--picture", tmp_path / "p.svg"]
    result = octavo("simulate-cluster", TRACE, *options, "--link", 1, "--link", 10, *files)
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout.splitlines()[-1])
    assert parsed == json.loads((tmp_path / "r.json").read_text())
    cases = ["", "crashes", "2 prefill, 1 Gbit/s", "2 prefill, 10 Gbit/s"]
    asked = [(routing, case) for routing in ROUTING for case in cases]
    assert [(one["routing"], one["case"]) for one in parsed["results"]] == asked
    assert all(one["requests"] == 60 for one in parsed["results"])
    assert "prefix_affinity" in result.stdout and "goodput" in result.stdout
    assert "prefix_affinity" in (tmp_path / "p.svg").read_text()


def test_a_recorded_trace_is_routed(octavo: Octavo, tmp_path: Path) -> None:
    lines = [
        {"arrival": i / 9, "prompt": 40, "output": 5, "blocks": [1, 2 + i % 3]} for i in range(9)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = octavo("simulate-cluster", file, "--replicas", 2, "--routing", "prefix_affinity")
    assert json.loads(result.stdout.splitlines()[-1])["results"][0]["cache_hits"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--routing", "best"], "--routing must be one of round_robin"),
        (["--replicas", 2, "--prefill-replicas", 2], "--prefill-replicas must be less"),
        (["--prefill-replicas", 1, "--link", 0], "--link must be a number of Gbit/s above 0"),
        (["--kv-tokens", 64], "does not fit into the KV cache"),
    ],
)
def test_wrong_options_are_refused(octavo: Octavo, options: list[object], message: str) -> None:
    result = octavo("simulate-cluster", TRACE, *options)
    assert result.exit_code == 2 and message in " ".join(result.output.split())
