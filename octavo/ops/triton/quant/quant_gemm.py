"""A quantised matrix times a few rows: weights become bfloat16 in registers and meet the activations in the tensor cores."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import AVAILABLE, LAUNCH, fetch, start_next, wait_for_inputs
from octavo.ops.triton.quant.packed_weight import LOCKS, WORDS, PackedWeight
from octavo.ops.triton.quant.weight_codes import INT4, halves, info_of_tile

PROCESSORS = (
    torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 2
)
# what starting and ending a program costs, in blocks: keeps products from being cut too fine
PROLOGUE = 6


class Gemm(NamedTuple):
    """How a product of a few rows is cut up: tiles of `outputs` x `rows`, each along all inputs or a part of them."""

    rows: int
    outputs: int
    blocks: int  # of weights in a round
    stages: int  # rounds under way
    resident: int  # programs that fit on a multiprocessor
    after: bool = False  # groups as long as a block: sums are scaled instead of weights
    tall: int = 16  # outputs of a warp: four warps have 64 together in one tensor core instruction

    @property
    def warps(self) -> int:
        return self.outputs // self.tall


@triton.jit
def _beside(a, b):
    """[N, K] and [N, K] -> [N, 2 K]. Costs nothing: elements stay in the registers they are in."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def _scaled(part, info, group, width, LEAST: tl.constexpr, LESS: tl.constexpr):
    """part [N, K]: codes less LESS. With as many scales added, what is least is near zero, and rounding it costs little."""
    scale, least = info_of_tile(info, group, width, part.shape[0], LEAST)
    if LEAST:
        return part * scale.to(part.dtype) + (least + LESS * scale).to(part.dtype)
    else:
        return part * scale.to(part.dtype)


@triton.jit
def _scaled_by_two(part, info, group, width, LEAST: tl.constexpr):
    """part [N, 32]: codes of two groups of 16."""
    scale, least = info_of_tile(info, group, width, part.shape[0], LEAST)
    other_scale, other_least = info_of_tile(info, group + 1, width, part.shape[0], LEAST)
    first = tl.arange(0, 32)[None, :] < 16
    part = part * tl.where(first, scale, other_scale).to(part.dtype)
    if LEAST:
        part += tl.where(first, least, other_least).to(part.dtype)
    return part


