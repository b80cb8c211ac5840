"""Paged batches by hand: what the runner prepares in a real step, for tests that call a model or an
op directly."""

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
    """A block table for each sequence, over blocks 1, 2, ... in random order: neighbours are never
    neighbours in memory."""
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
    """[N, layers, 2, Hk, B, D] with a NaN in every slot: what is read without having been written
    shows."""
    blocks = 1 + max(map(max, tables))
    if dtype in LARGEST:
        store = KVStore(config, CacheConfig(block_size, blocks - 1), dtype, torch.device(device))
        store.tensor[1:] = 255  # a float32 of such bytes is NaN: so is every scale
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
    """One item a chunk (token ids, first position), each with its table. Logits are wanted of every
    token. `slack` is added to what the host believes of the lengths, as happens with steps in
    flight."""
    ids, positions, slots, spans, starts = [], [], [], [], [0]
    for (tokens, start), table in zip(chunks, tables, strict=True):
        where = range(start, start + len(tokens))
        spans.append(
            Span(
                first=len(ids),
                num=len(tokens),
                end=min(where.stop + slack, len(table) * block_size),
            )
        )
        ids += tokens
        positions += where
        slots += [table[p // block_size] * block_size + p % block_size for p in where]
        starts.append(len(ids))
    width = max(map(len, tables))
    return ForwardBatch(
        ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        kv_indices=torch.tensor(slots, device=device),
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
