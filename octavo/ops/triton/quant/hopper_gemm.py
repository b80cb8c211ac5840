"""A quantised matrix times many rows on a Hopper GPU, dequantised while the tensor cores work.

This is the algorithm of quant_gemm.py in Gluon, Triton's language with explicit waits and layouts.
Triton decides itself when to wait for the tensor cores. With weights in registers that is wrong
unless every round waits (`_wait_for_tensor_cores` in quant_gemm.py), and then the tensor cores idle
while weights are dequantised. Here a step is 64 inputs, and two sets of registers alternate:

    threads         dequantise 1 | wait for 0 | dequantise 2 | wait for 1 | dequantise 3 | ...
    tensor cores    0 ------------------------|1 ------------------------|2 ------------- ...

A set of registers is overwritten only after its product has finished, and one product is always in
flight. TMA copies rows and words through a ring of STAGES steps in shared memory. An mbarrier
signals that a step has arrived, and its stage is refilled once all threads have waited for its
product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from octavo.ops.triton.dependent_launch import LAUNCH
from octavo.ops.triton.quant.packed_weight import LOCKS, TritonWeight
from octavo.ops.triton.quant.quant_gemm import MULTIPROCESSORS
from octavo.ops.triton.quant.weight_codes import BYTES, E4M3, FP8, INT4
from octavo.ops.weight import WeightFormat

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
STEP = gl.constexpr(64)  # the number of inputs in a step
# The shared memory of a multiprocessor, and the part that a program cannot use for its ring.
SHARED = 228 << 10
RESERVED = 2 << 10
SPLITS = (1, 2, 4, 8)
# The costs of starting a program and of adding the parts of a split tile, in steps.
START_COST = 2
JOIN_COST = 12
# The words of a block for one output: one step of 8-bit codes, or two steps of 4-bit codes.
WORDS = gl.constexpr(32)


class Hopper(NamedTuple):
    """The tiling of a product with many rows.

    A tile is `outputs` x `rows`. A program computes it over one of `split` parts of the inputs.
    """

    rows: int
    outputs: int
    warps: int
    resident: int  # the number of programs that fit on a multiprocessor
    cost: int  # the time of a step of that many programs, in 10 ns
    split: int = 1

    def stages(self, kind: int) -> int:
        """Return the number of steps in the ring: as many as fit into memory."""
        step_bytes = 2 * STEP.value * self.rows + self.outputs * STEP.value // (
            2 if kind == INT4.value else 1
        )
        return ((SHARED // self.resident) - RESERVED) // step_bytes


# Larger tiles read less; smaller tiles leave fewer multiprocessors idle at the end.
TILES = (Hopper(256, 128, 8, 1, 66), Hopper(128, 128, 4, 2, 75), Hopper(128, 64, 4, 2, 42))


def _nibbles(first: int) -> gl.constexpr:
    """Return PTX: two words and a scale twice -> (code - 8) * scale for parts first, first + 1."""
    return gl.constexpr(f"""{{
    .reg .b32 a, b, least;
    mov.b32 least, 0x43084308;
    shr.u32 a, $2, {4 * first};
    shr.u32 b, $2, {4 * first + 4};
    lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    sub.rn.bf16x2 a, a, least;
    sub.rn.bf16x2 b, b, least;
    mul.rn.bf16x2 $0, a, $3;
    mul.rn.bf16x2 $1, b, $3;
    }}""")


LOW = _nibbles(0)
HIGH = _nibbles(2)


@gluon.jit
def _dequantize(words, scale, HALF: gl.constexpr, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """The words of a block [N, 32] -> the weights of a step [N, 64].

    For 8-bit codes a step is the whole block. For 4-bit codes it is the first or second half, and
    the weights are scaled.
    """
    if KIND == INT4:
        words, scale = gl.broadcast(words, scale)
        NIBBLES: gl.constexpr = HIGH if HALF else LOW
        left, right = gl.inline_asm_elementwise(
            NIBBLES, "=r,=r,r,r", [words, scale], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        EIGHT_BITS: gl.constexpr = E4M3 if KIND == FP8 else BYTES
        left, right = gl.inline_asm_elementwise(
            EIGHT_BITS, "=r,=r,r", [words], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    side_by_side = gl.join(left, right).permute(0, 2, 1).reshape(words.shape[0], 64)
    return gl.convert_layout(side_by_side, OPERAND, assert_trivial=True)


@gluon.constexpr_function
def _pair_layout(num_outputs, num_warps):
    """Return the layout of the words [outputs / 16, 8] that hold the scales of outputs n and n + 8.

    Each word is in the threads that dequantise these outputs.
    """
    bases = [[1 << index, 0] for index in range((num_outputs // 16).bit_length() - 1)]
    warp_bits = num_warps.bit_length() - 1
    lane_bases = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(
        bases[warp_bits:], lane_bases, bases[:warp_bits], [], [num_outputs // 16, 8]
    )


@gluon.jit
def _load_info(info_ptr, block, info_width, KIND: gl.constexpr):
    """Load the scales of a block. It is called ahead of their use, to hide the latency."""
    if KIND == INT4:
        return gl.load(info_ptr + block * info_width)
    else:
        return 0


@gluon.jit
def _scales(info_words, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """Words of two float16 [N / 16, 8] -> [N, 1] bfloat16, without moving them between threads"""
    if KIND == INT4:
        low = info_words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.bfloat16)
        high = (info_words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.bfloat16)
        scales = gl.join(low, high).permute(0, 2, 1).reshape(info_words.shape[0] * 16)
        return gl.convert_layout(
            scales, gl.SliceLayout(1, OPERAND), assert_trivial=True
        ).expand_dims(1)
    else:
        return 0


@gluon.jit
def _fetch_words(
    weight_desc,
    input_desc,
    weight_ring,
    ready_barriers,
    first_output,
    first_step,
    step,
    in_range,
    HALF: gl.constexpr,
    KIND: gl.constexpr,
):
    """Start copying the words of a step, and set the number of bytes that its barrier expects.

    For 4-bit codes, the first half of a block copies the words of both halves.
    """
    barrier = ready_barriers.index(step % ready_barriers.shape[0])
    if KIND == INT4 and HALF == 1:
        mbarrier.expect(barrier, input_desc.block_type.nbytes, pred=in_range)
    else:
        block = step // 2 if KIND == INT4 else step
        first_block = first_step // 2 if KIND == INT4 else first_step
        mbarrier.expect(
            barrier, input_desc.block_type.nbytes + weight_desc.block_type.nbytes, pred=in_range
        )
        tma.async_copy_global_to_shared(
            weight_desc,
            [first_output, (first_block + block) * WORDS],
            barrier,
            weight_ring.index(block % weight_ring.shape[0]),
            pred=in_range,
        )


@gluon.jit
def _fetch_rows(input_desc, input_ring, ready_barriers, first_row, first_step, step, in_range):
    stage = step % input_ring.shape[0]
    tma.async_copy_global_to_shared(
        input_desc,
        [first_row, (first_step + step) * STEP],
        ready_barriers.index(stage),
        input_ring.index(stage),
        pred=in_range,
    )


@gluon.jit
def _refill(
    weight_desc,
    input_desc,
    weight_ring,
    input_ring,
    ready_barriers,
    first_row,
    first_output,
    first_step,
    step,
    num_steps,
    HALF: gl.constexpr,
    KIND: gl.constexpr,
):
    """Start copying a step into the stage that all threads have finished with."""
    gl.thread_barrier()
    _fetch_words(
        weight_desc,
        input_desc,
        weight_ring,
        ready_barriers,
        first_output,
        first_step,
        step,
        step < num_steps,
        HALF,
        KIND,
    )
    _fetch_rows(
        input_desc, input_ring, ready_barriers, first_row, first_step, step, step < num_steps
    )


@gluon.jit
def _wait_for_weights(
    weight_ring,
    ready_barriers,
    step,
    scale,
    HALF: gl.constexpr,
    KIND: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """Wait for a step and return its weights."""
    STAGES: gl.constexpr = ready_barriers.shape[0]
    mbarrier.wait(ready_barriers.index(step % STAGES), step // STAGES & 1)
    block = step // 2 if KIND == INT4 else step
    return _dequantize(
        weight_ring.index(block % weight_ring.shape[0]).load(OPERAND), scale, HALF, KIND, OPERAND
    )


@gluon.jit
def _start_product(weights, input_ring, step, accumulator):
    """Start the product of a step, which is added to accumulator [N, M]."""
    return warpgroup_mma(
        weights,
        input_ring.index(step % input_ring.shape[0]).permute([1, 0]),
        accumulator,
        is_async=True,
    )


@gluon.jit
def _partial_offsets(
    TILE_OUTPUTS: gl.constexpr, first_row, NUM_ROWS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return the offsets of a tile's partial sums in memory, for NUM_ROWS rows from first_row on.

    Sums that a warp accesses at the same time are neighbours.
    """
    output_offsets = gl.arange(0, TILE_OUTPUTS, gl.SliceLayout(1, LAYOUT))
    row_offsets = first_row + gl.arange(0, NUM_ROWS, gl.SliceLayout(0, LAYOUT))
    output_offsets = (
        output_offsets // 16 * 128 + output_offsets // 8 % 2 * 64 + output_offsets % 8 * 4
    )
    row_offsets = (
        row_offsets // 8 * (TILE_OUTPUTS * 8) + row_offsets % 2 * 32 + row_offsets % 8 // 2
    )
    return output_offsets.expand_dims(1) + row_offsets.expand_dims(0)


