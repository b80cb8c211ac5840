"""Compiles decode attention with and without cascade attention for a Hopper GPU, without one:
`python -m tests.ops.compile_attention`. It prints a line of JSON about each launch."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from tests.batch import make_batch
from tests.ops.compile_invariant import Launch, positional
from tests.ops.compile_quant import Recorder, assembler_warnings, compile_launch

# Query heads, key heads, dimension: Qwen3-0.6B, Llama-8B, Qwen2-7B, Gemma-2B.
SHAPES = ((16, 8, 128), (32, 8, 128), (28, 4, 128), (8, 1, 256))
NUM_ROWS = 32
PREFIX_LENS = {"decode_kernel": 10, "join_kernel": 4}  # the argument that cascade attention adds


def record(launches: list[Launch]) -> None:
    from octavo.ops.kv import QuantKV
    from octavo.ops.triton import attention_kernels, shared_prefixes

    for module, name in (
        (attention_kernels, "prefix_kernel"),
        (attention_kernels, "decode_kernel"),
        (attention_kernels, "join_kernel"),
        (shared_prefixes, "order_kernel"),
        (shared_prefixes, "measure_kernel"),
    ):
        setattr(module, name, Recorder(getattr(module, name), launches))
    attention_kernels.PREFIX_BYTES = 0  # All shapes have cascade attention, also with few rows.
    batch = make_batch([([0], 1500)] * NUM_ROWS, [list(range(1, 25))] * NUM_ROWS, 64, "cpu")
    for heads, kv_heads, dim in SHAPES:
        query = torch.empty(NUM_ROWS, heads, dim, dtype=torch.bfloat16)
        plain = torch.empty(25, 2, kv_heads, 64, dim, dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            scales = plain[..., 0].float().contiguous()
            kv: Any = plain if dtype == torch.bfloat16 else QuantKV(plain.to(dtype), scales)
            for cascade in (False, True):
                attention_kernels.attention(query, kv, batch, 0.1, 0, cascade)


def main() -> None:
    # The kernels ask torch for these properties when they are imported. They are those of an H200.
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(  # type: ignore[assignment,return-value]
        multi_processor_count=132, shared_memory_per_block_optin=232448
    )
    launches: list[Launch] = []
    record(launches)
    for launch in launches:
        kernel, args, options = positional(launch)
        compiled = compile_launch(kernel, args, options)
        ptx = compiled.asm["ptx"]
        line = {
            "kernel": kernel.__name__,
            "cascade": kernel.__name__ not in ("decode_kernel", "join_kernel")
            or args[PREFIX_LENS[kernel.__name__]] is not None,
            "kv": str(args[1].dtype),
            "dim": launch[2].get("HEAD_DIM"),
            "group": launch[2].get("GROUP_SIZE"),
            "shared": compiled.metadata.shared,
            "warps": compiled.metadata.num_warps,
            "stages": options.get("num_stages"),
            "wgmma": ptx.count("wgmma.mma_async"),
            "mma": ptx.count("mma.sync"),
            "warnings": assembler_warnings(ptx),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
