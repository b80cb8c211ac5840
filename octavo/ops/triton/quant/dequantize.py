"""Rows of a quantised matrix written out as plain numbers: for products of many rows, by cuBLAS, and for embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import AVAILABLE, LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.packed_weight import PackedWeight
from octavo.ops.triton.quant.weight_codes import INT4, floats, info_of


class Dense(NamedTuple):
    """How a product of many rows is cut up."""

    # numbers written out at a time: 32 MB, which stay in the L2 cache until they are read
    chunk: int = 1 << 24


@triton.jit
def expand_kernel(
    ids, words, info, out, first_row, count, inputs, row_pairs, width, factor, KIND: tl.constexpr, GROUP: tl.constexpr,
    LEAST: tl.constexpr, IDS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows of the weight as numbers, times a factor: those with these ids, or `count` from the first one on. Each step is
    rounded as QuantWeight.dequantize() does it."""
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    i = tl.program_id(0) * N + tl.arange(0, N)
    v = tl.program_id(1) * V + tl.arange(0, V)
    pair = tl.program_id(1) * V * 4 + tl.arange(0, V * 4)
    word = tl.program_id(1) * V * 8 + tl.arange(0, V * 8)
    inside = (i < count)[:, None]
    wait_for_inputs()
    if IDS:
        row = tl.load(ids + i, mask=i < count, other=0)
    else:
        row = first_row + i
    at = words + row.to(tl.int64)[:, None] * row_pairs + pair[None, :]
    parts = floats(tl.load(at, mask=inside & (pair < row_pairs)[None, :], other=0), KIND, ASM)
    block = tl.minimum(v * 4, row_pairs - 1) // 16
    for j in tl.static_range(PARTS):
        value = tl.join(parts[2 * j], parts[2 * j + 1]).reshape(N, V, 8)
        if KIND == INT4:
            value = value * 16 - (16 if LEAST else 24)
        if GROUP == 0:
            value *= tl.load(info + row, mask=i < count, other=0.0)[:, None, None]
        else:
            if GROUP == 16:  # a part of a block is two groups, of two threads each
                group = ((block * PARTS + j) * 2 + v // 2 % 2)[None, :]
            else:
                group = ((block * PARTS + j) // (GROUP // 32))[None, :]
            scale, least = info_of(info, row[:, None], group, width, inside, LEAST)
            value *= scale[:, :, None]
            if LEAST:
                value += least[:, :, None]
        k = (word // 32) * (32 * PARTS) + word % 32 + 32 * j
        to = out + i.to(tl.int64)[:, None] * inputs + k[None, :]
        tl.store(to, (value * factor).reshape(N, V * 8), mask=inside & (k < inputs)[None, :])


def expand(
    weight: PackedWeight, out: Tensor, first: int, ids: Tensor | None = None, factor: float = 1.0
) -> None:
    """Rows of the weight into out [rows, in]: those with these ids, or from the first one on."""
    rows = len(out)
    pairs = weight.words.shape[1] // 2
    tall = 4
    wide = 128
    grid = triton.cdiv(rows, tall), triton.cdiv(pairs, 4 * wide)
    expand_kernel[grid](
        out if ids is None else ids, weight.words.view(torch.int32), weight.info, out, first, rows, weight.shape[1], pairs,
        weight.info.shape[-1], factor, weight.kind, weight.format.group_size, weight.format.asymmetric, ids is not None, tall, wide, AVAILABLE,
        num_warps=4, enable_fp_fusion=False, **LAUNCH,
    )  # fmt: skip


def dense(x: Tensor, weight: PackedWeight, bias: Tensor | None, how: Dense) -> Tensor:
    """x [T, in] -> [T, out]"""
    outputs, inputs = weight.shape
    out = x.new_empty(len(x), outputs)
    step = max(1, how.chunk // inputs)
    numbers = x.new_empty(min(step, outputs), inputs)
    for first in range(0, outputs, step):
        part = numbers[: min(step, outputs - first)]
        expand(weight, part, first)
        torch.mm(x, part.t(), out=out[:, first : first + step])
    return out if bias is None else out.add_(bias)


def embedding(ids: Tensor, weight: PackedWeight, scale: float) -> Tensor:
    """ids [T] -> [T, in], float32"""
    out = torch.empty(len(ids), weight.shape[1], dtype=torch.float32, device=ids.device)
    expand(weight, out, 0, ids, scale)
    return out
