"""Every command checks from the config whether a model fits before it reads weights, and lack of
memory ends in one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from octavo import LLM
from octavo.cli import app
from octavo.engine_options import EngineOptions
from octavo.errors import NotEnoughMemory, is_out_of_memory
from octavo.memory_planner import ModelOutline, Planner, TargetDevice
from tests import tiny
from tests.tiny_tokenizer import write_tokenizer

EIGHT_BILLION = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
)
Free = Callable[[int], None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """Return a function that pretends that so much memory is free."""

    def pretend(size: int) -> None:
        for module in ("octavo.memory", "octavo.memory_planner"):
            monkeypatch.setattr(f"{module}.available_memory", lambda device: (size, size))

    return pretend


@pytest.mark.parametrize(
    "command",
    ["complete -p x", "bench latency", "bench ablation", "bench memory", "bench decoding"],
)
def test_a_command_refuses_a_model_that_does_not_fit(
    command: str, tmp_path: Path, free: Free, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(4 * 2**30)
    monkeypatch.setattr("octavo.model.load.dummy_weights", lambda *_: pytest.fail("loaded"))
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
    write_tokenizer(tmp_path)
    arguments = [*command.split(), str(tmp_path), "--load-format", "dummy"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert "does not fit: it needs" in result.stderr and "4.0 GiB are free" in result.stderr
    assert "Traceback" not in result.output


def test_a_quantised_model_that_does_not_fit_is_not_written(tmp_path: Path, free: Free) -> None:
    free(1000)
    result = CliRunner().invoke(
        app, ["quantize", tiny.model_dir(), str(tmp_path / "out"), "--quant", "int8"]
    )
    assert result.exit_code == 2 and "of memory as int8 before it is written" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_suggested_options_fit(free: Free) -> None:
    free(12 * 2**30)
    options = EngineOptions(device="cpu", load_format="dummy", skip_tokenizer_init=True)
    with pytest.raises(NotEnoughMemory, match="--quant int8") as refused:
        LLM.from_options(EIGHT_BILLION, options)
    assert "(--dtype bfloat16)" not in str(refused.value), "16 bits take 15 GiB"
    free(10**6)
    with pytest.raises(NotEnoughMemory, match="No option makes it fit: use a smaller model"):
        LLM.from_options(EIGHT_BILLION, options)


def test_the_memory_of_a_drafter_counts(free: Free) -> None:
    """Without its drafter the model would fit."""
    target = TargetDevice("cpu", free=2**40, total=2**40, host_free=2**40)
    alone = EngineOptions(max_num_seqs=4, max_model_len=256)
    drafted = EngineOptions(
        max_num_seqs=4,
        max_model_len=256,
        speculative_config=f"draft_model,model={tiny.model_dir()}",
    )
    outline = ModelOutline.read(tiny.model_dir(), alone)
    least = Planner(outline, target).least_memory(alone)
    free(least + 1000)
    small = dict(max_num_seqs=4, max_model_len=256, progress=False)
    assert LLM(tiny.model_dir(), **small).schedule.max_model_len == 256  # type: ignore[arg-type]
    with pytest.raises(NotEnoughMemory, match="does not fit"):
        LLM.from_options(tiny.model_dir(), drafted)


# ---- allocations that fail all the same ----------------------------------------------------------


def test_an_allocation_that_fails_is_recognised() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("x"))
    assert not is_out_of_memory(RuntimeError("other")) and not is_out_of_memory(ValueError())


def fail_to_allocate(*arguments: Any, **more: Any) -> Any:
    return torch.empty(2**60, dtype=torch.uint8)


def test_no_memory_for_an_engine_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.llm.build_runner", fail_to_allocate)
    with pytest.raises(NotEnoughMemory, match="memory ran out. Use a smaller model"):
        LLM(tiny.model_dir(), progress=False)


def test_no_memory_in_a_command_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.bench.linear.products", fail_to_allocate)
    result = CliRunner().invoke(app, ["bench", "linear"])
    assert result.exit_code == 2 and result.stderr.startswith("error: memory ran out.")
