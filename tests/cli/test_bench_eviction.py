"""`octavo bench eviction` runs, keeps to the budget, and ends with a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from octavo.bench.eviction import flatness

Octavo = Callable[..., Result]
SMALL = ["--tokens", 120, "--text", 120, "--budget", 48, "--block-size", 8]


def test_every_policy_is_compared_with_a_whole_cache(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    result = octavo(
        "bench",
        "eviction",
        tiny,
        *SMALL,
        "--json",
        tmp_path / "r.json",
        "--picture",
        tmp_path / "r.svg",
    )
    assert result.exit_code == 0, result.output
    r = json.loads(result.stdout.splitlines()[-1])
    assert r == json.loads((tmp_path / "r.json").read_text())
    rows = {row["policy"]: row for row in r["rows"]}
    assert list(rows) == ["full", "window", "sinks", "heavy"] and rows["full"]["ratio"] == 1
    assert len({row["perplexity"] for row in rows.values()}) == 4
    assert "Perplexity of the text" in (tmp_path / "r.svg").read_text()
    for name in ("window", "sinks", "heavy"):
        assert sum(part["tokens"] for part in rows[name]["parts"]) == 120
        assert (
            max(part["blocks"] for part in rows[name]["parts"]) == 48 // 8
            and rows[name]["dropped_blocks"] > 10
        )
        assert rows[name]["kv_bytes_grown"] == 0 and rows[name]["speed_kept"] > 0


def test_a_text_that_fits_the_budget_shows_nothing(octavo: Octavo, tiny: str) -> None:
    result = octavo("bench", "eviction", tiny, "--text", 40, "--budget", 48)
    assert result.exit_code == 2 and "nothing would be dropped" in result.output


def test_only_parts_that_began_with_a_full_cache_are_compared() -> None:
    speeds = (9, 9, 4, 3, 3, 2)
    parts = [
        {"tokens": 10, "tok_s": speed, "rss_bytes": 7 * i, "kv_bytes": min(i, 2)}
        for i, speed in enumerate(speeds)
    ]
    found = flatness(parts, budget=20)
    assert (found["first_tok_s"], found["last_tok_s"], found["speed_kept"]) == (4, 2, 0.5)
    assert found["rss_bytes_grown"] == 7 * 3 and found["kv_bytes_grown"] == 0
    assert flatness(parts[:1], budget=20)["speed_kept"] == 1


def test_a_text_alone_or_a_reply_alone(octavo: Octavo, tiny: str) -> None:
    for args, has, lacks in (
        (["--text", 0], "parts", "perplexity"),
        (["--tokens", 0], "perplexity", "parts"),
    ):
        result = octavo("bench", "eviction", tiny, *SMALL, *args, "--policies", "sinks")
        (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
        assert has in row and lacks not in row