@triton.jit
def _block(
    word, info, block, width, DTYPE: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, LEAST: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """A block's words [N, 32] -> its weights [N, inputs]; GROUP 0: without their scale, and blocks may be several."""
    if KIND == INT4:
        a, b, c, d = halves(word, DTYPE, KIND, ASM)
        if GROUP == 32:
            a = _scaled(a, info, block * 4, width, LEAST, 8)
            b = _scaled(b, info, block * 4 + 1, width, LEAST, 8)
            c = _scaled(c, info, block * 4 + 2, width, LEAST, 8)
            d = _scaled(d, info, block * 4 + 3, width, LEAST, 8)
        low = _beside(a, b)
        high = _beside(c, d)
        if GROUP == 64:
            low = _scaled(low, info, block * 2, width, LEAST, 8)
            high = _scaled(high, info, block * 2 + 1, width, LEAST, 8)
        weights = _beside(low, high)
        if GROUP == 128:
            weights = _scaled(weights, info, block, width, LEAST, 8)
        return weights
    else:
        a, b = halves(word, DTYPE, KIND, ASM)
        if GROUP == 32:
            a = _scaled(a, info, block * 2, width, LEAST, 0)
            b = _scaled(b, info, block * 2 + 1, width, LEAST, 0)
        if GROUP == 16:
            a = _scaled_by_two(a, info, block * 4, width, LEAST)
            b = _scaled_by_two(b, info, block * 4 + 2, width, LEAST)
        return _beside(a, b)


@triton.jit
def write(
    acc, bias, out, partial, locks, m, n, rows, outputs, split, BIAS: tl.constexpr, ADD: tl.constexpr, SHARED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile acc [N, M] of the transposed product to out [rows, outputs]. ADD: to what is there. SHARED: it is one of `split`
    parts, which all go to memory; the program that comes last adds them, in their order."""
    if not SHARED:
        _store(acc, bias, out, m, n, rows, outputs, BIAS, ADD)
    else:
        tile = tl.program_id(0)
        tiles = tl.num_programs(0)
        at = partial + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(at + (tl.program_id(1) * tiles + tile).to(tl.int64) * (M * N), acc)
        tl.debug_barrier()
        if tl.atomic_add(locks + tile, 1) == split - 1:
            acc = tl.zeros([N, M], tl.float32)
            for part in range(split):
                acc += tl.load(
                    at + (part * tiles + tile).to(tl.int64) * (M * N), cache_modifier=".cg"
                )
            tl.store(locks + tile, 0)
            _store(acc, bias, out, m, n, rows, outputs, BIAS, ADD)


@triton.jit
def _store(acc, bias, out, m, n, rows, outputs, BIAS: tl.constexpr, ADD: tl.constexpr):
    if BIAS:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0)[:, None].to(tl.float32)
    at = out + m[None, :] * outputs + n[:, None]
    inside = (m < rows)[None, :] & (n < outputs)[:, None]
    if ADD:
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, acc, mask=inside)


@triton.jit
def _finished(acc, ASM: tl.constexpr):
    """Wait for the tensor cores. Triton 3.6 lets a product run on into the next round, where the registers with its weights are
    filled anew while they are still being read. What has to look at the sums has to wait for them."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [acc], tl.float32, is_pure=False, pack=1
        )
    else:
        return acc


@triton.jit(do_not_specialize=["rows", "split"])
def gemm_kernel(
    x, words, info, bias, out, partial, locks, rows, outputs, inputs, blocks, width, split, KIND: tl.constexpr,
    GROUP: tl.constexpr, LEAST: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    ROUND: tl.constexpr, SHARED: tl.constexpr, AFTER: tl.constexpr, EVEN: tl.constexpr, LINES: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A tile [N outputs, M rows] of the transposed product, because the tensor cores take their first operand from registers,
    where the weights are made. AFTER: sums are scaled, not weights. EVEN: rounds need no mask. SHARED: `split` programs have a
    tile, each with a part of the inputs."""
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    BLOCK: tl.constexpr = 32 * PARTS
    DTYPE: tl.constexpr = x.dtype.element_ty
    # blocks that one instruction multiplies: those without scales between
    WIDE: tl.constexpr = ROUND if GROUP == 0 else 1
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(rows, M)
    m = (tile % row_tiles) * M + tl.arange(0, M)
    n = (tile // row_tiles) * N + tl.arange(0, N)
    word = tl.arange(0, 32 * WIDE)
    k = tl.arange(0, BLOCK * WIDE)
    output = tl.minimum(n, outputs - 1)
    if WIDE > 1:  # all words' first parts come before all their second ones
        k = (k % (32 * WIDE)) // 32 * BLOCK + k // (32 * WIDE) * 32 + k % 32
        k = tl.max_contiguous(tl.multiple_of(k, 32), 32)
    share = tl.cdiv(blocks, ROUND * split) * ROUND
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, blocks)
    row_at = words + output.to(tl.int64) * blocks * 32
    fetch(
        row_at[:, None]
        + tl.minimum(begin * 32 + tl.arange(0, LINES) * 64, blocks * 32 - 1)[None, :]
    )
    word_at = row_at[:, None] + word[None, :]
    x_at = x + tl.minimum(m, rows - 1)[None, :] * inputs + k[:, None]
    if LEAST or info.dtype.element_ty == tl.float32:
        info_at = info + output[:, None]
    else:
        info_at = (
            info
            + tl.minimum((tile // row_tiles) * (N // 2) + tl.arange(0, N // 2), width - 1)[:, None]
        )
    wait_for_inputs()
    acc = tl.zeros([N, M], tl.float32)
    for first in tl.range(begin, end, ROUND, num_stages=STAGES):
        for r in tl.static_range(0, ROUND, WIDE):
            if EVEN:
                block = first + r
                codes = tl.load(word_at + block * 32)
                values = tl.load(x_at + block * BLOCK)
            else:  # past the end weights may be any: inputs are zero
                codes = tl.load(
                    word_at + (first + r) * 32,
                    mask=((first + r) * 32 + word < blocks * 32)[None, :],
                    other=0,
                )
                values = tl.load(
                    x_at + (first + r) * BLOCK,
                    mask=((first + r) * BLOCK + k < inputs)[:, None],
                    other=0.0,
                )
                block = tl.minimum(first + r, blocks - 1)
            weights = _block(
                codes, info_at, block, width, DTYPE, KIND, 0 if AFTER else GROUP, LEAST, ASM
            )
            if AFTER:
                scale, _ = info_of_tile(info_at, block, width, N, LEAST)
                acc += tl.dot(weights, values, input_precision="ieee") * scale
            else:
                acc = tl.dot(weights, values, acc, input_precision="ieee")
        acc = _finished(acc, ASM)
    if GROUP == 0:
        acc *= tl.load(info_at)
    write(acc, bias, out, partial, locks, m, n, rows, outputs, split, BIAS, ADD, SHARED, M, N)


def gemm(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, add: Tensor | None, how: Gemm
) -> Tensor:
    """x [T, in] -> [T, out], written over add where there is one"""
    rows = len(x)
    (outputs, inputs) = weight.shape
    form = weight.format
    out = x.new_empty(rows, outputs) if add is None else add
    tiles, split, partial = cut(rows, weight, how)
    gemm_kernel[tiles, split](
        x, weight.words, weight.info, bias, out, partial, weight.locks, rows, outputs, inputs, weight.blocks,
        weight.info.shape[-1], split, weight.kind, form.group_size, form.asymmetric, bias is not None, add is not None, how.rows,
        how.outputs, how.blocks, split > 1, how.after and form.group_size == 128 and not form.asymmetric,
        inputs % (how.blocks * WORDS * weight.parts) == 0,
        triton.next_power_of_2(max(1, how.blocks * (how.stages - 1) // 2)), how.stages,
        AVAILABLE and x.dtype != torch.float32, num_warps=how.warps, num_stages=how.stages, **LAUNCH,
    )  # fmt: skip
    return out


def cut(rows: int, weight: PackedWeight, how: Gemm) -> tuple[int, int, Tensor | None]:
    """Tiles, programs a tile, and memory for the parts that programs compute of a tile that several share. There are as many as
    leave the slowest multiprocessor the least to do."""
    tiles = triton.cdiv(weight.shape[0], how.outputs) * triton.cdiv(rows, how.rows)
    places = PROCESSORS * how.resident

    def cost(split: int) -> int:
        return triton.cdiv(tiles * split, places) * (
            triton.cdiv(weight.blocks, split * how.blocks) * how.blocks + PROLOGUE
        )

    split = min(range(1, 17), key=cost) if tiles <= LOCKS else 1
    if split == 1:
        return tiles, 1, None
    return (
        tiles,
        split,
        torch.empty(
            split * tiles * how.rows * how.outputs, dtype=torch.float32, device=weight.words.device
        ),
    )
