"""Decode attention alone: one token of each of many sequences over plain and compressed KV, beside a copy of memory.

All that it does is read KV, so it is measured in bytes of KV a second. On a GPU it runs from a graph, so that the host's time
does not count; on a CPU the shapes are smaller and the plain dtype is float16, which its kernels read.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from octavo.bench.measure_batching import copy_bandwidth
from octavo.config import CacheConfig, ModelConfig
from octavo.memory import BLOCK_SIZE
from octavo.ops import ForwardBatch, Ops, Span, select
from octavo.ops.kv import CODES, KV, QuantKV, compress, dtype_name
from octavo.runner.kvstore import KVStore

QUERY = {"cuda": torch.bfloat16, "cpu": torch.float32}
PLAIN = {"cuda": torch.bfloat16, "cpu": torch.float16}  # KV


class AttentionShape(NamedTuple):
    sequences: int
    tokens: int  # of each


SHAPES = {
    "cuda": (AttentionShape(256, 800), AttentionShape(64, 8000)),
    "cpu": (AttentionShape(16, 800), AttentionShape(1, 8000)),
}


def measure(
    device: torch.device,
    heads: int = 16,
    kv_heads: int = 8,
    dim: int = 128,
    shapes: tuple[AttentionShape, ...] = (),
    repeat: int = 5,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """A row for each shape and KV dtype, plain first. Heads are those of Qwen3-0.6B unless said otherwise."""
    ops = select(device.type)
    plain = PLAIN[device.type]
    offered = ops.kv_dtypes(QUERY[device.type])
    copied = copy_bandwidth(device)
    rows: list[dict[str, Any]] = []
    for shape in shapes or SHAPES[device.type]:
        base = 0.0
        for dtype in (plain, *(kind for kind in CODES.values() if kind in offered)):
            seconds = [
                time_one(ops, device, shape, heads, kv_heads, dim, dtype) for _ in range(repeat)
            ]
            model = ModelConfig("", 1, 1, 1, heads, kv_heads, dim, 1, 1)
            size = shape.sequences * shape.tokens * model.kv_bytes_per_token(dtype_name(dtype))
            median = statistics.median(seconds)
            base = base or median
            rows.append(
                {
                    **shape._asdict(),
                    "kv": dtype_name(dtype),
                    "kv_bytes": size,
                    "seconds": median,
                    "min_s": min(seconds),
                    "max_s": max(seconds),
                    "bytes_s": size / median,
                    "of_copy": size / median / copied,
                    "speedup": base / median,
                }
            )
            done()
    return {
        "device": device.type,
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "copy_bytes_s": copied,
        "rows": rows,
    }


@torch.inference_mode()
def time_one(
    ops: Ops,
    device: torch.device,
    shape: AttentionShape,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> float:
    """Seconds of one call, over KV that no cache holds."""
    block = BLOCK_SIZE[device.type]
    width = -(-shape.tokens // block)
    count = shape.sequences * width
    model = ModelConfig("", 1, 1, 1, heads, kv_heads, dim, 1, 1)
    kv = KVStore(model, CacheConfig(block, count), dtype, device).view[:, 0]
    fill(kv)
    order = list(range(1, count + 1))
    random.Random(0).shuffle(order)
    lengths = torch.full((shape.sequences,), shape.tokens, dtype=torch.int32, device=device)
    rows = torch.arange(shape.sequences + 1, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        ids=lengths,
        positions=lengths.long() - 1,
        kv_indices=lengths,
        query_start=rows,
        seq_lens=lengths,
        block_table=torch.tensor(order, dtype=torch.int32, device=device).view(
            shape.sequences, width
        ),
        slots=rows[:-1],
        logit_indices=lengths,
        spans=[Span(i, 1, shape.tokens) for i in range(shape.sequences)],
    )
    q = torch.randn(shape.sequences, heads, dim, device=device).to(QUERY[device.type])
    return timed(lambda: ops.attention(q, kv, batch, dim**-0.5), device)


def fill(kv: KV) -> None:
    """The same random numbers in every block."""
    one = torch.randn(kv.shape[1:], device=(kv.codes if isinstance(kv, QuantKV) else kv).device)
    if isinstance(kv, QuantKV):
        codes, scales = compress(one, kv.dtype)
        kv.codes.view(torch.int8).copy_(codes.view(torch.int8).expand(kv.shape))
        kv.scales.copy_(scales.expand(kv.scales.shape))
    else:
        kv.copy_(one.expand(kv.shape))


def timed(work: Callable[[], Any], device: torch.device, calls: int = 10) -> float:
    """Seconds of a call, the average of some that follow each other."""
    work()
    if device.type != "cuda":
        before = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - before) / calls
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
