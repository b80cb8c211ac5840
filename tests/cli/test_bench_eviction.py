"""`octavo bench eviction` runs, keeps to the budget, and ends with a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

Octavo = Callable[..., Result]
SMALL = ["--tokens", 120, "--text", 120, "--budget", 48, "--block-size", 8]


def test_every_policy_is_compared_with_a_whole_cache(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    result = octavo("bench", "eviction", tiny, *SMALL, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    r = json.loads(result.stdout.splitlines()[-1])
    assert r == json.loads((tmp_path / "r.json").read_text())
    rows = {row["policy"]: row for row in r["rows"]}
    assert list(rows) == ["full", "window", "sinks", "heavy"] and rows["full"]["ratio"] == 1
    assert len({row["perplexity"] for row in rows.values()}) == 4
    for name in ("sinks", "heavy"):
        assert sum(part["tokens"] for part in rows[name]["parts"]) == 120
        assert max(part["blocks"] for part in rows[name]["parts"]) == 48 // 8 and rows[name]["dropped_blocks"] > 10


def test_a_text_that_fits_the_budget_shows_nothing(octavo: Octavo, tiny: str) -> None:
    result = octavo("bench", "eviction", tiny, "--text", 40, "--budget", 48)
    assert result.exit_code == 2 and "nothing would leave" in result.output
