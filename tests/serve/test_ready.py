"""Ready means ready: with an empty kernel cache, no request waits for a compilation once the server
says that it is ready."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.model import embedded
from octavo.ops.cpu.cpu_features import instruction_set
from tests.serve.running import ROOT, Running, server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(isinstance(instruction_set(), str), reason="no CPU kernels here"),
]
# A request may take so much longer than the next one like it. Other work on the machine may double
# the time of a request.
MOST_SECONDS = 0.25
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
LONG = " ".join(["river"] * 200)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "top-p, top-k and min-p": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 5},
    "prompt logprobs": {"temperature": 0, "logprobs": 2, "echo": True},
    "structured": {"temperature": 0, "structured_outputs": {"json": SCHEMA}, "max_tokens": 20},
    "long prompt": {"temperature": 0, "prompt": LONG},
    "n = 2": {"temperature": 0.8, "n": 2},
    "beam search": {"use_beam_search": True, "n": 2, "temperature": 0},
    "logit bias": {"temperature": 0, "logit_bias": {"5": 2.0}},
}


def seconds_of(running: Running, fields: dict[str, Any], number: int) -> float:
    """`number` keeps prompts apart, which the prefix cache would answer otherwise."""
    prompt = f"{number} {fields.get('prompt', 'once upon a time')}"
    body = {"max_tokens": 4, "cache_salt": str(number), **fields, "prompt": prompt}
    begun = time.monotonic()
    reply = running.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return time.monotonic() - begun


def first_and_next(running: Running) -> dict[str, tuple[float, float]]:
    first = {kind: seconds_of(running, fields, 1) for kind, fields in KINDS.items()}
    return {
        kind: (first[kind], min(seconds_of(running, fields, number) for number in (2, 3)))
        for kind, fields in KINDS.items()
    }


@pytest.mark.skipif(embedded.find_spec(embedded.PACKAGE) is None, reason=embedded.INSTALL)
def test_the_first_request_of_each_kind_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    with server(tmp_path, model=None, engine={"max_model_len": 2048}) as running:
        times = first_and_next(running)
    late = {
        kind: (first, later)
        for kind, (first, later) in times.items()
        if first - 2 * later > MOST_SECONDS
    }
    assert not late, (late, times)


def test_compile_prepares_the_cache(tmp_path: Path) -> None:
    environment = os.environ | {"OCTAVO_CACHE": str(tmp_path)}
    argv = [sys.executable, "-m", "octavo", "compile"]
    runs = []
    for _ in range(2):
        found = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        runs.append(found.stdout)
    assert runs[0].startswith("compiled CPU kernels for ") and str(tmp_path) in runs[0]
    assert "were compiled before" in runs[1]
    program = "from octavo.ops.cpu.thread_pool import kernels; kernels()"
    argv = [sys.executable, "-c", program]
    started = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert started.returncode == 0 and "compiling" not in started.stderr


def test_two_processes_compile_once(tmp_path: Path) -> None:
    environment = os.environ | {"OCTAVO_CACHE": str(tmp_path)}
    argv = [sys.executable, "-c", "from octavo.ops.cpu.thread_pool import kernels; kernels()"]
    processes = [
        subprocess.Popen(argv, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert sorted("compiling CPU kernels" in text for text in errors) == [False, True], errors
    assert sorted("another process compiles" in text for text in errors) == [False, True], errors
