"""Products of 8 bits with 8 bits: activations are rounded too, each row with a scale of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.packed_weight import PackedWeight
from octavo.ops.triton.quant.quant_gemm import Gemm, cut, write


class Rounded(NamedTuple):
    """How a product of rounded rows is cut up, where it is not the library's."""

    tile: Gemm


@triton.jit
def round_kernel(x, codes, scale, inputs, W: tl.constexpr, row_words):
    """A row of x to 8 bits, its codes laid out as those of weights are; scale: what a code is worth."""
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, W)
    k = (word // 32) * 64 + word % 32
    a = tl.load(x + row * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)
    b = tl.load(x + row * inputs + k + 32, mask=k + 32 < inputs, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0))
    unit = tl.maximum(most, 1e-30) / 127.0
    tl.store(scale + row, unit)
    tl.store(
        codes + row * row_words + word,
        _code(a / unit) | _code(b / unit) << 8,
        mask=word < row_words,
    )


@triton.jit
def _code(value):
    return (tl.floor(value + 0.5).to(tl.int32) & 255).to(tl.int16)


@triton.jit(do_not_specialize=["rows", "split"])
def int8_kernel(
    x, x_scale, words, info, bias, out, partial, locks, rows, outputs, row_bytes, split, BIAS: tl.constexpr,
    ADD: tl.constexpr, SHARED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile [N, M] of the transposed product of bytes with bytes."""
    start_next()
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(rows, M)
    m = (tile % row_tiles) * M + tl.arange(0, M)
    n = (tile // row_tiles) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    output = tl.minimum(n, outputs - 1)
    row = tl.minimum(m, rows - 1)
    share = tl.cdiv(row_bytes, K * split) * K
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, row_bytes)
    word_at = words + output.to(tl.int64)[:, None] * row_bytes + k[None, :]
    x_at = x + row[None, :] * row_bytes + k[:, None]
    wait_for_inputs()
    sums = tl.zeros([N, M], tl.int32)
    for start in tl.range(begin, end, K, num_stages=STAGES):
        w = tl.load(word_at + start, mask=(start + k < row_bytes)[None, :], other=0)
        sums = tl.dot(
            w,
            tl.load(x_at + start, mask=(start + k < row_bytes)[:, None], other=0),
            sums,
            out_dtype=tl.int32,
        )
    acc = sums.to(tl.float32) * tl.load(info + output)[:, None] * tl.load(x_scale + row)[None, :]
    write(acc, bias, out, partial, locks, m, n, rows, outputs, split, BIAS, ADD, SHARED, M, N)


def rounded(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, add: Tensor | None, how: Rounded
) -> Tensor:
    """x [T, in] -> [T, out], written over add where there is one"""
    rows = len(x)
    (outputs, inputs) = weight.shape
    row_words = weight.words.shape[1]
    codes = torch.empty(rows, row_words, dtype=torch.int16, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    wide = triton.next_power_of_2(row_words)
    warps = min(16, max(1, wide // 256))
    round_kernel[rows,](x, codes, scale, inputs, wide, row_words, num_warps=warps, **LAUNCH)
    out = x.new_empty(rows, outputs) if add is None else add
    tile = how.tile
    tiles, split, partial = cut(rows, weight, tile)
    int8_kernel[tiles, split](
        codes.view(torch.int8), scale, weight.words.view(torch.int8), weight.info, bias, out, partial, weight.locks, rows,
        outputs, 2 * row_words, split, bias is not None, add is not None, split > 1, tile.rows, tile.outputs,
        64 * tile.blocks, tile.stages,
        num_warps=tile.warps, num_stages=tile.stages, **LAUNCH,
    )  # fmt: skip
    return out
