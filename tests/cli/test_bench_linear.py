"""`octavo bench linear`: every product of a model in every format asked for; and what tuning does
with ways that fail."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from octavo.bench import linear, tune
from octavo.bench.model_shapes import LLAMA_8B, SHAPES
from octavo.errors import InvalidRequest

SMALL = LLAMA_8B | dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
    vocab_size=300,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "COLD_BYTES", 2**16)
    monkeypatch.setitem(SHAPES, "llama-8b", SMALL)


def test_products_are_the_models() -> None:
    sizes = [(p.outputs, p.inputs, p.times) for p in linear.products(SMALL)]
    assert sizes == [(128, 64, 2), (64, 64, 2), (192, 64, 2), (64, 96, 2), (300, 64, 1)]
    assert linear.products(LLAMA_8B)[-1][1:] == (128256, 4096, 1)


def test_every_format_is_measured(octavo: Callable[..., Result]) -> None:
    result = octavo("bench", "linear", "llama-8b", "--quant", "int8,int4-g64", "--rows", "1,3")
    assert result.exit_code == 0
    records = json.loads(result.stdout.splitlines()[-1])["records"]
    assert len(records) == 5 * 3 * 2 and all(r["us"] > 0 and r["gb_s"] > 0 for r in records)
    assert {r["format"] for r in records} == {"none", "int8", "int4-g64"}
    assert linear.step_ratios(records)["none", 3][1] == 1.0


def test_a_shape_that_is_none_is_named(octavo: Callable[..., Result]) -> None:
    result = octavo("bench", "linear", "llama-9b")
    assert result.exit_code == 2 and "unknown shape llama-9b: use" in result.stderr


def test_tuning_leaves_out_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from octavo.ops.triton import quant
    from octavo.ops.triton.quant.quant_gemm import Gemm

    good, bad, wrong = Gemm(16, 64, 1, 2, 1), Gemm(16, 48, 1, 2, 1), Gemm(32, 64, 1, 2, 1)
    monkeypatch.setattr(tune, "candidates", lambda form, rows: [bad, wrong, good])
    monkeypatch.setattr(tune, "COMPILE_THREADS", 1)  # the interpreter is for one
    real, lines = quant.linear, []
    monkeypatch.setattr(
        quant,
        "linear",
        lambda x, w, tiling: real(x, w, tiling=tiling) * (2 if tiling == wrong else 1),
    )
    best = tune.tune(SMALL, ("int4-g128",), (3,), lines.append, "cpu")
    assert len(best) == 1 and best[0]["how"] not in (str(bad), str(wrong))
    assert any(str(bad) in line and " fails: " in line for line in lines)
    assert any(str(wrong) in line and "off by" in line for line in lines)
    assert any("(current)" in line for line in lines)


def test_tuning_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="needs a CUDA GPU"):
        tune.tune(SMALL)
