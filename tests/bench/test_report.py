"""`octavo bench report` and `octavo bench claims`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.bench import claims
from octavo.bench.claims import CLAIMS, ClaimBench, EngineClaim, Finding
from octavo.bench.report import write_report
from octavo.bench.result_file import BenchRun
from octavo.cli import app
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest
from tools.tables import ROOT


def write(path: Path, bench: str, rows: list[dict[str, Any]], **facts: Any) -> None:
    run = BenchRun(bench, path, **facts)
    for row in rows:
        run.add_row(**row)


CLAIM_ROW = {
    "name": "batching",
    "claim": "3.1 times & more",
    "really": "one run",
    "fair_run": "both sides in turn",
    "findings": [{"name": "ratio", "value": 3.4, "unit": "x"}],
}


def test_a_page_has_every_result_and_needs_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "claims", [CLAIM_ROW])
    (tmp_path / "b.json").write_text('{"bench": "unheard of"}')
    (tmp_path / "c.json").write_text("{")
    count, left_out = write_report([tmp_path], tmp_path / "report.html")
    assert count == 1 and sorted(left_out) == ["b.json", "c.json"]
    page = (tmp_path / "report.html").read_text()
    assert "3.1 times &amp; more" in page and "ratio 3.40x" in page and "<svg" in page
    assert "Partial result: something was not measured" in page
    assert "Left out: b.json: there is no view of the bench &#x27;unheard of&#x27;" in page
    assert not re.search(r'(src|href)="(?!#)', page), "the page must not load anything"
    assert page.count("<style>") == 2  # that of the page, and once that of all charts


def test_the_results_of_the_tree_can_be_shown(tmp_path: Path) -> None:
    count, left_out = write_report([ROOT / "results"], tmp_path / "report.html")
    assert count >= 2
    # The results of tests, which no bench has written.
    written_by_tests = {"routing-two-workers.json", "vllm-examples.json", "vllm-tests.json"}
    assert set(left_out) <= written_by_tests


def test_what_cannot_be_shown_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no result file"):
        write_report([tmp_path / "none.json"], tmp_path / "r.html")
    with pytest.raises(InvalidRequest, match="no result can be shown"):
        write_report([tmp_path], tmp_path / "r.html")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "claims", [CLAIM_ROW])
    target = tmp_path / "r.html"
    result = CliRunner().invoke(app, ["bench", "report", str(tmp_path), "--out", str(target)])
    assert result.exit_code == 0 and "1 results" in result.output and target.exists()


# ---- claims ------------------------------------------------------------------------------------


def test_every_claim_is_complete() -> None:
    assert len(CLAIMS) == 6
    for claim in CLAIMS.values():
        assert claim.claim and claim.really and claim.fair_run


def test_a_claim_that_needs_more_packages_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(bench: ClaimBench) -> list[Finding]:
        return [Finding("ratio", 2.0, "x"), Finding("speed", 1234.5, "tok/s")]

    monkeypatch.setitem(CLAIMS, "good", EngineClaim("c", "r", "f", measure))
    monkeypatch.setitem(CLAIMS, "bad", EngineClaim("c", "r", "f", measure, ("no_such_package",)))
    run = BenchRun("claims")
    ClaimBench(run, EngineOptions()).measure(["good", "bad"])
    run.finish()
    assert run.result["partial"] and run.result["skipped"] == {
        "bad": "not installed: no_such_package"
    }
    assert claims.figures_text(run.rows[0]) == "ratio 2.00x; speed 1,234 tok/s"


def test_the_way_of_counting_of_a_claim_counts_failures() -> None:
    from octavo.bench.http_load import Load, measure

    with claims.failing_server() as port:
        found = measure(Load(port=port, clients=2, requests=10, tokens=3, prompt="x"))
    assert found["statuses"] == {"500": 10} and not found["good"]
    assert json.dumps(found["wrong"]) == '{"status 500": 10}'


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window batching", "speculation"])
def test_a_claim_is_measured(name: str) -> None:
    run = BenchRun("claims")
    ClaimBench(run, EngineOptions(num_gpu_blocks_override=512), rounds=1).measure([name])
    (row,) = run.rows
    assert all(finding["value"] >= 0 for finding in row["findings"])
