"""`octavo bench compare`: engines in processes of their own, and servers, measured in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from octavo.bench import compare, other_work
from octavo.bench.compare import (
    BenchPrompts,
    Comparison,
    EndpointContender,
    EngineProcess,
)
from octavo.bench.openai_endpoint import OpenAIEndpoint
from octavo.bench.other_work import OtherWork
from octavo.bench.result_file import BenchRun
from octavo.errors import OctavoError
from tests.cli.test_bench_serve import HEAD, answering

Octavo = Callable[..., Result]
# A worker that behaves as its engine's name says.
WORKER = """
import json, sys, time
name = sys.argv[1]
if name == "vllm":
    print(json.dumps({"missing": "vllm is not installed"}), flush=True)
    sys.exit()
print(json.dumps({"version": "1", "weights": "none", "ready_s": 0.1}), flush=True)
for number, line in enumerate(sys.stdin):
    request = json.loads(line)
    if name == "openvino" and number == 7:
        sys.exit(3)
    count = request["count"] - (name == "transformers")
    seconds = len(request["prompts"]) * (len(request["prompts"][0]) + 10 * request["count"]) * 1e-3
    seconds *= 2 if name == "llama.cpp" else 1
    replies = [[5] * count for _ in request["prompts"]]
    print(json.dumps({"seconds": seconds, "replies": replies, "peak_rss_bytes": 2**20}), flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(compare, "WORKER", worker)
    monkeypatch.setattr(compare, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.0)
    monkeypatch.setattr(other_work, "SAMPLE_SECONDS", 0.0)


def test_engines_take_turns_and_those_that_fail_are_named(octavo: Octavo, tmp_path: Path) -> None:
    result = octavo(
        *("bench", "compare", "--repeat", 2, "--json", tmp_path / "r.json"),
        *("--engines", "octavo,llama.cpp,transformers,openvino,vllm"),
        *("--picture", tmp_path / "r.svg"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["octavo", "llama.cpp"]
    assert found["partial"] is True
    assert found["skipped"]["vllm"] == "vllm: vllm is not installed"
    assert "returned [0] tokens instead of 1" in found["skipped"]["transformers"]
    assert found["skipped"]["openvino"] == "openvino ended with exit code 3"
    ours, theirs = found["rows"]
    assert ours["decode"]["median"] == pytest.approx(100) and ours["peak_rss_bytes"] == 2**20
    assert theirs["prefill"]["median"] == pytest.approx(512 / 1.044)
    assert found["bars"]["streams"] == {"best_peer": "llama.cpp", "ratio": pytest.approx(2)}
    assert "Octavo is 2.00 times as fast as llama.cpp" in result.stdout
    assert "partial result" in result.stdout


def test_octavo_with_drafts_is_not_among_the_others() -> None:
    speeds = {"octavo": 2.0, "octavo-drafts": 9.0, "llama.cpp": 1.0}
    rows = [
        {"name": name, **{workload: {"median": speed} for workload in compare.WORKLOADS}}
        for name, speed in speeds.items()
    ]
    assert compare.bars_of(rows)["decode"] == {"best_peer": "llama.cpp", "ratio": 2.0}


def test_the_rounds_that_were_measured_survive_an_interrupt(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EngineProcess.measure

    def interrupted(self: EngineProcess, workload: str, number: int) -> float:
        if number == 2:
            raise KeyboardInterrupt
        return real(self, workload, number)

    monkeypatch.setattr(EngineProcess, "measure", interrupted)
    result = octavo(
        *("bench", "compare", "--repeat", 3, "--engines", "octavo", "--json", tmp_path / "r.json")
    )
    assert result.exit_code == 130
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["partial"] is True and found["rows"][0]["name"] == "octavo"


def test_prompts_of_a_run_differ() -> None:
    source = BenchPrompts(list(range(10_000)))
    prompts = [tuple(source.prompt(number, 32)) for number in range(16)]
    assert len(set(prompts)) == 16 and all(len(prompt) == 32 for prompt in prompts)
    assert len(source.prompt(3, 512)) == 512


def completion(number: int) -> bytes:
    """A server with a list of models, and replies that count."""
    if number == 0:
        body = b'{"data": [{"id": "m"}]}'
    else:
        tokens = {1: 1, 2: 128}.get(number, 64)
        pieces: list[Any] = [
            {"id": f"r{number}", "choices": [{"text": "word", "finish_reason": "length"}]},
            {"id": f"r{number}", "choices": [], "usage": usage(tokens)},
        ]
        body = b"".join(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces)
        body += b"data: [DONE]\n\n"
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def usage(tokens: int) -> dict[str, int]:
    return {"completion_tokens": tokens, "prompt_tokens": 500}


def test_a_server_is_measured_by_the_strict_client(tmp_path: Path) -> None:
    with answering(completion) as port:
        contender = EndpointContender(
            "local", OpenAIEndpoint.parse(f"http://127.0.0.1:{port}"), "ab" * 9
        )
        assert contender.facts["weights"] == "m"
        assert contender.measure("prefill", 1) > 0
        assert contender.measure("decode", 2) > 0
        with pytest.raises(OctavoError, match="local: replies are wrong .* usage says 64"):
            contender.measure("prefill", 3)


def test_a_server_that_does_not_answer_is_left_out(octavo: Octavo, tmp_path: Path) -> None:
    result = octavo(
        *("bench", "compare", "--endpoint", "gone=http://127.0.0.1:1", "--engines", "octavo"),
        *("--repeat", 1, "--json", tmp_path / "r.json"),
    )
    assert result.exit_code == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert "no server answers at 127.0.0.1:1/v1/models" in found["skipped"]["gone"]
    assert found["partial"] is True and len(found["rows"]) == 1


def test_bad_arguments_are_named(octavo: Octavo) -> None:
    result = octavo("bench", "compare", "--engines", "octavo,magic")
    assert result.exit_code == 2 and "unknown engine magic: use octavo" in result.stderr
    result = octavo("bench", "compare", "--endpoint", "http://x")
    assert result.exit_code == 2 and "must be NAME=URL" in result.stderr


def test_a_worker_that_never_starts_is_an_error(tmp_path: Path) -> None:
    compare.WORKER.write_text("import sys; sys.exit(1)")
    with pytest.raises(OctavoError, match="octavo ended with exit code 1"):
        EngineProcess("octavo", sys.executable, tmp_path, 1, BenchPrompts(range(1000)))


def test_engines_that_are_not_installed_are_not_chosen(tmp_path: Path) -> None:
    assert compare.installed_engines(tmp_path) == []
    comparison = Comparison(BenchRun("compare"), 1)
    comparison.measure()
    assert comparison.run.rows == []


class FixedContender:
    """Returns figures one after another."""

    name = "fixed"
    pid: int | None = os.getpid()

    def __init__(self, figures: list[float]):
        self.facts: dict[str, Any] = {"version": "1", "weights": "none"}
        self.figures = iter(figures)

    def measure(self, workload: str, number: int) -> float:
        return next(self.figures)

    def close(self) -> None:
        pass


def test_a_measurement_beside_other_work_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.0] * 3 + [0.5, 0.02, 0.0, *[0.4, 0.3, 0.2, 0.25, 0.5]])
    monkeypatch.setattr(OtherWork, "share", lambda self: next(shares))
    monkeypatch.setattr(other_work, "wait_for_others", lambda pids: None)
    run = BenchRun("compare")
    comparison = Comparison(run, 1)
    figures = [1.0, 1.0, 1.0, 10.0, 20.0, 30.0, 41.0, 42.0, 43.0, 44.0, 45.0]
    comparison.add("fixed", lambda: FixedContender(figures))
    comparison.measure()
    (row,) = run.rows
    assert row["decode"]["median"] == 20 and row["prefill"]["median"] == 30
    assert row["streams"]["median"] == 43, "the least disturbed of five attempts counts"
    assert run.result["other_work"] == 0.2
    assert "Other programs used up to 20%" in compare.notes(run.result)[-1]


def test_the_work_of_other_programs_is_seen() -> None:
    program = "import time\nwhile True: pass"
    others = OtherWork()
    before, _ = others._read()
    with subprocess.Popen([sys.executable, "-c", program]) as busy:
        time.sleep(1.0)
        after, _ = others._read()
        busy.kill()
    assert after - before > 0.02
