"""`octavo bench ablation`, and what all benches share: rows that are safe when a bench ends early."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from octavo import LLM
from octavo.bench import ablation
from octavo.bench.drive import Job, drive
from octavo.bench.interleave import interleave, is_noisy, ratios
from octavo.bench.result_file import BenchRun
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest, OctavoError
from octavo.option_declaration import option_declarations

Octavo = Callable[..., Result]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = ablation.Scale(streams=16, prompt=16, reply=8, context=100, document=400, shared=64)
    monkeypatch.setitem(ablation.SCALES, "cpu", scale)
    monkeypatch.setattr(ablation, "MAX_ATTEMPTS", 1)


def test_the_contribution_of_each_mechanism_is_measured(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    names = ["kv-cache", "paging", "prefix-cache"]
    result = octavo(
        *("bench", "ablation", tiny, "--repeat", 1, "--mechanisms", ",".join(names)),
        *("--json", tmp_path / "r.json", "--picture", tmp_path / "r.svg"),
    )
    assert result.exit_code == 0
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "r.json").read_text())
    assert found["partial"] is False and not found["skipped"]
    rows = {row["mechanism"]: row for row in found["rows"]}
    assert list(rows) == names
    assert all(row["same_tokens"] for row in rows.values())
    assert all(row["contribution"]["median"] > 0 for row in rows.values())
    assert rows["paging"]["most_running"] == {"on": 12, "off": 4}
    assert "kv-cache (throughput)" in (tmp_path / "r.svg").read_text()


def test_an_interrupt_leaves_a_partial_result(
    octavo: Octavo, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ablation.Ablation.measure

    def interrupted(self: ablation.Ablation, name: str) -> None:
        if name == "prefix-cache":
            os.kill(os.getpid(), signal.SIGINT)
        real(self, name)

    monkeypatch.setattr(ablation.Ablation, "measure", interrupted)
    # An earlier test of the same process may have left another handler.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = octavo(
            *("bench", "ablation", tiny, "--repeat", 1, "--mechanisms", "kv-cache,prefix-cache"),
            *("--json", tmp_path / "r.json"),
        )
    finally:
        signal.signal(signal.SIGINT, previous)
    assert result.exit_code == 130
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["partial"] is True and found["stopped"] == "the bench was interrupted"
    assert [row["mechanism"] for row in found["rows"]] == ["kv-cache"]
    assert "partial result: the bench was interrupted" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1]) == found


def test_an_unknown_mechanism_and_a_missing_directory_are_named(octavo: Octavo, tiny: str) -> None:
    result = octavo("bench", "ablation", tiny, "--mechanisms", "kv-cache,magic")
    assert result.exit_code == 2 and "unknown mechanism magic: use kv-cache" in result.stderr
    result = octavo("bench", "ablation", tiny, "--json", "no/such/r.json")
    assert result.exit_code == 2 and "there is no directory no/such" in result.stderr


def test_every_mechanism_is_turned_off_by_options_that_exist() -> None:
    declared = option_declarations(EngineOptions)
    for name, mechanism in ablation.MECHANISMS.items():
        assert mechanism.workload in ablation.WORKLOADS, name
        assert mechanism.off or mechanism.on, name
        assert {**mechanism.off, **mechanism.on}.keys() <= declared.keys(), name
        EngineOptions(**mechanism.off)
        flags = [declared[option].flag for option in mechanism.off]
        assert all(flag.split()[0] in mechanism.switch for flag in flags if flag), name


def test_what_cannot_be_measured_says_why(tiny: str) -> None:
    llm = LLM(tiny, progress=False)
    assert "device of the kind cuda" in str(ablation.reason_to_skip("cuda-graphs", llm))
    assert "not quantised" in str(ablation.reason_to_skip("quantisation", llm))
    assert (
        ablation.reason_to_skip("quantisation", LLM(tiny, quantization="int8", progress=False))
        is None
    )
    assert "does not use drafts by default" in str(ablation.reason_to_skip("speculation", llm))
    embedded = LLM("smollm2", progress=False, max_model_len=64, speculative_config=None)
    assert ablation.reason_to_skip("speculation", embedded) is None


# ---- what benches share ------------------------------------------------------------------------


def test_a_result_that_lacks_something_is_partial(tmp_path: Path) -> None:
    run = BenchRun("toy", tmp_path / "r.json", model="m")
    run.add_row(name="a", value=1)
    assert json.loads((tmp_path / "r.json").read_text())["partial"] is True
    run.skip("b", "it is not installed")
    run.finish()
    found: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert found["partial"] is True and found["skipped"] == {"b": "it is not installed"}
    assert found["rows"] == [{"name": "a", "value": 1}]
    assert {"date", "commit", "machine", "load_average"} <= found["provenance"].keys()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_sides_take_turns() -> None:
    calls: list[str] = []

    def side(name: str, value: float) -> Callable[[], float]:
        return lambda: calls.append(name) or value  # type: ignore[func-returns-value]

    found = interleave({"a": side("a", 2.0), "b": side("b", 4.0)}, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert ratios(found["b"], found["a"]) == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert not is_noisy({"median": 1.1, "min": 1.0, "max": 1.2})
    assert is_noisy({"median": 1.1, "min": 1.0, "max": 1.3})


def test_clients_send_one_job_after_another(tiny: str) -> None:
    llm = LLM(tiny, progress=False, max_num_seqs=8)
    jobs = [Job([1, 2, 3], 5, max_tokens=50), Job([4] * 9, 2), Job([5, 6], 7, group="late")]
    report = drive(llm.engine, jobs, clients=2)
    assert [len(reply) for reply in report.replies] == [5, 2, 7] and report.tokens == 14
    assert report.most_running == 2
    assert report.sent_at[2] >= report.token_times[1][-1] > report.sent_at[1]
    assert len(report.gaps("late")) == 6 and len(report.first_tokens()) == 2
    assert llm.engine.idle and not llm.engine.scheduler.live


def test_a_job_may_wait_for_tokens_of_others(tiny: str) -> None:
    llm = LLM(tiny, progress=False, max_num_seqs=8)
    report = drive(llm.engine, [Job([1, 2], 8), Job([3], 2, after=4)])
    assert report.sent_at[1] >= report.token_times[0][3]


def test_a_job_that_fails_makes_the_run_invalid(tiny: str) -> None:
    llm = LLM(tiny, progress=False, max_num_seqs=8, max_model_len=40)
    llm.runner.launch = lambda plan: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(OctavoError, match="a request failed .ZeroDivisionError"):
        drive(llm.engine, [Job([1, 2], 8)])


def test_options_that_need_other_weights_are_refused(tiny: str) -> None:
    llm = LLM(tiny, progress=False)
    with pytest.raises(InvalidRequest, match="quantization cannot change without loading"):
        llm.with_options(quantization="int8")
    other = llm.with_options(max_num_seqs=3)
    assert other.schedule.max_num_seqs == 3 and other.model is llm.model
