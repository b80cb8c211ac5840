"""`octavo bench speculation` compares methods with plain decoding, and fails if a token differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from octavo.bench import measure_speculation
from octavo.bench.measure_speculation import Decoding, compare, predict_ratio
from octavo.config import SpeculativeConfig
from octavo.core.scheduler import Scheduler
from octavo.types import Output, Plan, StepResult

Octavo = Callable[..., Result]
SMALL = ["--repeat", 1, "--max-tokens", 8, "--streams", "1,4", "--max-num-seqs", 4]


def records(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return list(json.loads(result.stdout.splitlines()[-1])["results"])


def test_every_method_is_measured_in_every_case(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    files = ["--json", tmp_path / "r.json", "--picture", tmp_path / "r.svg"]
    methods = "ngram,k=4,adaptive=no; early_exit,layer=1,k=2,adaptive=no"
    result = octavo("bench", "speculation", tiny, *SMALL, "--methods", methods, *files)
    found = records(result)
    assert found == json.loads((tmp_path / "r.json").read_text())["results"]
    cases = [(r["workload"], r["streams"], r["temperature"]) for r in found[::2]]
    assert cases == [(w, s, t) for w in ("chat", "copy") for s in (1, 4) for t in (0, 0.7)]
    for record in found:
        assert record["differences"] == [] and record["tokens"] > 0
        assert 0 < record["ratio"]["min"] <= record["ratio"]["median"] <= record["ratio"]["max"]
        assert 0 <= record["accepted"] <= record["drafted"]
        steps = record["tokens"] / record["tokens_per_step"]
        assert record["tokens"] - record["accepted"] <= steps + 0.1
        has_prediction = record["method"].startswith("early_exit")
        assert (record["predicted_ratio"] is not None) == has_prediction
    copied = [r for r in found if r["workload"] == "copy" and r["method"].startswith("ngram")]
    assert sum(record["drafted"] for record in copied) > 0
    assert "predicted from the acceptance" in (tmp_path / "r.svg").read_text()
    assert "All methods gave the same tokens as plain decoding." in result.stdout


def test_a_token_that_differs_makes_the_bench_fail(
    octavo: Octavo, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: steps that verify drafts give a token of their own."""
    commit = Scheduler.commit

    def commit_other_tokens(self: Scheduler, plan: Plan, result: StepResult) -> list[Output]:
        if plan.num_drafts:
            result.tokens = [[7] * len(tokens) for tokens in result.tokens]
        return commit(self, plan, result)

    monkeypatch.setattr(Scheduler, "commit", commit_other_tokens)
    methods = "early_exit,layer=1,k=2,adaptive=no"
    narrow = ["--workloads", "copy", "--temperatures", "0", "--streams", "4"]
    result = octavo("bench", "speculation", tiny, *SMALL, *narrow, "--methods", methods)
    assert result.exit_code == 1
    assert "differs from its token 1 on" in result.stdout
    assert "speculation changed tokens" in result.output
    assert json.loads(result.stdout.splitlines()[-1])["same_tokens"] is False


def test_the_grid_is_early_exit_on_two_models(
    octavo: Octavo, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_speculation.GRID == {"tinyllama-1.1b": (8, 18), None: (8, 24)}
    monkeypatch.setattr(measure_speculation, "GRID", {tiny: (1,)})
    narrow = ["--workloads", "chat", "--temperatures", "0", "--streams", "4"]
    result = octavo("bench", "speculation", "--grid", *SMALL, *narrow, "--load-format", "dummy")
    found = records(result)
    assert [record["method"] for record in found] == [
        "early_exit,layer=1,k=2,adaptive=no",
        "early_exit,layer=1,k=4,adaptive=no",
    ]
    for record, drafts in zip(found, (2, 4), strict=True):
        cost = 1 + drafts / record["layers"]
        assert record["predicted_ratio"] == pytest.approx(
            (1 + record["acceptance"] * drafts) / cost
        )
    assert "The weights are random" in result.stdout


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--methods", "magic"], "no method 'magic'"),
        (["--workloads", "chess"], "unknown workload chess: use chat, copy"),
        (["--temperatures", "hot"], "must be numbers"),
        (["--streams", "none"], "not a size"),
        (["--grid"], "leave out MODEL"),
        (["--speculative", "ngram"], "give them with --methods"),
    ],
)
def test_wrong_settings_are_refused(
    octavo: Octavo, tiny: str, args: list[str], problem: str
) -> None:
    result = octavo("bench", "speculation", tiny, *args)
    assert result.exit_code == 2 and problem in result.output


def test_medians_are_those_of_the_rounds_after_the_first() -> None:
    plain = [Decoding(seconds=s, tokens=12, sequence_steps=12, replies=[[1, 2]]) for s in (9, 4, 3)]
    drafted = [
        Decoding(s, tokens=12, sequence_steps=6, drafted=8, accepted=6, replies=[[1, 2]])
        for s in (9, 2, 2)
    ]
    rounds = [{"": one, "m": two} for one, two in zip(plain, drafted, strict=True)]
    found = compare(rounds, "m")
    assert found["plain_tok_s"] == {"median": 3.5, "min": 3, "max": 4}
    assert found["ratio"] == {"median": 1.75, "min": 1.5, "max": 2}
    assert (found["drafted"], found["accepted"], found["acceptance"]) == (16, 12, 0.75)
    assert found["tokens_per_step"] == 2 and found["differences"] == []
    rounds[2]["m"].replies = [[1, 3]]
    assert compare(rounds, "m")["differences"] == [{"prompt": 0, "token": 1}]


def test_the_prediction_follows_from_acceptance_and_layers() -> None:
    record = {"acceptance": 0.5, "drafts_per_step": 1.0}
    fixed = SpeculativeConfig("early_exit", num_tokens=4, adaptive=False, exit_layer=8)
    assert predict_ratio(fixed, 32, record) == (1 + 0.5 * 4) / (1 + 4 * 8 / 32)
    adaptive = SpeculativeConfig("early_exit", num_tokens=4, exit_layer=8)
    assert predict_ratio(adaptive, 32, record) == (1 + 0.5) / (1 + 8 / 32)
    assert predict_ratio(SpeculativeConfig("ngram"), 32, record) is None
