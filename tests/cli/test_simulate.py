"""`octavo simulate`: a table, JSON last, costs from a real run, and a comparison with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from octavo.bench.calibrate import MeasuredStep, errors, fit
from octavo.cli import simulate_command
from octavo.core.simulate import Costs

Octavo = Callable[..., Result]
TRACE = "poisson:rate=50,n=12,prompt=4-20,output=2-8,urgent=0.5"


def last(result: Result) -> dict:  # type: ignore[type-arg]
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_policies_and_modes_are_compared(octavo: Octavo, tmp_path: Path) -> None:
    args = [
        "--policy",
        "fcfs",
        "--policy",
        "priority",
        "--batching",
        "continuous",
        "--batching",
        "static",
    ]
    result = octavo("simulate", TRACE, *args, "--max-num-seqs", 2, "--json", tmp_path / "r.json")
    r = last(result)
    assert r == json.loads((tmp_path / "r.json").read_text())
    asked = [(p, b) for p in ("fcfs", "priority") for b in ("continuous", "static")]
    assert [(one["policy"], one["batching"]) for one in r["results"]] == asked
    assert all(one["requests"] == 12 for one in r["results"])
    assert all(
        name in result.stdout
        for name in (
            "TTFT p50",
            "ITL p50",
            "E2E p50",
            "tok/s",
            "preempted",
            "cache hits",
            "priority -1",
        )
    )
    assert (
        last(octavo("simulate", TRACE, *args, "--max-num-seqs", 2))["results"][0]["tok_s"]
        == r["results"][0]["tok_s"]
    )


def test_costs_come_from_a_real_run_and_are_compared_with_one(
    octavo: Octavo, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        simulate_command, "CHECK_TRACE", "poisson:rate=80,n=6,prompt=4-30,output=2-6"
    )
    costs = tmp_path / "costs.json"
    result = octavo("simulate", TRACE, "--calibrate", tiny, "--out", costs, "--max-num-seqs", 4, "--max-model-len", 256,
                    "--picture", tmp_path / "p.svg")  # fmt: skip
    assert all(
        name in (tmp_path / "p.svg").read_text()
        for name in ("calibrated", "another", "predicted, ms")
    )
    r = last(result)
    assert json.loads(costs.read_text()) == r and r["model"] == tiny
    assert (
        all(value >= 0 for value in r["costs"].values())
        and r["errors"]["calibrated"]["predicted_s"] > 0
    )
    assert "calibrated:" in result.stdout and "another:" in result.stdout
    sizes = ["--max-num-seqs", 4, "--max-model-len", 256]
    result = octavo(
        "simulate", TRACE, "--costs", costs, "--verify", tiny, "--policy", "priority", *sizes
    )
    r = last(result)
    assert r["verify"]["real"]["requests"] == 12 and r["verify"]["real"]["policy"] == "priority"
    assert "this trace:" in result.stdout and "median" in result.stdout


def test_the_fit_finds_the_line() -> None:
    costs = Costs(step=0.003, prefill=0.0004, sampled=0.001, kv=3e-6, pairs=0.0)
    found = [
        (1.0, p, r, r * k, p * p / 2) for p in (0, 3, 50, 200) for r in (1, 4, 9) for k in (10, 300)
    ]
    steps = [MeasuredStep(f, costs.seconds(f)) for f in found]
    steps += [
        MeasuredStep(found[0], 0.5),
        MeasuredStep(found[5], 0.9),
    ]  # something else held these up
    line = fit(steps)
    assert line.sampled == pytest.approx(0.001, rel=1e-3) and line.prefill == pytest.approx(
        0.0004, rel=1e-3
    )
    assert (
        errors(line, steps[:-2])["median_step_error"] < 1e-6
        and abs(errors(line, steps[:-2])["total_error"]) < 1e-6
    )


def test_no_feature_makes_a_step_shorter() -> None:
    steps = [
        MeasuredStep((1.0, float(p), 1.0, 10.0, 0.0), 0.010 - 0.00001 * p)
        for p in range(0, 100, 10)
    ]
    assert min(fit(steps).__dict__.values()) >= 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "a TRACE is missing"),
        (["poisson:what=1"], "has no what"),
        (["/no/such/file"], "No such file"),
        ([TRACE, "--policy", "best"], "unknown scheduling policy 'best'"),
        ([TRACE, "--batching", "best"], "unknown batching mode 'best'"),
        ([TRACE, "--max-model-len", "10"], "shorten the prompt"),
        ([TRACE, "--batching", "window", "--max-batch", "0"], "max_batch must be"),
        ([TRACE, "--batching", "static", "--max-batch", "-1"], "max_batch must be"),
        ([TRACE, "--window-ms", "-1"], "window_ms must be"),
        ([TRACE, "--target-ms", "0"], "target_ms must be"),
        ([TRACE, "--window-ms", "30"], "window_ms has no effect"),
        (["poisson:rate=nan,n=3"], "rate, n, groups"),
        (["poisson:urgent=7,n=3"], "urgent from 0 to 1"),
        (["poisson:rate8,n=3"], "has no rate8"),
        (["poisson:rate = 9, m=3"], "has no m:"),
        (["poisson:n=2.5"], "n of a synthetic trace must be a whole number"),
        (["poisson:n=3,prompt=200-20"], "N or A-B"),
        (["poisson:n=3,output=5-6-7"], "N or A-B"),
    ],
)
def test_what_cannot_be_simulated_is_an_error(octavo: Octavo, args: list[str], says: str) -> None:
    result = octavo("simulate", *args)
    assert result.exit_code == 2 and says in result.stderr


def test_a_file_that_is_no_text(octavo: Octavo, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(range(256)))
    result = octavo("simulate", tmp_path / "t")
    assert result.exit_code == 2 and "line 1 is not a request" in result.stderr


def test_a_file_that_holds_no_costs(octavo: Octavo, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("{}")
    result = octavo("simulate", TRACE, "--costs", tmp_path / "c")
    assert result.exit_code == 2 and "--calibrate" in result.stderr
