"""Paged batches as the runner prepares them in a real step, for tests that call a model or an op
directly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from octavo.config import CacheConfig, ModelConfig
from octavo.ops import ForwardBatch, Span
from octavo.ops.kv import LARGEST
from octavo.runner.kvstore import KVStore


def scattered_tables(lengths: Sequence[int], block_size: int, seed: int = 0) -> list[list[int]]:
    """Return a block table for each sequence. Blocks 1, 2, ... are in random order, so that adjacent
    blocks of a sequence are rarely adjacent in memory."""
    widths = [-(-length // block_size) for length in lengths]
    blocks = list(range(1, sum(widths) + 1))
    random.Random(seed).shuffle(blocks)
    return [[blocks.pop() for _ in range(width)] for width in widths]


def empty_kv(
    config: ModelConfig,
    tables: list[list[int]],
    block_size: int,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return [N, layers, 2, Hk, B, D] with NaN in every entry: a read of an entry that was never
    written gives NaN."""
    blocks = 1 + max(map(max, tables))
    if dtype in LARGEST:
        store = KVStore(config, CacheConfig(block_size, blocks - 1), dtype, torch.device(device))
        store.tensor[1:] = 255  # a float32 of such bytes is NaN, so every scale is NaN
        return store.view
    shape = (blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
    kv = torch.full(shape, float("nan"), dtype=dtype, device=device)
    kv[0] = 0
    return kv


def make_batch(
    chunks: Sequence[tuple[Sequence[int], int]],
    tables: list[list[int]],
    block_size: int,
    device: str,
    slack: int = 0,
) -> ForwardBatch:
    """Return a batch with an item for each chunk (token ids, first position) and its block table.
    Logits are computed for every token. `slack` is added to the host's upper bounds of the lengths,
    as with steps in flight."""
    ids, positions, kv_indices, spans, starts = [], [], [], [], [0]
    for (tokens, start), table in zip(chunks, tables, strict=True):
        chunk_positions = range(start, start + len(tokens))
        spans.append(
            Span(
                first=len(ids),
                num=len(tokens),
                end=min(chunk_positions.stop + slack, len(table) * block_size),
            )
        )
        ids += tokens
        positions += chunk_positions
        kv_indices += [
            table[p // block_size] * block_size + p % block_size for p in chunk_positions
        ]
        starts.append(len(ids))
    width = max(map(len, tables))
    return ForwardBatch(
        ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        kv_indices=torch.tensor(kv_indices, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(
            [start + len(tokens) for tokens, start in chunks], dtype=torch.int32, device=device
        ),
        block_table=torch.tensor(
            [table + [0] * (width - len(table)) for table in tables],
            dtype=torch.int32,
            device=device,
        ),
        slots=torch.arange(len(tables), dtype=torch.int32, device=device),
        logit_indices=torch.arange(len(ids), device=device),
        spans=spans,
    )
