"""Compiles the batch-invariant kernels for a Hopper GPU, without one: `python -m
tests.ops.compile_invariant`. It prints a line of JSON about each launch."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from tests.batch import make_batch
from tests.ops.compile_quant import OPTIONS, Recorder, assembler_warnings, compile_launch

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def positional(launch: Launch) -> Launch:
    """Return a launch whose constants are positional arguments."""
    kernel, args, options = launch
    named = [options[param.name] for param in kernel.params[len(args) :]]
    return kernel, (*args, *named), {key: options[key] for key in OPTIONS if key in options}


def record_products(launches: list[Launch]) -> None:
    from octavo.ops.triton import invariant_product

    kernel = invariant_product.product_kernel
    invariant_product.product_kernel = Recorder(kernel, launches)
    for dtype, rows_of_dtype in {torch.bfloat16: (1, 17, 64, 300), torch.float32: (1,)}.items():
        weight = torch.empty(1024, 2048, dtype=dtype)
        for rows in rows_of_dtype:
            residual = torch.empty(rows, 1024, dtype=dtype)
            hidden = torch.empty(rows, 2048, dtype=dtype)
            for added in ((residual[0].clone(), None), (None, residual)):
                invariant_product.kernel_product(hidden, weight, *added)


def record_attention(launches: list[Launch]) -> None:
    from octavo.ops.kv import QuantKV
    from octavo.ops.triton import invariant_attention

    for name in ("attention_kernel", "merge_kernel"):
        kernel = getattr(invariant_attention, name)
        setattr(invariant_attention, name, Recorder(kernel, launches))
    batch = make_batch([([0], 1500)], [list(range(1, 25))], 64, "cpu")
    for heads, kv_heads, dim, window in ((32, 8, 128, 0), (9, 3, 64, 100), (4, 1, 256, 512)):
        query = torch.empty(1, heads, dim, dtype=torch.bfloat16)
        kv = torch.empty(25, 2, kv_heads, 64, dim, dtype=torch.bfloat16)
        invariant_attention.attention(query, kv, batch, 0.1, window)
        codes = QuantKV(kv.to(torch.int8), kv[..., 0].float().contiguous())
        invariant_attention.attention(query, codes, batch, 0.1, window)


def main() -> None:
    # The kernels ask torch for these properties when they are imported. They are those of an H200.
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(  # type: ignore[assignment,return-value]
        multi_processor_count=132, shared_memory_per_block_optin=232448
    )
    launches: list[Launch] = []
    record_products(launches)
    record_attention(launches)
    for launch in launches:
        kernel, args, options = positional(launch)
        compiled = compile_launch(kernel, args, options)
        ptx = compiled.asm["ptx"]
        line = {
            "kernel": kernel.__name__,
            "dtype": str(args[0].dtype),
            "shared": compiled.metadata.shared,
            "warps": compiled.metadata.num_warps,
            "stages": options.get("num_stages"),
            "wgmma": ptx.count("wgmma.mma_async"),
            "warnings": assembler_warnings(ptx),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