@gluon.jit
def _join_splits(
    accumulator,
    partial_ptr,
    lock_ptr,
    part,
    TILE_ROWS: gl.constexpr,
    TILE_OUTPUTS: gl.constexpr,
    SPLIT: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Add the parts of a split tile in order, and return the sums for this program's share of rows.

    The program waits for the other programs of the tile, which were started with it.
    """
    FULL_LAYOUT: gl.constexpr = accumulator.type.layout
    gl.store(
        partial_ptr
        + part * (TILE_ROWS * TILE_OUTPUTS)
        + _partial_offsets(TILE_OUTPUTS, 0, TILE_ROWS, FULL_LAYOUT),
        accumulator,
    )
    gl.thread_barrier()
    arrived = gl.atomic_add(lock_ptr, 1) + 1
    while arrived < SPLIT:
        arrived = gl.atomic_add(lock_ptr, 0)
    ROWS: gl.constexpr = TILE_ROWS // SPLIT
    share_ptr = partial_ptr + _partial_offsets(TILE_OUTPUTS, part * ROWS, ROWS, LAYOUT)
    total = gl.load(share_ptr, cache_modifier=".cg")
    for other_part in gl.static_range(1, SPLIT):
        total += gl.load(share_ptr + other_part * (TILE_ROWS * TILE_OUTPUTS), cache_modifier=".cg")
    if gl.atomic_add(lock_ptr, 1) == 2 * SPLIT - 1:
        gl.store(lock_ptr, 0)
    return total


@gluon.jit(do_not_specialize=["num_rows"])
def hopper_kernel(
    input_desc,
    weight_desc,
    output_desc,
    info_ptr,
    bias_ptr,
    partial_ptr,
    locks_ptr,
    num_rows,
    total_steps,
    info_width,
    KIND: gl.constexpr,
    ADD_BIAS: gl.constexpr,
    ADD_RESIDUAL: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    TILE_OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    NUM_SPLITS: gl.constexpr,
):
    """Compute a tile [TILE_OUTPUTS, TILE_ROWS] of the transposed product, or a share of it.

    input_desc [rows, inputs], weight_desc and output_desc are TMA descriptors.
    """
    cuda.gdc_launch_dependents()
    ACCUMULATOR_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, TILE_ROWS, 16]
    )
    OPERAND_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACCUMULATOR_LAYOUT, 2)
    part = gl.program_id(0) % NUM_SPLITS
    tile = gl.program_id(0) // NUM_SPLITS
    row_tiles = gl.cdiv(num_rows, TILE_ROWS)
    first_row = tile % row_tiles * TILE_ROWS
    first_output = tile // row_tiles * TILE_OUTPUTS
    num_steps = total_steps // NUM_SPLITS
    first_step = part * num_steps
    input_ring = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, TILE_ROWS, STEP], input_desc.layout
    )
    weight_ring = gl.allocate_shared_memory(
        gl.int16,
        [(STAGES + 1) // 2 if KIND == INT4 else STAGES, TILE_OUTPUTS, WORDS],
        weight_desc.layout,
    )
    ready_barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    residual_barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for step in gl.static_range(STAGES):
        mbarrier.init(ready_barriers.index(step), count=1)
    mbarrier.init(residual_barrier, count=1)
    fence_async_shared()
    for step in gl.static_range(STAGES):
        _fetch_words(
            weight_desc,
            input_desc,
            weight_ring,
            ready_barriers,
            first_output,
            first_step,
            step,
            step < num_steps,
            step % 2,
            KIND,
        )
    cuda.gdc_wait()
    for step in gl.static_range(STAGES):
        _fetch_rows(
            input_desc, input_ring, ready_barriers, first_row, first_step, step, step < num_steps
        )
    if KIND == INT4:
        PAIR_LAYOUT: gl.constexpr = _pair_layout(TILE_OUTPUTS, WARPS)
        sixteen_offsets = gl.arange(
            0, TILE_OUTPUTS // 16, gl.SliceLayout(1, PAIR_LAYOUT)
        ).expand_dims(1)
        pair_offsets = gl.arange(0, 8, gl.SliceLayout(0, PAIR_LAYOUT)).expand_dims(0)
        tile_info_ptr = (
            info_ptr
            + (first_step // 2 * info_width + first_output // 2)
            + (sixteen_offsets * 8 + pair_offsets)
        )
    else:
        tile_info_ptr = info_ptr
    scale = _scales(_load_info(tile_info_ptr, 0, info_width, KIND), KIND, OPERAND_LAYOUT)
    next_info = _load_info(tile_info_ptr, gl.minimum(1, num_steps // 2 - 1), info_width, KIND)
    even_weights = _wait_for_weights(weight_ring, ready_barriers, 0, scale, 0, KIND, OPERAND_LAYOUT)
    accumulator = _start_product(
        even_weights,
        input_ring,
        0,
        gl.zeros([TILE_OUTPUTS, TILE_ROWS], gl.float32, ACCUMULATOR_LAYOUT),
    )
    accumulator, even_weights = warpgroup_mma_wait(1, deps=[accumulator, even_weights])
    for step in range(0, num_steps - 2, 2):
        odd_weights = _wait_for_weights(
            weight_ring, ready_barriers, step + 1, scale, 1, KIND, OPERAND_LAYOUT
        )
        accumulator = _start_product(odd_weights, input_ring, step + 1, accumulator)
        accumulator, even_weights = warpgroup_mma_wait(1, deps=[accumulator, even_weights])
        _refill(
            weight_desc,
            input_desc,
            weight_ring,
            input_ring,
            ready_barriers,
            first_row,
            first_output,
            first_step,
            step + STAGES,
            num_steps,
            STAGES % 2,
            KIND,
        )
        scale = _scales(next_info, KIND, OPERAND_LAYOUT)
        next_info = _load_info(
            tile_info_ptr, gl.minimum(step // 2 + 2, num_steps // 2 - 1), info_width, KIND
        )
        even_weights = _wait_for_weights(
            weight_ring, ready_barriers, step + 2, scale, 0, KIND, OPERAND_LAYOUT
        )
        accumulator = _start_product(even_weights, input_ring, step + 2, accumulator)
        accumulator, odd_weights = warpgroup_mma_wait(1, deps=[accumulator, odd_weights])
        _refill(
            weight_desc,
            input_desc,
            weight_ring,
            input_ring,
            ready_barriers,
            first_row,
            first_output,
            first_step,
            step + 1 + STAGES,
            num_steps,
            (STAGES + 1) % 2,
            KIND,
        )
    odd_weights = _wait_for_weights(
        weight_ring, ready_barriers, num_steps - 1, scale, 1, KIND, OPERAND_LAYOUT
    )
    accumulator = _start_product(odd_weights, input_ring, num_steps - 1, accumulator)
    accumulator, even_weights, odd_weights = warpgroup_mma_wait(
        0, deps=[accumulator, even_weights, odd_weights]
    )
    gl.thread_barrier()  # from here on the ring is the output buffer
    SHARE_ROWS: gl.constexpr = TILE_ROWS // NUM_SPLITS
    SHARE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SHARE_ROWS, 16])
    first_row += part * SHARE_ROWS
    output_buffer = input_ring._reinterpret(
        gl.bfloat16, [SHARE_ROWS, TILE_OUTPUTS], output_desc.layout
    )
    if ADD_RESIDUAL:
        mbarrier.expect(residual_barrier, output_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            output_desc, [first_row, first_output], residual_barrier, output_buffer
        )
    if NUM_SPLITS > 1:
        accumulator = _join_splits(
            accumulator,
            partial_ptr + tile.to(gl.int64) * (NUM_SPLITS * TILE_ROWS * TILE_OUTPUTS),
            locks_ptr + tile,
            part,
            TILE_ROWS,
            TILE_OUTPUTS,
            NUM_SPLITS,
            SHARE_LAYOUT,
        )
    output_offsets = first_output + gl.arange(0, TILE_OUTPUTS, gl.SliceLayout(1, SHARE_LAYOUT))
    if KIND != INT4:
        accumulator *= gl.load(info_ptr + output_offsets).expand_dims(1)
    if ADD_BIAS:
        accumulator += gl.load(bias_ptr + output_offsets).to(gl.float32).expand_dims(1)
    if ADD_RESIDUAL:
        mbarrier.wait(residual_barrier, 0)
        accumulator += output_buffer.permute([1, 0]).load(SHARE_LAYOUT).to(gl.float32)
    output_buffer.permute([1, 0]).store(accumulator.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(output_desc, [first_row, first_output], output_buffer)
    tma.store_wait(0)


def _tma_descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a TMA descriptor of a tensor, for copies of [rows, columns]."""
    element_type = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.int16
    return TensorDescriptor.from_tensor(
        tensor, [rows, columns], gl.NVMMASharedLayout.get_default_for([rows, columns], element_type)
    )


def hopper_supports_format(weight_format: WeightFormat) -> bool:
    """Whether a format is supported: groups of 128 inputs or whole rows, without minima."""
    return (
        HOPPER
        and weight_format.group_size == (128 if weight_format.bits == 4 else 0)
        and not (
            weight_format.asymmetric
            or weight_format.float32_scales
            or weight_format.quantizes_activations
        )
    )


def hopper_supports(dtype: torch.dtype, weight: TritonWeight) -> bool:
    """Whether a product is supported: it must consist of whole tiles and pairs of steps."""
    num_outputs, num_inputs = weight.shape
    return (
        hopper_supports_format(weight.format)
        and dtype == torch.bfloat16
        and num_outputs % 128 == 0
        and num_inputs % (2 * STEP.value) == 0
    )


def fastest_hopper_tiling(num_rows: int, num_outputs: int, num_inputs: int) -> Hopper:
    """Return the tile size and the number of splits with the smallest estimated time."""
    num_steps = num_inputs // STEP.value

    def cost(config: Hopper) -> int:
        num_tiles = num_outputs // config.outputs * triton.cdiv(num_rows, config.rows)
        if (config.split > 1 and num_tiles > LOCKS) or num_steps % (2 * config.split):
            return 1 << 60
        rounds = triton.cdiv(num_tiles * config.split, MULTIPROCESSORS * config.resident)
        return (
            config.cost
            * rounds
            * (num_steps // config.split + START_COST + JOIN_COST * (config.split > 1))
        )

    return min((config._replace(split=split) for config in TILES for split in SPLITS), key=cost)


def hopper(
    hidden: Tensor,
    weight: TritonWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    config: Hopper,
) -> Tensor:
    """hidden [T, in] -> [T, out], plus the residual, which is overwritten"""
    num_rows = len(hidden)
    (num_outputs, num_inputs) = weight.shape
    num_splits = config.split
    output = hidden.new_empty(num_rows, num_outputs) if residual is None else residual
    num_tiles = num_outputs // config.outputs * triton.cdiv(num_rows, config.rows)
    partial = (
        hidden.new_empty(num_tiles * num_splits * config.rows * config.outputs, dtype=torch.float32)
        if num_splits > 1
        else None
    )
    hopper_kernel[num_tiles * num_splits,](
        _tma_descriptor(hidden, config.rows, STEP.value),
        _tma_descriptor(weight.words, config.outputs, WORDS.value),
        _tma_descriptor(output, config.rows // num_splits, config.outputs),
        weight.info,
        bias,
        partial,
        weight.locks,
        num_rows,
        num_inputs // STEP.value,
        weight.info.shape[-1],
        weight.kind,
        bias is not None,
        residual is not None,
        config.rows,
        config.outputs,
        config.stages(weight.kind),
        config.warps,
        num_splits,
        num_warps=config.warps,
        **LAUNCH,
    )
    return output
