"""The tool that runs vLLM's examples and server tests, without a copy of vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.vllm_suite.__main__ import rows_of, write_result
from tests.vllm_suite.example_list import LEFT_OUT, OFFLINE, ONLINE, rule_of, unlisted
from tests.vllm_suite.examples import rewrite
from tests.vllm_suite.examples import write_result as write_examples
from tests.vllm_suite.reasons import REASONS, reason_of
from tools.tables import vllm_examples, vllm_tests

SCRIPT = """
from vllm import LLM
    import vllm.envs as envs
url = "http://localhost:8000/v1"
llm = LLM(model="facebook/opt-125m", max_model_len=8000)
print("vllm is not an import, facebook/opt-125m is not quoted")
"""
ORIGIN = {"date": "2026-01-01", "commit": "abc", "machine": {"cpu": "a CPU", "cores": 2}}


def test_only_imports_models_and_the_port_of_an_example_change() -> None:
    assert (
        rewrite(SCRIPT, Path("/a/model"), port=1234)
        == """
from octavo import LLM
    import octavo.envs as envs
url = "http://localhost:1234/v1"
llm = LLM(model="/a/model", max_model_len=8000)
print("vllm is not an import, facebook/opt-125m is not quoted")
"""
    )


def test_an_example_is_in_one_table_only() -> None:
    for name in (*OFFLINE, *ONLINE):
        assert not rule_of(name), name
    assert not OFFLINE.keys() & ONLINE.keys()


def test_a_new_example_is_reported(tmp_path: Path) -> None:
    for name in ("basic/new.py", "features/lora/any.py", *LEFT_OUT, *OFFLINE):
        path = tmp_path / name if name.endswith(".py") else tmp_path / name / "some.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert unlisted(tmp_path) == ["basic/new.py"]


def test_the_table_of_examples_groups_them_by_reason() -> None:
    rows = [
        {"kind": "offline", "example": "a/first.py", "runs": True, "why": ""},
        {"kind": "offline", "example": "a/second.py", "runs": False, "why": "needs a GPU"},
        {"kind": "online", "example": "b/third.py", "runs": True, "why": ""},
    ]
    table = vllm_examples([{"provenance": ORIGIN, "rows": rows}])
    assert "| offline: 1 of 2 run | `first` |" in table
    assert "| offline: needs a GPU | `second` |" in table
    assert "| online: 1 of 1 run | `third` |" in table


def test_the_table_of_tests_counts_each_reason() -> None:
    rows = [
        {"file": "a/test_a.py", "test": "one", "outcome": "passed"},
        {"file": "a/test_a.py", "test": "two", "outcome": "failed", "reason": "model"},
        {"file": "a/test_b.py", "test": "one", "outcome": "error", "reason": "model"},
        {"file": "a/test_b.py", "test": "two", "outcome": "skipped", "reason": "GPUs"},
    ]
    table = vllm_tests([{"provenance": ORIGIN, "vllm_commit": "c0ffee", "rows": rows}])
    assert "| the tests that apply, of vLLM's commit `c0ffee` | 3 |" in table
    assert "| pass | 1 |" in table
    assert "| model | 2 | `test_a`, `test_b` |" in table


@pytest.mark.parametrize("pattern", REASONS)
def test_a_reason_names_a_file_and_is_found(pattern: str) -> None:
    file, _, test = pattern.partition("::")
    assert file.endswith(".py")
    assert reason_of(file, test.replace("*", "[any]")) == REASONS[pattern]


def test_a_result_is_partial_unless_one_run_has_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.vllm_suite.examples.run_git", lambda *_: "c0ffee")
    path = tmp_path / "result.json"
    first, *others = [{"example": name, "kind": "any"} for name in (*OFFLINE, *ONLINE)]
    for rows, partial in (([first], True), (others, True), ([first, *others], False)):
        write_examples(path, tmp_path, rows)
        assert json.loads(path.read_text())["partial"] == partial


def test_results_of_other_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.vllm_suite.__main__.run_git", lambda *_: "c0ffee")
    path = tmp_path / "result.json"
    write_result(path, tmp_path, rows_of("b.py", {"one": ("passed", "")}))
    write_result(path, tmp_path, rows_of("a.py", {"one": ("failed", "wrong")}))
    write_result(path, tmp_path, rows_of("a.py", {"one": ("passed", "")}))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["file"], row["outcome"]) for row in rows] == [
        ("a.py", "passed"),
        ("b.py", "passed"),
    ]
