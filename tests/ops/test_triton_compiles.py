"""The kernels compile for a Hopper GPU and fit into its shared memory, which the interpreter does
not test."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SHARED = 227 * 1024  # bytes a program may have


@pytest.mark.slow
def test_every_product_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_quant"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr[-2000:]
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    kernels = {
        "gemv_kernel",
        "gemm_kernel",
        "hopper_kernel",
        "expand_kernel",
        "round_kernel",
        "round_fp8_kernel",
        "bytes_kernel",
        "wide_kernel",
    }
    assert {line["kernel"] for line in lines} == kernels
    assert [line for line in lines if line["shared"] > SHARED] == []
    with_asm = ("gemv_kernel", "gemm_kernel", "hopper_kernel")
    products = [
        line for line in lines if line["kernel"] in with_asm and "float32" not in line["dtype"]
    ]
    # Codes are converted by inline PTX, not by the plain expressions.
    assert products and all(line["uses_inline_asm"] for line in products)
    # The assembler does not let tensor cores wait for each product.
    assert [line["warnings"] for line in lines if line.get("warnings")] == []
    # Tensor cores multiply fp8 activations with fp8 weights.
    products = [
        line
        for line in lines
        if line["kernel"] in ("bytes_kernel", "wide_kernel") and "fp8" in line["format"]
    ]
    assert products and all(set(line["wgmma"]) == {"e4m3.e4m3"} for line in products)


@pytest.mark.slow
def test_cascade_attention_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_attention"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr[-2000:]
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert {(line["kernel"], line["cascade"]) for line in lines} == {
        ("decode_kernel", False),
        ("decode_kernel", True),
        ("join_kernel", False),
        ("join_kernel", True),
        ("order_kernel", True),
        ("measure_kernel", True),
        ("prefix_kernel", True),
    }
    assert [line for line in lines if line["shared"] > SHARED] == []
    prefixes = [line for line in lines if line["kernel"] == "prefix_kernel"]
    assert all(line["wgmma"] > 0 for line in prefixes)
    # Two programs fit a multiprocessor, as PREFIX_PROGRAMS assumes.
    assert all(2 * line["shared"] < SHARED for line in prefixes if line["dim"] == 128)
    # With compressed KV and heads of 256, some registers are spilled.
    fitting = [line for line in prefixes if line["dim"] == 128 or "bfloat16" in line["kv"]]
    assert [line["warnings"] for line in fitting if line["warnings"]] == []


@pytest.mark.slow
def test_batch_invariant_kernels_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_invariant"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr[-2000:]
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert {line["kernel"] for line in lines} == {
        "product_kernel",
        "attention_kernel",
        "merge_kernel",
    }
    assert [line for line in lines if line["shared"] > SHARED] == []
    on_tensor_cores = [
        line
        for line in lines
        if line["dtype"] == "torch.bfloat16" and line["kernel"] != "merge_kernel"
    ]
    assert on_tensor_cores and all(line["wgmma"] > 0 for line in on_tensor_cores)
    # The products of few rows keep everything in registers.
    spills = [line for line in lines if line["kernel"] == "product_kernel" and line["stages"] > 4]
    assert spills and not any(line["warnings"] for line in spills)
