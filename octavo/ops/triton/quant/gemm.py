"""A quantised matrix times a few rows: weights become bfloat16 in registers and meet the activations in the tensor cores."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.overlap import AVAILABLE, LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.quant.codes import INT4, info_of_tile, halves
from octavo.ops.triton.quant.packed import LOCKS, WORDS, PackedWeight

PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 2
PROLOGUE = 6  # what starting and ending a program costs, in blocks: keeps products from being cut too fine


class Gemm(NamedTuple):
    """How a product of a few rows is cut up: tiles of `outputs` x `rows`, each along all inputs or a part of them."""

    rows: int
    outputs: int  # 64 for 4 warps: a warp group's share of a tensor core instruction
    blocks: int  # of weights in a round
    stages: int  # rounds under way
    resident: int  # programs that fit on a multiprocessor
    after: bool = False  # groups as long as a block: sums are scaled instead of weights

    @property
    def warps(self) -> int:
        return self.outputs // 16


@triton.jit
def _beside(a, b):
    """[N, K] and [N, K] -> [N, 2 K]. Costs nothing: elements stay in the registers they are in."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def _scaled(part, info, group, width, LEAST: tl.constexpr):
    scale, least = info_of_tile(info, group, width, part.shape[0], LEAST)
    part *= scale.to(part.dtype)
    if LEAST:
        part += least.to(part.dtype)
    return part


