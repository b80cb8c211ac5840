"""`octavo compile`: how it divides its work, and what it says where it cannot do it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo import compile_ahead
from octavo.cli.commands import application
from octavo.engine_options import EngineOptions
from octavo.errors import OctavoError
from octavo.ops.cpu.cpu_features import instruction_set
from octavo.runner import graphs
from octavo.runner.graph_shapes import GraphShape
from tests.tiny import model_dir

GIB = 2**30
with_kernels = pytest.mark.skipif(isinstance(instruction_set(), str), reason="no CPU kernels here")


@pytest.mark.parametrize(
    ("weights", "free", "gpus", "expected"),
    [
        (1.2, 140, 1, 8),
        (16, 140, 1, 5),
        (140, 150, 1, 1),
        (200, 140, 1, 1),
        (1.2, 140, 2, 1),
    ],
)
def test_as_many_processes_as_fit_beside_each_other(
    weights: float, free: int, gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    found = compile_ahead.count_processes(int(weights * GIB), free * GIB, gpus)
    assert found == expected


def test_processes_compile_the_parts_and_report_progress() -> None:
    """On a CPU the processes do the same as on a GPU, and find nothing to compile."""
    options = EngineOptions(device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=60)
    progress: list[tuple[int, int]] = []
    compile_ahead.compile_gpu(
        model_dir("llama"), options, 2, lambda finished, total: progress.append((finished, total))
    )
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_process_that_fails_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = EngineOptions(device="cpu", skip_tokenizer_init=True)
    with pytest.raises(OctavoError, match="kernels cannot be compiled: see the messages above"):
        compile_ahead.compile_gpu(str(tmp_path), options, 1)
    assert str(tmp_path) in capfd.readouterr().err


def test_the_parts_are_all_steps_that_have_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = graphs.StepGraphs.__new__(graphs.StepGraphs)
    steps.decode_sizes = [1, 2, 4, 8]
    steps.mixed_shapes = [GraphShape(64, 0), GraphShape(128, 32)]
    steps.verify_shapes = []
    steps.drafter = None
    ran: list[GraphShape] = []
    monkeypatch.setattr(steps, "padding_inputs", lambda shape: shape, raising=False)
    monkeypatch.setattr(steps, "_run", lambda inputs, shape: ran.append(shape), raising=False)
    for part in range(4):
        steps.compile_part(part, 4)
    assert sorted(ran) == sorted(steps.shapes()) and len(ran) == 6


@with_kernels
def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(blocked))
    with pytest.raises(OctavoError, match="is not writable. Set OCTAVO_CACHE"):
        compile_ahead.compile_cpu()


def test_a_machine_without_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_ISA", "none")
    result = CliRunner().invoke(application(["compile", "plan"]), ["compile", "--device", "cpu"])
    assert result.exit_code != 0
    assert "no CPU kernels to compile: OCTAVO_CPU_ISA=none" in result.output
