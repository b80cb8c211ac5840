"""`octavo bench latency`: every first token and every gap is counted, and the limit is below the
measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from octavo import LLM
from octavo.bench import latency
from octavo.bench.workloads import HardwareRates
from octavo.core.simulate import Report

Octavo = Callable[..., Result]
SMALL = ("--prompt", 20, "--tokens", 6, "--repeat", 2, "--max-model-len", 64, "--max-num-seqs", 4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "measure_machine", lambda llm: HardwareRates(1e12, 1e15))


def test_percentiles_and_floors_of_each_batch(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    result = octavo(
        "bench", "latency", tiny, *SMALL, "--batches", "1,3", "--json", tmp_path / "r.json"
    )
    assert result.exit_code == 0, result.output
    r = json.loads(result.stdout.splitlines()[-1])
    assert r == json.loads((tmp_path / "r.json").read_text()) and [
        one["requests"] for one in r["rows"]
    ] == [1, 3]
    for one in r["rows"]:
        for name in ("ttft", "itl"):
            assert (
                0
                < one[f"{name}_limit_ms"]
                < one[f"{name}_p50_ms"]
                <= one[f"{name}_p90_ms"]
                <= one[f"{name}_p99_ms"]
            )
            assert 0 < one[f"{name}_of_limit"] < 1
    assert "TTFT" in result.stdout and "ITL" in result.stdout


def test_more_requests_than_rows_are_refused(octavo: Octavo, tiny: str) -> None:
    result = octavo("bench", "latency", tiny, *SMALL, "--batches", "1,5")
    assert result.exit_code == 2 and "1 to 4 requests (max_num_seqs)" in result.stderr


def test_what_warms_up_does_not_count(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runs = LLM(tiny, max_model_len=64, progress=False), []

    def run_trace(llm: LLM, trace: list[object], schedule: object) -> Report:
        runs.append(len(trace))
        slow = 100.0 if len(runs) == 1 else 1.0
        return Report(
            seconds=slow,
            first_token={f"{i}": slow * (i + 1) for i in range(len(trace))},
            gaps=[slow, slow * 2],
        )

    monkeypatch.setattr(latency, "run_trace", run_trace)
    (r,) = latency.measure(llm, [2], prompt=8, output=3, repeat=2)
    assert runs == [2, 2, 2]
    assert (r["ttft_p50_ms"], r["ttft_p99_ms"], r["itl_p50_ms"], r["itl_p99_ms"], r["tok_s"]) == (
        1e3,
        2e3,
        1e3,
        2e3,
        6.0,
    )


def test_the_floor_reads_weights_and_kv_and_makes_products(tiny: str) -> None:
    llm = LLM(tiny, max_model_len=64, progress=False)
    reads, computes = HardwareRates(1e9, 1e30), HardwareRates(1e30, 1e9)
    weights = latency.bytes_per_step(llm)
    assert latency.limits(llm, 1, 20, 6, reads) == pytest.approx(
        (weights / 1e9, (weights + 23 * llm.memory.kv_per_token) / 1e9)
    )
    one, four = (latency.limits(llm, batch, 20, 6, computes) for batch in (1, 4))
    assert four[0] == pytest.approx(2 * one[0]) and four[1] == pytest.approx(4 * one[1])
