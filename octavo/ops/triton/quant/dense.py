"""Rows of a quantised matrix written out as plain numbers: for products of many rows, by cuBLAS, and for embeddings."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.overlap import AVAILABLE, LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.codes import INT4, floats, group_info
from octavo.ops.triton.quant.packed import PackedWeight

CHUNK = 1 << 24  # numbers written out at a time: 32 MB, which stay in the L2 cache until they are read


@triton.jit
def expand_kernel(
    ids, words, info, out, first_row, count, outputs, inputs, row_words, factor, KIND: tl.constexpr, GROUP: tl.constexpr,
    LEAST: tl.constexpr, IDS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows of the weight as numbers, times a factor: those with these ids, or `count` from the first one on."""
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    i, v = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1) * V + tl.arange(0, V)
    wait_for_inputs()
    if IDS:
        row = tl.load(ids + i, mask=i < count, other=0).to(tl.int64)
    else:
        row = tl.minimum(first_row + i, outputs - 1).to(tl.int64)
    word = v[:, None] * 8 + tl.arange(0, 8)[None, :]
    first = (word // 32) * (32 * PARTS) + word % 32
    at = words + row[:, None, None] * row_words + word[None, :, :]
    parts = floats(tl.load(at, mask=(word < row_words)[None, :, :], other=0), KIND, ASM)
    block = tl.minimum(v * 8, row_words - 1) // 32
    for j in tl.static_range(PARTS):
        value = parts[j]
        if KIND == INT4:
            value = value * 16 - (16 if LEAST else 24)
        if GROUP == 0:
            value *= tl.load(info + row)[:, None, None]
        else:
            scale, least = group_info(info + row[:, None], ((block * PARTS + j) // (GROUP // 32))[None, :], outputs, LEAST)
            value *= scale[:, :, None]
            if LEAST:
                value += least[:, :, None]
        k = (first + 32 * j)[None, :, :]
        tl.store(out + i.to(tl.int64)[:, None, None] * inputs + k, value * factor, mask=(i < count)[:, None, None] & (k < inputs))


def expand(weight: PackedWeight, out: Tensor, first: int, ids: Tensor | None = None, factor: float = 1.0) -> None:
    """Rows of the weight into out [rows, in]: those with these ids, or from the first one on."""
    rows, tall, wide = len(out), 4, 128
    grid = triton.cdiv(rows, tall), triton.cdiv(weight.words.shape[1], 8 * wide)
    expand_kernel[grid](
        out if ids is None else ids, weight.words, weight.info, out, first, rows, *weight.shape, weight.words.shape[1], factor,
        weight.kind, weight.form.group, weight.form.least, ids is not None, tall, wide, AVAILABLE, num_warps=4, **LAUNCH,
    )  # fmt: skip


def dense(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [T, in] -> [T, out]"""
    outputs, inputs = weight.shape
    out = x.new_empty(len(x), outputs)
    step = max(1, CHUNK // inputs)
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
