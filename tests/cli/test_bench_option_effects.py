"""`octavo bench options`: what changing one option does to each figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from octavo import LLM
from octavo.bench import option_effects
from octavo.bench.interleave import spread
from octavo.bench.option_effects import COUNTS, FIGURES, Mix
from octavo.engine_options import EngineOptions

Octavo = Callable[..., Result]
SMALL = Mix(
    *(6, 8, 2, 1),
    system=32,
    message=8,
    document=64,
    long_text=100,
    reply=8,
    kv_tokens=2048,
    small_pool=160,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(option_effects.MIXES, "cpu", SMALL)


def test_each_variation_is_compared_with_the_default(
    octavo: Octavo, tiny: str, tmp_path: Path, small: None
) -> None:
    names = ["small-steps", "few-slots", "int8-kv", "small-pool", "one-thread"]
    result = octavo(
        *("bench", "options", tiny, "--repeat", 2, "--variations", ",".join(names)),
        *("--json", tmp_path / "r.json", "--picture", tmp_path / "r.svg"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "r.json").read_text())
    assert found["partial"] is False and found["workload"]["clients"] == 6
    rows = {row["variation"]: row for row in found["rows"]}
    assert list(rows) == names
    for row in rows.values():
        assert all(row["ratio"][figure]["median"] > 0 for figure in FIGURES)
        assert row["default"]["preemptions"]["max"] == 0
    pool = rows["small-pool"]
    assert pool["switch"] == "--num-blocks 10" and pool["changed"]["kv_blocks"]["max"] == 10
    assert pool["default"]["kv_blocks"]["max"] > 10
    int8 = rows["int8-kv"]
    assert int8["changed"]["kv_mib"]["max"] < int8["default"]["kv_mib"]["max"]
    assert "OMP_NUM_THREADS=1" in (tmp_path / "r.svg").read_text()


def test_what_cannot_be_measured_says_why(octavo: Octavo, tiny: str, small: None) -> None:
    result = octavo(
        *("bench", "options", tiny, "--repeat", 1, "--no-prefix-caching"),
        *("--variations", "drafts,small-pool-host-tier,depth"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert [row["variation"] for row in found["rows"]] == ["depth"]
    assert "does not use drafts by default" in found["left_out"]["drafts"]
    assert "need the prefix cache" in found["left_out"]["small-pool-host-tier"]
    assert "drafts was not measured: this model does not use drafts" in result.stdout


def test_an_unknown_variation_is_named(octavo: Octavo) -> None:
    result = octavo("bench", "options", "--variations", "small-steps,magic")
    assert result.exit_code == 2 and "unknown variation magic: use small-steps" in result.stderr


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_variations_are_options_that_exist(kind: str) -> None:
    mix = option_effects.MIXES[kind]
    found = option_effects.variations(kind, 16)
    assert set(found) <= set(option_effects.NAMES)
    for name, changes in found.items():
        EngineOptions(**changes)
        assert option_effects.switch_of(name, changes)
    longest = max(mix.long_text, mix.document + mix.message) + mix.reply
    assert longest < mix.small_pool < mix.kv_tokens
    assert max(option_effects.VARIATION_VALUES[kind]["slots"]) < mix.clients


def test_requests_share_prefixes_and_have_the_lengths_of_the_mix(tiny: str) -> None:
    llm = LLM(tiny, progress=False)
    jobs = option_effects.mixed_jobs(llm, SMALL)
    lengths = sorted(len(job.prompt) for job in jobs)
    assert lengths == [40] * 8 + [72] * 2 + [100]
    chats = [job.prompt for job in jobs if len(job.prompt) == 40]
    assert len({tuple(prompt[:32]) for prompt in chats}) == 1
    assert len({tuple(prompt) for prompt in chats}) == 8
    assert all(2 <= job.output <= 8 for job in jobs)
    assert [job.prompt for job in option_effects.mixed_jobs(llm, SMALL)] == [
        job.prompt for job in jobs
    ]


def test_requests_fit_into_a_short_context(tiny: str) -> None:
    llm = LLM(tiny, progress=False, max_model_len=48)
    jobs = option_effects.mixed_jobs(llm, SMALL)
    assert max(len(job.prompt) for job in jobs) == 39
    assert all(len(job.prompt) + job.output < 48 for job in jobs)


def result_with(ratio: list[float], rounds: int, load: float) -> dict[str, Any]:
    figures = {name: spread([2.0]) for name in (*FIGURES, *COUNTS)}
    row = {
        "variation": "depth",
        "switch": "--depth 2",
        "default": figures,
        "changed": figures,
        "ratio": {name: spread(ratio) for name in FIGURES},
    }
    return {
        "rows": [row],
        "rounds": rounds,
        "workload": SMALL._asdict(),
        "left_out": {},
        "provenance": {"load_average": [load, 0, 0], "machine": {"cores": 2}},
    }


def test_clear_ratios_are_bold_and_doubts_are_stated() -> None:
    clear = result_with([1.1, 1.2, 1.15], rounds=3, load=0.2)
    (table,) = option_effects.tables(clear)
    assert table.rows[0][:2] == ("the default", "2 tok/s [2 - 2]")
    assert table.rows[1][:2] == ("`--depth 2`", "**1.15 [1.10 - 1.20]**")
    assert len(option_effects.notes(clear)) == 2
    unclear = result_with([0.8, 1.2], rounds=2, load=3.0)
    (table,) = option_effects.tables(unclear)
    assert table.rows[1][1] == "1.00 [0.80 - 1.20]"
    text = " ".join(option_effects.notes(unclear))
    assert "differs by more than 25% between rounds" in text and "`--depth 2`." in text
    assert "too few to show the spread" in text
    assert "the load average was 3.0 at the start, on 2 cores" in text


def test_a_result_without_rows_is_shown_as_nothing() -> None:
    empty = {"rows": []}
    view = option_effects.VIEW
    assert (view.tables(empty), view.panels(empty), view.notes(empty)) == ([], [], [])
