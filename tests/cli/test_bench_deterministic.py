"""`octavo bench deterministic`: what batch-invariant kernels cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from octavo.bench import workloads

Octavo = Callable[..., Result]


def test_both_modes_are_measured_in_turn(
    octavo: Octavo, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = workloads.Workload([[5, 6, 7]] * 2, [4, 4])
    monkeypatch.setitem(workloads.WORKLOADS, "four", lambda: small)
    result = octavo(
        *("bench", "deterministic", tiny, "--repeat", 2, "--workloads", "four"),
        *("--max-model-len", 64, "--json", tmp_path / "r.json", "--picture", tmp_path / "r.svg"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "r.json").read_text())
    (row,) = found["rows"]
    assert row["workload"] == "four"
    assert row["plain"]["median"] > 0 and row["deterministic"]["median"] > 0
    assert row["cost_percent"] == pytest.approx(100 * (1 - row["speed"]["median"]))
    assert found["library_rows"] == {}  # a library is compared on GPUs only
    assert "% of the plain throughput" in (tmp_path / "r.svg").read_text()


def test_an_unknown_workload_is_refused(octavo: Octavo) -> None:
    result = octavo("bench", "deterministic", "--workloads", "four,none")
    assert result.exit_code != 0
    assert "unknown workload none" in result.output
