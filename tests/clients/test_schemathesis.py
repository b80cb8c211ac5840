"""schemathesis, which makes requests up from our own description: good ones, bad ones, and
everything between."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed: run `make test-clients`")

from tests.serve.running import Running, server

pytestmark = pytest.mark.slow

# All its checks are on. Two are told of a status more, which is then looked at here, one by one: a
# client's own deadline of a nanosecond is a 504, and what no schema can say is a 400.
CONFIG = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "504"]
"""
# Tools fit in the context, and most replies are short.
ENGINE = {"max_model_len": 384, "override_generation_config": {"max_new_tokens": 8}}
REFUSAL_MS = 1000  # the longest time to refuse a request
# After one request to /sleep, all others are refused.
SLEEP_PATHS = ("/sleep", "/wake_up")
# Requests that are good field by field and refused all the same: by code or message.
WHY = re.compile(
    "|".join((
        # what is in the text
        "^context_length_exceeded", "tokens, but the context holds", "cannot be used",
        "^invalid_structured_output", "^structured_output_failed",
        "fit in 64 bits", "logit_bias names token",
        # 1.0 is an integer to a schema
        "expected integer, got number", "token ids must be integers",
        "the chat template has no option", "chat_template_kwargs may not name",  # the model's own
        # fields that do not go together
        "only with stream: true", "cannot be streamed", "needs logprobs", "tool_choice needs tools",
        "is for beam search", "not supported with beam search", "search does not support",
        "two tools have the name", "has no tool with this name", "can only be JSON",
        "both say what the text must match", "specify different outputs", "exclude each other", "no token is left", "no token could be generated", "two keys for token",
        r"min_tokens.* must not exceed", r"best_of must be in \[", "must be 1 at temperature 0", "n x prompts", "x prompts can",
        "prompt logprobs, but at most", "continue_final_message", "tool_calls",
        "computes no embeddings", "names no tool of the request",
        "functions is the old form of tools", "function_call needs functions",
        r"repetition_detection.min_pattern_size must", "dimensions must be at most",
        "must have one text, or as many as", r"can have at most \d+ prompts",
        "must start with one of the triggers",
        "Cannot cancel a synchronous response",
        "background can only be used when", "background is not supported",
    ))
)  # fmt: skip


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_requests_made_from_the_description(tmp_path: Path, mode: str) -> None:
    report = tmp_path / "report.har"
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with server(tmp_path, engine=ENGINE, limits={"prompts": 32}) as running:
        options = {
            "--mode": mode,
            "--seed": "1",
            "--phases": "coverage,fuzzing",
            "--max-examples": "25",
            "--suppress-health-check": "all",
            "--report": "har",
            "--report-har-path": str(report),
        }
        program = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{running.url}/openapi.json",
            "--continue-on-failure",
        ]
        program += [part for pair in options.items() for part in pair]
        for path in SLEEP_PATHS:
            program += ["--exclude-path", path]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=3000)
        running.wait(seconds=5)
        assert "Traceback" not in running.log.read_text()
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
        entries = json.loads(report.read_text())["log"]["entries"]
        statuses = Counter(entry["response"]["status"] for entry in entries)
        assert statuses[200 if mode == "positive" else 400] > 300, statuses
        for entry in entries:
            check(entry, mode)
            is_refusal = 400 <= entry["response"]["status"] < 500
            if is_refusal and entry["time"] > REFUSAL_MS:
                check_refusal_time(entry, running)


def check(entry: dict[str, Any], mode: str) -> None:
    """No 5xx but for a deadline that the client set, and a good request refused for a reason."""
    status, text = entry["response"]["status"], entry["response"]["content"].get("text", "")
    assert 200 <= status < 500 or (status == 504 and "within its timeout" in text), entry
    if mode == "positive" and status == 400:
        error = json.loads(text)["error"]
        reason = error if isinstance(error, str) else f"{error.get('code')} {error['message']}"
        assert WHY.search(reason), (
            error,
            entry["request"].get("postData", {}).get("text", "")[:2000],
        )


def check_refusal_time(entry: dict[str, Any], running: Running) -> None:
    """A refusal that was slow, as on a busy machine, is quick when the request is sent again."""
    request = entry["request"]
    path = request["url"].removeprefix(running.url)
    headers = {
        header["name"]: header["value"]
        for header in request["headers"]
        if header["name"].lower() in ("content-type", "accept")
    }
    content = request.get("postData", {}).get("text", "").encode()
    times = []
    for _ in range(5):
        reply = running.http.request(request["method"], path, content=content, headers=headers)
        assert reply.status_code == entry["response"]["status"], request
        times.append(reply.elapsed.total_seconds() * 1000)
    assert min(times) < REFUSAL_MS, f"{times} ms to say no: {request}"
