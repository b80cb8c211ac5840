"""`octavo run-batch` writes one reply for each line of a file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from octavo.serve import offline_batch
from octavo.serve.offline_batch import BatchProgress
from octavo.serve.serve_config import ServeConfig
from tests import tiny


def test_replies_reach_a_program_that_has_opened_the_file(tmp_path: Path) -> None:
    """The file is written in place: another file of the same name would not reach the program."""
    source = tmp_path / "requests.jsonl"
    bodies = [{"model": "tiny", "prompt": "x", "max_tokens": count} for count in (1, 2, 3)]
    lines = [
        {"custom_id": f"{index}", "method": "POST", "url": "/v1/completions", "body": body}
        for index, body in enumerate(bodies)
    ]
    source.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    target = tmp_path / "replies.jsonl"
    target.write_text("an earlier text that is longer than nothing")
    command = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(tiny.model_dir())]
    command += ["--served-model-name", "tiny", "--max-model-len", "64"]
    with target.open() as opened:
        run = subprocess.run(
            [sys.executable, "-m", "octavo", *command],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr
        replies = [json.loads(line) for line in opened]
    assert sorted(reply["custom_id"] for reply in replies) == ["0", "1", "2"]
    for reply in replies:
        usage = reply["response"]["body"]["usage"]
        assert usage["completion_tokens"] <= int(reply["custom_id"]) + 1
    assert not target.with_name("replies.jsonl.partial").exists()


def test_a_line_that_is_no_request_fails_the_command_after_the_others(
    tmp_path: Path, octavo: Callable[..., Result]
) -> None:
    source = tmp_path / "requests.jsonl"
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    good = {"custom_id": "good", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(f'{{"other": 1}}\n{json.dumps(good)}\n')
    target = tmp_path / "replies.jsonl"
    flags = ["--model", tiny.model_dir(), "--served-model-name", "tiny", "--max-model-len", "64"]
    result = octavo("run-batch", "-i", source, "-o", target, *flags)
    assert result.exit_code == 1 and "that are no requests: 1;" in result.output
    replies = {line["custom_id"]: line for line in map(json.loads, target.open())}
    assert replies["line-1"]["error"]["code"] == "invalid_line"
    assert replies["good"]["response"]["status_code"] == 200


def test_options_of_the_server_reach_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, octavo: Callable[..., Result]
) -> None:
    found: list[ServeConfig] = []

    async def run_file(config: ServeConfig, *_: Any) -> BatchProgress:
        found.append(config)
        return BatchProgress()

    monkeypatch.setattr(offline_batch, "run_file", run_file)
    source = tmp_path / "requests.jsonl"
    source.touch()
    given = {"tool_parser": "hermes", "thinking_token_budget": 24, "batch_concurrency": 3}
    flags = [
        word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    assert octavo("run-batch", "-i", source, "-o", tmp_path / "replies", *flags).exit_code == 0
    (config,) = found
    assert {name: getattr(config, name) for name in given} == given
