"""schemathesis, which makes requests up from our own description: good ones, bad ones, and everything between."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed: run `make test-clients`")

from tests.serve.running import server

pytestmark = pytest.mark.slow

# What is left out: requests that are good field by field and bad together (min_tokens above max_tokens) are refused, which it
# calls a fault; and a client's own deadline of a nanosecond is a 504, which it calls the server's. The latter is checked below.
# /v1/chat/completions/render takes the requests of its neighbour, and does not look at what only matters for generating.
LEFT_OUT = "positive_data_acceptance,not_a_server_error"


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_requests_made_from_the_description(tmp_path: Path, mode: str) -> None:
    report = tmp_path / "report.har"
    with server(tmp_path, engine={"max_model_len": 256}) as running:
        options = {
            "--mode": mode,
            "--seed": "1",
            "--phases": "coverage,fuzzing",
            "--max-examples": "25",
            "--exclude-checks": LEFT_OUT,
            "--exclude-path": "/v1/chat/completions/render" if mode == "negative" else "/none",
            "--suppress-health-check": "all",
            "--report": "har",
            "--report-har-path": str(report),
        }
        program = [sys.executable, "-m", "schemathesis.cli", "run", f"{running.url}/openapi.json", "--continue-on-failure"]
        program += [part for pair in options.items() for part in pair]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
        running.wait(seconds=5)
        assert "Traceback" not in running.log.read_text()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    entries = json.loads(report.read_text())["log"]["entries"]
    statuses = Counter(entry["response"]["status"] for entry in entries)
    assert statuses[200 if mode == "positive" else 400] > 300, statuses
    for entry in entries:
        status, text = entry["response"]["status"], entry["response"]["content"].get("text", "")
        assert status < 500 or (status == 504 and "deadline_exceeded" in text), entry
        assert status < 400 or entry["time"] < 1000, f"{entry['time']} ms to say no: {entry['request']}"
