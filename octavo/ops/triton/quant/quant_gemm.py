"""A quantised matrix times a few rows, on the tensor cores.

Weights are dequantised to bfloat16 in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import (
    HOPPER_OR_LATER,
    LAUNCH,
    prefetch_l2,
    start_next,
    wait_for_inputs,
)
from octavo.ops.triton.quant.packed_weight import LOCKS, WORDS, TritonWeight
from octavo.ops.triton.quant.weight_codes import INT4, halves, info_of_tile

MULTIPROCESSORS = (
    torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 2
)
# The cost of starting and ending a program, in blocks. It prevents too many splits.
START_COST = 6


class Gemm(NamedTuple):
    """The tiling of a product with a few rows.

    A tile is `outputs` x `rows`. A program computes it over all inputs or over a part of them.
    """

    rows: int
    outputs: int
    blocks: int  # the number of blocks of weights in a round
    stages: int  # the number of rounds in the pipeline
    resident: int  # the number of programs that fit on a multiprocessor
    scale_sums: bool = False  # scale sums instead of weights, for groups as long as a block
    outputs_per_warp: int = (
        16  # outputs of a warp; four warps of 16 share one tensor core instruction
    )
    splits: int = 0  # programs that share a tile; 0: as many as the number of rows allows

    @property
    def warps(self) -> int:
        return self.outputs // self.outputs_per_warp


@triton.jit
def _concat(left, right):
    """left [N, K] and right [N, K] -> [N, 2 K]. All elements stay in their registers."""
    return tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])


@triton.jit
def _scaled(part, info_ptr, group, info_width, ASYMMETRIC: tl.constexpr, SUBTRACTED: tl.constexpr):
    """Scale part [N, K], which holds codes - SUBTRACTED.

    The minimum plus SUBTRACTED scales is near zero, so rounding it costs little precision.
    """
    scale, least = info_of_tile(info_ptr, group, info_width, part.shape[0], ASYMMETRIC)
    if ASYMMETRIC:
        return part * scale.to(part.dtype) + (least + SUBTRACTED * scale).to(part.dtype)
    else:
        return part * scale.to(part.dtype)


@triton.jit
def _scaled_by_two(part, info_ptr, group, info_width, ASYMMETRIC: tl.constexpr):
    """Scale part [N, 32], which holds the codes of two groups of 16."""
    scale, least = info_of_tile(info_ptr, group, info_width, part.shape[0], ASYMMETRIC)
    other_scale, other_least = info_of_tile(
        info_ptr, group + 1, info_width, part.shape[0], ASYMMETRIC
    )
    first = tl.arange(0, 32)[None, :] < 16
    part = part * tl.where(first, scale, other_scale).to(part.dtype)
    if ASYMMETRIC:
        part += tl.where(first, least, other_least).to(part.dtype)
    return part


@triton.jit
def _block(
    words,
    info_ptr,
    block,
    info_width,
    DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """The words of a block [N, 32] -> its weights [N, inputs].

    With GROUP_SIZE 0 the weights are not scaled, and there may be several blocks.
    """
    if KIND == INT4:
        part0, part1, part2, part3 = halves(words, DTYPE, KIND, USE_ASM)
        if GROUP_SIZE == 32:
            part0 = _scaled(part0, info_ptr, block * 4, info_width, ASYMMETRIC, 8)
            part1 = _scaled(part1, info_ptr, block * 4 + 1, info_width, ASYMMETRIC, 8)
            part2 = _scaled(part2, info_ptr, block * 4 + 2, info_width, ASYMMETRIC, 8)
            part3 = _scaled(part3, info_ptr, block * 4 + 3, info_width, ASYMMETRIC, 8)
        low = _concat(part0, part1)
        high = _concat(part2, part3)
        if GROUP_SIZE == 64:
            low = _scaled(low, info_ptr, block * 2, info_width, ASYMMETRIC, 8)
            high = _scaled(high, info_ptr, block * 2 + 1, info_width, ASYMMETRIC, 8)
        weights = _concat(low, high)
        if GROUP_SIZE == 128:
            weights = _scaled(weights, info_ptr, block, info_width, ASYMMETRIC, 8)
        return weights
    else:
        part0, part1 = halves(words, DTYPE, KIND, USE_ASM)
        if GROUP_SIZE == 32:
            part0 = _scaled(part0, info_ptr, block * 2, info_width, ASYMMETRIC, 0)
            part1 = _scaled(part1, info_ptr, block * 2 + 1, info_width, ASYMMETRIC, 0)
        if GROUP_SIZE == 16:
            part0 = _scaled_by_two(part0, info_ptr, block * 4, info_width, ASYMMETRIC)
            part1 = _scaled_by_two(part1, info_ptr, block * 4 + 2, info_width, ASYMMETRIC)
        return _concat(part0, part1)


@triton.jit
def write_tile(
    accumulator,
    bias_ptr,
    output_ptr,
    partial_ptr,
    locks_ptr,
    row_offsets,
    output_offsets,
    num_rows,
    num_outputs,
    num_splits,
    ADD_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
):
    """Write a tile [TILE_OUTPUTS, TILE_ROWS] of the transposed product to the output.

    ADD_RESIDUAL adds it to the present values. IS_SPLIT means that it is one of num_splits parts.
    All parts are written to memory, and the program that finishes last adds them in order.
    """
    if not IS_SPLIT:
        _store(
            accumulator,
            bias_ptr,
            output_ptr,
            row_offsets,
            output_offsets,
            num_rows,
            num_outputs,
            ADD_BIAS,
            ADD_RESIDUAL,
        )
    else:
        tile = tl.program_id(0)
        num_tiles = tl.num_programs(0)
        tile_ptr = (
            partial_ptr
            + tl.arange(0, TILE_OUTPUTS)[:, None] * TILE_ROWS
            + tl.arange(0, TILE_ROWS)[None, :]
        )
        tl.store(
            tile_ptr
            + (tl.program_id(1) * num_tiles + tile).to(tl.int64) * (TILE_ROWS * TILE_OUTPUTS),
            accumulator,
        )
        tl.debug_barrier()
        if tl.atomic_add(locks_ptr + tile, 1) == num_splits - 1:
            accumulator = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
            for part in range(num_splits):
                accumulator += tl.load(
                    tile_ptr + (part * num_tiles + tile).to(tl.int64) * (TILE_ROWS * TILE_OUTPUTS),
                    cache_modifier=".cg",
                )
            tl.store(locks_ptr + tile, 0)
            _store(
                accumulator,
                bias_ptr,
                output_ptr,
                row_offsets,
                output_offsets,
                num_rows,
                num_outputs,
                ADD_BIAS,
                ADD_RESIDUAL,
            )


@triton.jit
def _store(
    accumulator,
    bias_ptr,
    output_ptr,
    row_offsets,
    output_offsets,
    num_rows,
    num_outputs,
    ADD_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
):
    if ADD_BIAS:
        accumulator += tl.load(
            bias_ptr + output_offsets, mask=output_offsets < num_outputs, other=0.0
        )[:, None].to(tl.float32)
    tile_ptr = output_ptr + row_offsets[None, :] * num_outputs + output_offsets[:, None]
    in_range = (row_offsets < num_rows)[None, :] & (output_offsets < num_outputs)[:, None]
    if ADD_RESIDUAL:
        accumulator += tl.load(tile_ptr, mask=in_range, other=0.0).to(tl.float32)
    tl.store(tile_ptr, accumulator, mask=in_range)


@triton.jit
def _wait_for_tensor_cores(accumulator, USE_ASM: tl.constexpr):
    """Wait for the tensor cores.

    Triton 3.6 lets a product run into the next round, where the registers of its weights are
    overwritten while they are still read. An instruction that reads the sums has to wait for them.
    """
    if USE_ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [accumulator], tl.float32, is_pure=False, pack=1
        )
    else:
        return accumulator


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def gemm_kernel(
    input_ptr,
    words_ptr,
    info_ptr,
    bias_ptr,
    output_ptr,
    partial_ptr,
    locks_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    num_blocks,
    info_width,
    num_splits,
    KIND: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    ROUND_BLOCKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    EVEN: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    STAGES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Compute a tile [TILE_OUTPUTS, TILE_ROWS] of the transposed product.

    The product is transposed because the tensor cores read their first operand from registers,
    where the weights are dequantised. SCALE_SUMS scales sums instead of weights. EVEN means that
    rounds need no mask. IS_SPLIT means that num_splits programs compute a tile, each over a part of
    the inputs.
    """
    start_next()
    PARTS: tl.constexpr = 4 if KIND == INT4 else 2
    BLOCK_INPUTS: tl.constexpr = 32 * PARTS
    DTYPE: tl.constexpr = input_ptr.dtype.element_ty
    # The number of blocks that one dot product covers. Group scales allow only one block.
    BLOCKS_PER_DOT: tl.constexpr = ROUND_BLOCKS if GROUP_SIZE == 0 else 1
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    row_offsets = (tile % row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output_offsets = (tile // row_tiles) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    word_offsets = tl.arange(0, 32 * BLOCKS_PER_DOT)
    input_offsets = tl.arange(0, BLOCK_INPUTS * BLOCKS_PER_DOT)
    output_index = tl.minimum(output_offsets, num_outputs - 1)
    if BLOCKS_PER_DOT > 1:  # the first parts of all words come before the second parts
        input_offsets = (
            (input_offsets % (32 * BLOCKS_PER_DOT)) // 32 * BLOCK_INPUTS
            + input_offsets // (32 * BLOCKS_PER_DOT) * 32
            + input_offsets % 32
        )
        input_offsets = tl.max_contiguous(tl.multiple_of(input_offsets, 32), 32)
    split_blocks = tl.cdiv(num_blocks, ROUND_BLOCKS * num_splits) * ROUND_BLOCKS
    begin = tl.program_id(1) * split_blocks
    end = tl.minimum(begin + split_blocks, num_blocks)
    row_ptr = words_ptr + output_index.to(tl.int64) * num_blocks * 32
    prefetch_l2(
        row_ptr[:, None]
        + tl.minimum(begin * 32 + tl.arange(0, PREFETCH_LINES) * 64, num_blocks * 32 - 1)[None, :]
    )
    word_ptr = row_ptr[:, None] + word_offsets[None, :]
    tile_input_ptr = (
        input_ptr
        + tl.minimum(row_offsets, num_rows - 1)[None, :] * num_inputs
        + input_offsets[:, None]
    )
    if ASYMMETRIC or info_ptr.dtype.element_ty == tl.float32:
        tile_info_ptr = info_ptr + output_index[:, None]
    else:
        tile_info_ptr = (
            info_ptr
            + tl.minimum(
                (tile // row_tiles) * (TILE_OUTPUTS // 2) + tl.arange(0, TILE_OUTPUTS // 2),
                info_width - 1,
            )[:, None]
        )
    wait_for_inputs()
    accumulator = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for first_block in tl.range(begin, end, ROUND_BLOCKS, num_stages=STAGES):
        for round_block in tl.static_range(0, ROUND_BLOCKS, BLOCKS_PER_DOT):
            if EVEN:
                block = first_block + round_block
                codes = tl.load(word_ptr + block * 32)
                values = tl.load(tile_input_ptr + block * BLOCK_INPUTS)
            else:  # inputs past the end are zero, so the weights there do not matter
                codes = tl.load(
                    word_ptr + (first_block + round_block) * 32,
                    mask=((first_block + round_block) * 32 + word_offsets < num_blocks * 32)[
                        None, :
                    ],
                    other=0,
                )
                values = tl.load(
                    tile_input_ptr + (first_block + round_block) * BLOCK_INPUTS,
                    mask=((first_block + round_block) * BLOCK_INPUTS + input_offsets < num_inputs)[
                        :, None
                    ],
                    other=0.0,
                )
                block = tl.minimum(first_block + round_block, num_blocks - 1)
            weights = _block(
                codes,
                tile_info_ptr,
                block,
                info_width,
                DTYPE,
                KIND,
                0 if SCALE_SUMS else GROUP_SIZE,
                ASYMMETRIC,
                USE_ASM,
            )
            if SCALE_SUMS:
                scale, _ = info_of_tile(tile_info_ptr, block, info_width, TILE_OUTPUTS, ASYMMETRIC)
                accumulator += tl.dot(weights, values, input_precision="ieee") * scale
            else:
                accumulator = tl.dot(weights, values, accumulator, input_precision="ieee")
        accumulator = _wait_for_tensor_cores(accumulator, USE_ASM)
    if GROUP_SIZE == 0:
        accumulator *= tl.load(tile_info_ptr)
    write_tile(
        accumulator,
        bias_ptr,
        output_ptr,
        partial_ptr,
        locks_ptr,
        row_offsets,
        output_offsets,
        num_rows,
        num_outputs,
        num_splits,
        ADD_BIAS,
        ADD_RESIDUAL,
        IS_SPLIT,
        TILE_ROWS,
        TILE_OUTPUTS,
    )


def gemm(
    hidden: Tensor, weight: TritonWeight, bias: Tensor | None, residual: Tensor | None, config: Gemm
) -> Tensor:
    """hidden [T, in] -> [T, out], plus the residual, which is overwritten"""
    num_rows = len(hidden)
    (num_outputs, num_inputs) = weight.shape
    weight_format = weight.format
    output = hidden.new_empty(num_rows, num_outputs) if residual is None else residual
    num_tiles, num_splits, partial = plan_splits(num_rows, weight, config)
    gemm_kernel[num_tiles, num_splits](
        hidden,
        weight.words,
        weight.info,
        bias,
        output,
        partial,
        weight.locks,
        num_rows,
        num_outputs,
        num_inputs,
        weight.blocks,
        weight.info.shape[-1],
        num_splits,
        weight.kind,
        weight_format.group_size,
        weight_format.asymmetric,
        bias is not None,
        residual is not None,
        config.rows,
        config.outputs,
        config.blocks,
        num_splits > 1,
        config.scale_sums and weight_format.group_size == 128 and not weight_format.asymmetric,
        num_inputs % (config.blocks * WORDS * weight.parts) == 0,
        triton.next_power_of_2(max(1, config.blocks * (config.stages - 1) // 2)),
        config.stages,
        HOPPER_OR_LATER and hidden.dtype != torch.float32,
        num_warps=config.warps,
        num_stages=config.stages,
        **LAUNCH,
    )
    return output


def plan_splits(
    num_rows: int, weight: TritonWeight, config: Gemm
) -> tuple[int, int, Tensor | None]:
    """Return the number of tiles, the number of splits, and memory for the parts of split tiles.

    The number of splits minimises the work of the slowest multiprocessor.
    """
    num_tiles = triton.cdiv(weight.shape[0], config.outputs) * triton.cdiv(num_rows, config.rows)
    num_slots = MULTIPROCESSORS * config.resident

    def cost(num_splits: int) -> int:
        return triton.cdiv(num_tiles * num_splits, num_slots) * (
            triton.cdiv(weight.blocks, num_splits * config.blocks) * config.blocks + START_COST
        )

    num_splits = config.splits
    if not num_splits:
        num_splits = min(range(1, 17), key=cost) if num_tiles <= LOCKS else 1
    if num_splits == 1:
        return num_tiles, 1, None
    return (
        num_tiles,
        num_splits,
        torch.empty(
            num_splits * num_tiles * config.rows * config.outputs,
            dtype=torch.float32,
            device=weight.words.device,
        ),
    )