@triton.jit
def _block(
    word, info, block, width, DTYPE: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, LEAST: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """A block's words [N, 32] -> its weights [N, inputs]; GROUP 0: without their scale."""
    if KIND == INT4:
        a, b, c, d = halves(word, DTYPE, KIND, 0 if LEAST else 8, ASM)
        if GROUP == 32:
            a, b = _scaled(a, info, block * 4, width, LEAST), _scaled(b, info, block * 4 + 1, width, LEAST)
            c, d = _scaled(c, info, block * 4 + 2, width, LEAST), _scaled(d, info, block * 4 + 3, width, LEAST)
        low, high = _beside(a, b), _beside(c, d)
        if GROUP == 64:
            low, high = _scaled(low, info, block * 2, width, LEAST), _scaled(high, info, block * 2 + 1, width, LEAST)
        weights = _beside(low, high)
        if GROUP == 128:
            weights = _scaled(weights, info, block, width, LEAST)
        return weights
    else:
        a, b = halves(word, DTYPE, KIND, 0, ASM)
        if GROUP == 32:
            a, b = _scaled(a, info, block * 2, width, LEAST), _scaled(b, info, block * 2 + 1, width, LEAST)
        return _beside(a, b)


@triton.jit
def join(acc, partial, locks, tile, tiles, M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr):
    """This program's part of a tile to memory; the last program to come adds all parts, in order. (the sum, whether it is)"""
    at = partial + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(at + (tl.program_id(1) * tiles + tile).to(tl.int64) * (M * N), acc)
    tl.debug_barrier()
    last = tl.atomic_add(locks + tile, 1) == SPLIT - 1
    if last:
        acc = tl.zeros([N, M], tl.float32)
        for part in range(SPLIT):
            acc += tl.load(at + (part * tiles + tile).to(tl.int64) * (M * N), cache_modifier=".cg")
        tl.store(locks + tile, 0)
    return acc, last


@triton.jit
def gemm_kernel(
    x, words, info, bias, out, partial, locks, rows, outputs, inputs, blocks, width, KIND: tl.constexpr, GROUP: tl.constexpr,
    LEAST: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ROUND: tl.constexpr, SPLIT: tl.constexpr,
    AFTER: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A tile [N outputs, M rows] of the transposed product, because the tensor cores take their first operand from registers,
    where the weights are made. EVEN: rounds need no mask. SPLIT programs share a tile, each with a part of the inputs."""
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    BLOCK: tl.constexpr = 32 * PARTS
    DTYPE: tl.constexpr = x.dtype.element_ty
    tile, row_tiles = tl.program_id(0), tl.cdiv(rows, M)
    m = (tile % row_tiles) * M + tl.arange(0, M)
    n = (tile // row_tiles) * N + tl.arange(0, N)
    k, output = tl.arange(0, BLOCK), tl.minimum(n, outputs - 1)
    share = tl.cdiv(blocks, ROUND * SPLIT) * ROUND
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, blocks)
    word_at = words + output.to(tl.int64)[:, None] * blocks * 32 + tl.arange(0, 32)[None, :]
    if GROUP == 0 or LEAST:
        info_at = info + output[:, None]
    else:
        info_at = info + tl.minimum((tile // row_tiles) * (N // 2) + tl.arange(0, N // 2), width - 1)[:, None]
    x_at = x + tl.minimum(m, rows - 1)[None, :] * inputs + k[:, None]
    wait_for_inputs()
    acc = tl.zeros([N, M], tl.float32)
    for first in tl.range(begin, end, ROUND, num_stages=STAGES):
        for r in tl.static_range(ROUND):
            block = first + r if EVEN else tl.minimum(first + r, blocks - 1)  # past the end any weights do: inputs are zero
            word = tl.load(word_at + block * 32)
            if EVEN:
                values = tl.load(x_at + (first + r) * BLOCK)
            else:
                values = tl.load(x_at + (first + r) * BLOCK, mask=((first + r) * BLOCK + k < inputs)[:, None], other=0.0)
            weights = _block(word, info_at, block, width, DTYPE, KIND, 0 if AFTER else GROUP, LEAST, ASM)
            if AFTER:
                scale, _ = info_of_tile(info_at, block, width, N, LEAST)
                acc += tl.dot(weights, values, input_precision="ieee") * scale
            else:
                acc = tl.dot(weights, values, acc, input_precision="ieee")
    if GROUP == 0:
        acc *= tl.load(info_at)
    last = True
    if SPLIT > 1:
        acc, last = join(acc, partial, locks, tile, tl.num_programs(0), M, N, SPLIT)
    if last:
        if BIAS:
            acc += tl.load(bias + output)[:, None].to(tl.float32)
        tl.store(out + m[None, :] * outputs + n[:, None], acc, mask=(m < rows)[None, :] & (n < outputs)[:, None])


def gemm(x: Tensor, weight: PackedWeight, bias: Tensor | None, how: Gemm) -> Tensor:
    """x [T, in] -> [T, out]"""
    rows, (outputs, inputs), form = len(x), weight.shape, weight.form
    out = x.new_empty(rows, outputs)
    tiles = triton.cdiv(outputs, how.outputs) * triton.cdiv(rows, how.rows)
    split = split_of(tiles, weight.blocks, how)
    partial = out if split == 1 else torch.empty(split * tiles * how.rows * how.outputs, dtype=torch.float32, device=x.device)
    gemm_kernel[tiles, split](
        x, weight.words, weight.info, bias, out, partial, weight.locks, rows, outputs, inputs, weight.blocks,
        weight.info.shape[-1], weight.kind, form.group, form.least, bias is not None, how.rows, how.outputs, how.blocks, split,
        how.after and form.group == 128 and not form.least, inputs % (how.blocks * WORDS * weight.parts) == 0, how.stages,
        AVAILABLE and x.dtype == torch.bfloat16, num_warps=how.warps, num_stages=how.stages, **LAUNCH,
    )  # fmt: skip
    return out


def split_of(tiles: int, blocks: int, how: Gemm) -> int:
    """Programs a tile: the number for which the slowest multiprocessor has least to do."""
    places = PROCESSORS * how.resident

    def cost(split: int) -> int:
        return triton.cdiv(tiles * split, places) * (triton.cdiv(blocks, split * how.blocks) * how.blocks + PROLOGUE)

    return min(range(1, 17), key=cost) if tiles <= LOCKS else 1
