"""Tables in the documentation are what the result files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import tables

RESULT = {
    "model": "toy",
    "rows": [
        {
            "workload": "single",
            "requests": 1,
            "unit": "tok/s",
            "runs": [1234.5],
            "host_ms_a_step": {},
            "tok_s": 1234.5,
            "limit_tok_s": 2469.0,
            "of_limit": 0.5,
        }
    ],
    "provenance": {"date": "2026-01-02", "commit": "abc", "machine": {"cpu": "a CPU"}},
}


def test_no_page_or_picture_has_drifted_from_its_result_file() -> None:
    stale = [str(path.relative_to(tables.ROOT)) for path in tables.stale_files()]
    assert not stale, "run make tables"


def test_a_table_is_filled_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    page = "before\n<!-- table: throughput r.json -->\nstale\n<!-- end table -->\nafter\n"
    filled = tables.fill(page)
    assert "| toy single | 1,234 | 2,469 | 50% |" in filled
    assert "Measured 2026-01-02, commit abc, a CPU." in filled
    assert "stale" not in filled
    assert tables.fill(filled) == filled


def test_a_changed_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PICTURES", {"a.svg": "r.json"})
    page = tmp_path / "page.md"
    monkeypatch.setattr(tables, "PAGES", [page])
    (tmp_path / "r.json").write_text(json.dumps(RESULT | {"bench": "throughput"}))
    page.write_text("<!-- table: throughput r.json -->\n<!-- end table -->\n")
    assert set(tables.stale_files()) == {page, tmp_path / "a.svg"}
    assert tables.main() == 0 and not tables.stale_files()
    changed = json.loads(json.dumps(RESULT).replace("1234.5", "99"))
    (tmp_path / "r.json").write_text(json.dumps(changed | {"bench": "throughput"}))
    assert set(tables.stale_files()) == {page, tmp_path / "a.svg"}


def test_machines_have_a_column_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for name, machine in (("a", {"gpu": "H200"}), ("b", CPU)):
        finding = {"name": "ratio", "value": 3.14159, "unit": "x"}
        row = {"claim": "fast", "really": "slow", "fair_run": "both", "findings": [finding]}
        origin = RESULT["provenance"] | {"machine": machine}  # type: ignore[operator]
        text = json.dumps({"rows": [row], "provenance": origin, "partial": name == "b"})
        (tmp_path / f"{name}.json").write_text(text)
    filled = tables.fill("<!-- table: claims a.json b.json -->\n<!-- end table -->\n")
    assert "| the fair run | H200 | 2 cores, AVX2 |" in filled
    assert "| fast | slow | both | ratio 3.14x | ratio 3.14x |" in filled
    assert "a CPU (2 cores, AVX2), partial." in filled


CPU = {"cpu": "a CPU", "cores": 2, "instructions": "AVX2"}


def test_every_result_file_says_where_it_was_measured() -> None:
    for path in (tables.ROOT / "results").glob("*.json"):
        origin = json.loads(path.read_text())["provenance"]
        assert {"date", "commit", "command", "machine", "versions"} <= set(origin), path.name
