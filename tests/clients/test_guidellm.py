"""guidellm, a load generator: what it counts is what the server counts, and nothing fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("guidellm", reason="guidellm is not installed: run `make test-clients`")

from tests import tiny
from tests.serve.running import Running, server

pytestmark = pytest.mark.slow
REQUESTS, PROMPT, OUTPUT = 24, 48, 16


@pytest.mark.parametrize(
    ("route", "profile"),
    [
        ("/v1/chat/completions", "kind=concurrent,streams=4"),
        ("/v1/completions", "kind=constant,rate=20"),
    ],
)
def test_a_load(tmp_path: Path, route: str, profile: str) -> None:
    report = tmp_path / "report.json"
    with server(tmp_path) as running:
        before = running.metrics()
        done = guidellm(running, tmp_path, route, profile, report)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        time.sleep(0.3)  # the engine's own counts come a moment after the reply
        after = running.metrics()
    (found,) = json.loads(report.read_text())["benchmarks"]
    metrics = found["metrics"]
    assert metrics["request_totals"] == {
        "successful": REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": REQUESTS,
    }
    assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * OUTPUT
    prompts = metrics["prompt_token_count"]["successful"]["total_sum"]
    assert prompts >= REQUESTS * PROMPT
    extra = [
        after[name] - before[name]
        for name in ("octavo:prompt_tokens_total", "octavo:generation_tokens_total")
    ]
    assert extra[0] >= prompts and extra[1] >= REQUESTS * OUTPUT, (
        "it may send a request of its own first"
    )
    for request in found["requests"]["successful"]:
        times = request["info"]["timings"]
        assert (
            times["request_start"]
            < times["first_token_iteration"]
            <= times["last_token_iteration"]
            <= times["request_end"]
        )


def guidellm(
    running: Running, folder: Path, route: str, profile: str, report: Path
) -> subprocess.CompletedProcess[str]:
    options = {
        "--backend": f"kind=openai_http,target={running.url},request_format={route}",
        "--profile": profile,
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": f"kind=huggingface_auto,model={tiny.model_dir()}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output": f"kind=json,path={report}",
    }
    program = [
        sys.executable,
        "-m",
        "guidellm",
        "run",
        "--disable-console",
        *(part for pair in options.items() for part in pair),
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
