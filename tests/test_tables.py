"""Tables in the documentation are what the result files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import tables

RESULT = {
    "model": "toy",
    "results": [{"workload": "single", "tok_s": 1234.5, "limit_tok_s": 2469.0, "of_limit": 0.5}],
    "provenance": {"date": "2026-01-02", "commit": "abc", "machine": {"cpu": "a CPU"}},
}


def test_no_page_has_drifted_from_its_result_files() -> None:
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.fill(text) == text, f"{page.name}: run make tables"


def test_a_table_is_filled_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    page = "before\n<!-- table: throughput r.json -->\nstale\n<!-- end table -->\nafter\n"
    filled = tables.fill(page)
    assert "| toy single | 1,234 | 2,469 | 50% |" in filled
    assert "Measured 2026-01-02, commit abc, a CPU." in filled
    assert "stale" not in filled
    assert tables.fill(filled) == filled


def test_every_result_file_says_where_it_was_measured() -> None:
    for path in (tables.ROOT / "results").glob("*.json"):
        origin = json.loads(path.read_text())["provenance"]
        assert {"date", "commit", "command", "machine", "versions"} <= set(origin), path.name
