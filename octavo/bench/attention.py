"""Measures decode attention alone, with one token of each of many sequences.

KV is plain or quantized. Decode attention mostly reads KV, so the unit is bytes of KV per second,
compared with a memory copy. On a GPU it runs from a graph, so that the time of the host does not
count. On a CPU the shapes are smaller, and plain KV is float16, which the CPU kernels read.
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
from octavo.ops import ForwardBatch, Ops, Span
from octavo.ops.backends import select
from octavo.ops.kv import CODES, KV, QuantKV, compress, dtype_name
from octavo.runner.kvstore import KVStore

QUERY_DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
PLAIN_DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float16}  # type of plain KV


class AttentionShape(NamedTuple):
    sequences: int
    tokens: int  # positions of each sequence


SHAPES = {
    "cuda": (AttentionShape(256, 800), AttentionShape(64, 8000)),
    "cpu": (AttentionShape(16, 800), AttentionShape(1, 8000)),
}


def measure(
    device: torch.device,
    heads: int = 16,
    kv_heads: int = 8,
    head_dim: int = 128,
    shapes: tuple[AttentionShape, ...] = (),
    repeat: int = 5,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return a record for each shape and KV dtype, the plain dtype first.

    The default heads are those of Qwen3-0.6B.
    """
    ops = select(device.type)
    plain_dtype = PLAIN_DTYPES[device.type]
    supported_dtypes = ops.kv_dtypes(QUERY_DTYPES[device.type])
    copy_bytes_per_second = copy_bandwidth(device)
    results: list[dict[str, Any]] = []
    for shape in shapes or SHAPES[device.type]:
        plain_seconds = 0.0
        code_dtypes = [dtype for dtype in CODES.values() if dtype in supported_dtypes]
        for dtype in (plain_dtype, *code_dtypes):
            seconds = [
                time_one(ops, device, shape, heads, kv_heads, head_dim, dtype)
                for _ in range(repeat)
            ]
            model = ModelConfig("", 1, 1, 1, heads, kv_heads, head_dim, 1, 1)
            kv_bytes = shape.sequences * shape.tokens * model.kv_bytes_per_token(dtype_name(dtype))
            median_seconds = statistics.median(seconds)
            plain_seconds = plain_seconds or median_seconds
            results.append(
                {
                    **shape._asdict(),
                    "kv": dtype_name(dtype),
                    "kv_bytes": kv_bytes,
                    "seconds": median_seconds,
                    "min_s": min(seconds),
                    "max_s": max(seconds),
                    "bytes_s": kv_bytes / median_seconds,
                    "of_copy": kv_bytes / median_seconds / copy_bytes_per_second,
                    "speedup": plain_seconds / median_seconds,
                }
            )
            advance()
    return {
        "device": device.type,
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": head_dim,
        "copy_bytes_s": copy_bytes_per_second,
        "rows": results,
    }


@torch.inference_mode()
def time_one(
    ops: Ops,
    device: torch.device,
    shape: AttentionShape,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> float:
    """Return the seconds of one call with KV that is not in a cache of the device."""
    block_size = BLOCK_SIZE[device.type]
    blocks_per_sequence = -(-shape.tokens // block_size)
    block_count = shape.sequences * blocks_per_sequence
    model = ModelConfig("", 1, 1, 1, heads, kv_heads, head_dim, 1, 1)
    kv = KVStore(model, CacheConfig(block_size, block_count), dtype, device).view[:, 0]
    fill_random(kv)
    block_ids = list(range(1, block_count + 1))
    random.Random(0).shuffle(block_ids)
    lengths = torch.full((shape.sequences,), shape.tokens, dtype=torch.int32, device=device)
    query_starts = torch.arange(shape.sequences + 1, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        ids=lengths,
        positions=lengths.long() - 1,
        kv_indices=lengths,
        query_start=query_starts,
        seq_lens=lengths,
        block_table=torch.tensor(block_ids, dtype=torch.int32, device=device).view(
            shape.sequences, blocks_per_sequence
        ),
        slots=query_starts[:-1],
        logit_indices=lengths,
        spans=[Span(index, 1, shape.tokens) for index in range(shape.sequences)],
    )
    query = torch.randn(shape.sequences, heads, head_dim, device=device).to(
        QUERY_DTYPES[device.type]
    )
    return seconds_per_call(lambda: ops.attention(query, kv, batch, head_dim**-0.5), device)


def fill_random(kv: KV) -> None:
    """Fill every block with the same random numbers."""
    if isinstance(kv, QuantKV):
        values = torch.randn(kv.shape[1:], device=kv.codes.device)
        codes, scales = compress(values, kv.dtype)
        kv.codes.view(torch.int8).copy_(codes.view(torch.int8).expand(kv.shape))
        kv.scales.copy_(scales.expand(kv.scales.shape))
    else:
        values = torch.randn(kv.shape[1:], device=kv.device)
        kv.copy_(values.expand(kv.shape))


def seconds_per_call(operation: Callable[[], Any], device: torch.device, calls: int = 10) -> float:
    """Return the average seconds of consecutive calls."""
    operation()
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            operation()
        return (time.perf_counter() - started) / calls
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            operation()
    graph.replay()
    start_event = torch.cuda.Event(enable_timing=True)
    end_event = torch.cuda.Event(enable_timing=True)
    start_event.record()
    graph.replay()
    end_event.record()
    torch.cuda.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1e3 / calls
