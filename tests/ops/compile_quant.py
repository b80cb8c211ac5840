"""Compiles the kernels of products with quantised weights for a Hopper GPU, without one: `python -m
tests.ops.compile_quant`.

Launches are recorded instead of made. A line of JSON is printed about each. This needs Triton's
compiler and no driver."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as TritonTensorDescriptor

KERNELS = {
    "quant_gemv": ("gemv_kernel",), "quant_gemm": ("gemm_kernel",), "hopper_gemm": ("hopper_kernel",), "dequantize": ("expand_kernel",),
    "activation_gemm": ("round_kernel", "round_fp8_kernel", "bytes_kernel"), "wide_gemm": ("wide_kernel",),
}  # fmt: skip
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")


class Recorder:
    """Replaces a kernel, and records the arguments of its launches."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    signature, constants, aligned = {}, {}, {}
    for param, value in zip(kernel.params, args, strict=True):
        signature[param.name] = "constexpr"
        if isinstance(value, TensorDescriptor):
            signature[param.name] = (
                f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
            )
        elif isinstance(value, TritonTensorDescriptor):
            signature[param.name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
        elif isinstance(value, torch.Tensor):
            signature[param.name], aligned[param.num,] = (
                f"*{TYPES[value.dtype]}",
                [["tt.divisibility", 16]],
            )
        elif param.is_constexpr or value is None:
            constants[param.num,] = value
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize:
                aligned[param.num,] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, signature, constants, aligned
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={k: options[k] for k in OPTIONS if k in options},
    )


def assembler_warnings(ptx: str) -> list[str]:
    """Return the messages of the assembler about spilled registers, and about tensor core
    instructions that it serialises."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            triton.knobs.nvidia.ptxas.path,
            "-arch=sm_90a",
            "-v",
            file.name,
            "-o",
            os.devnull,
        ]
        messages = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = [
        f"{count} bytes spilled"
        for count in re.findall(r"(\d+) bytes spill stores", messages)
        if int(count) > 16
    ]
    return spilled + [line for line in messages.splitlines() if "serialized" in line]


def main() -> None:
    # The kernels ask torch for these properties when they are imported. They are those of an H200.
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment,return-value]
    from octavo.model import quant
    from octavo.model.dequant import CODED
    from octavo.ops.triton import quant as packed
    from octavo.ops.triton.quant.hopper_gemm import TILES, Hopper
    from octavo.ops.weight import QuantWeight, WeightFormat

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for module, names in KERNELS.items():
        kernel_module = importlib.import_module(f"octavo.ops.triton.quant.{module}")
        for name in names:
            setattr(kernel_module, name, Recorder(getattr(kernel_module, name), launches))
    blocks = WeightFormat(8, 128, is_float=True, quantizes_activations=True, float32_scales=True)
    stored = {str(weight_format): weight_format for weight_format in (*CODED.values(), blocks)}
    for name, weight_format in (quant.FORMATS | stored).items():
        weight, bias = (
            packed.TritonWeight(QuantWeight.empty(weight_format, 1024, 2048)),
            torch.empty(1024, dtype=torch.bfloat16),
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for rows in (1, 16, 32, 64, 128, 256, 1100) if dtype == torch.bfloat16 else (1, 5, 256):
                x, tiling = (
                    torch.empty(rows, 2048, dtype=dtype),
                    packed.choose_tiling(rows, dtype, weight),
                )
                packed.linear(x, weight, tiling=tiling)
                if isinstance(tiling, Hopper) and rows == 256:
                    for other_tiling in (
                        tile._replace(split=split) for tile in TILES for split in (1, 8)
                    ):
                        packed.linear(
                            x, weight, bias, torch.empty(rows, 1024, dtype=dtype), other_tiling
                        )
                while launches:
                    kernel, args, options = launches.pop()
                    compiled = compile_launch(kernel, args, options)
                    uses_inline_asm = any(
                        word in compiled.asm["ptx"] for word in ("lop3.b32", "prmt.b32", "e4m3x2")
                    )
                    line = {
                        "format": name,
                        "dtype": str(dtype),
                        "rows": rows,
                        "tiling": str(tiling),
                        "uses_inline_asm": uses_inline_asm,
                    }
                    if kernel.__name__ in ("hopper_kernel", "bytes_kernel", "wide_kernel"):
                        line |= {
                            "tile": args[-5:],
                            "warnings": assembler_warnings(compiled.asm["ptx"]),
                        }
                    if kernel.__name__ in ("bytes_kernel", "wide_kernel"):
                        line["wgmma"] = re.findall(
                            r"wgmma.mma_async\S*\.(\w+\.\w+)\s", compiled.asm["ptx"]
                        )
                    print(
                        json.dumps(
                            {"kernel": kernel.__name__, "shared": compiled.metadata.shared} | line
                        ),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
