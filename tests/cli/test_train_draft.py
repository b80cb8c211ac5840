"""`octavo train-draft` writes a head and reports how many of its drafts are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

Octavo = Callable[..., Result]


def test_a_head_is_trained_and_its_acceptance_is_reported(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    sizes = ("--texts", "12", "--draft-vocab", "32", "--max-answer", "8", "--epochs", "1")
    result = octavo("train-draft", tiny, "--out", out, *sizes, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert "accepted per step with 3 drafts" in result.stdout
    config = json.loads((out / "config.json").read_text())
    assert config["draft_vocab_size"] == 32
    assert config["training"]["texts"] == 12


def test_a_directory_with_files_is_refused(octavo: Octavo, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = octavo("train-draft", tiny, "--out", tmp_path, "--device", "cpu")
    assert result.exit_code == 2
    assert "is not empty" in result.stderr
