"""Matrix products in which the bits of a row do not depend on the number of rows.

The kernel below defines the order: one program adds all inputs of its outputs, in the steps of the
tensor cores. The weights are their first operand, so that few rows waste little. A library
may compute products of many rows faster. It is used only for the shapes for which a
comparison on this device found the same bits (`LibraryShapes`).

    rows              computed by
    1 to 63           the kernel
    64 and more       the library, in blocks of a number of rows that was compared; a block with
                      fewer rows is padded. Without such a number: the kernel
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.dependent_launch import LAUNCH, start_next, wait_for_inputs

# Rows of a block that the library may compute. The numbers up to 640 are those of CUDA graphs
# (octavo/runner/graph_shapes.py), so that a graph has no padding.
LIBRARY_ROWS = (*range(64, 256, 16), *range(256, 641, 32), 768, 1024, 1536, 2048)
# Settings of torch.backends.cuda.matmul.
REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
# The largest result that is compared: 128 MiB of bfloat16. The number of rows of a block is lower
# for an LM head.
MAX_COMPARED_NUMBERS = 2**26


class Tile(NamedTuple):
    rows: int
    outputs: int
    inputs: int  # inputs of one round
    stages: int  # rounds in the pipeline


# By the largest number of rows. The order of the sums is the same in all of them: tensor cores add
# 16 inputs at a time, from the first to the last.
TILES = {
    16: Tile(rows=16, outputs=64, inputs=128, stages=8),
    32: Tile(rows=32, outputs=64, inputs=128, stages=6),
    64: Tile(rows=64, outputs=64, inputs=64, stages=6),
    2**31: Tile(rows=128, outputs=128, inputs=64, stages=4),
}
# For float32, which tensor cores do not multiply exactly: always the same tile.
FLOAT32_TILE = Tile(rows=16, outputs=64, inputs=32, stages=2)


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    input_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    ADD_BIAS: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute a tile [TILE_OUTPUTS, TILE_ROWS] of the transposed product.

    EVEN means that rounds cover the inputs exactly. The sum, the sum with the bias and the sum with
    the residual are rounded one after another, because a library can add only to rounded sums.
    """
    start_next()
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, TILE_ROWS)  # neighbouring programs share their weights
    row_offsets = (tile % row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output_offsets = (tile // row_tiles) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    input_offsets = tl.arange(0, TILE_INPUTS)
    rows = tl.minimum(row_offsets, num_rows - 1).to(tl.int64)
    outputs = tl.minimum(output_offsets, num_outputs - 1).to(tl.int64)
    tile_weight_ptr = weight_ptr + outputs[:, None] * num_inputs + input_offsets[None, :]
    tile_input_ptr = input_ptr + rows[None, :] * num_inputs + input_offsets[:, None]
    accumulator = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    wait_for_inputs()
    for start in range(0, num_inputs, TILE_INPUTS):
        if EVEN:
            weights = tl.load(tile_weight_ptr + start)
            values = tl.load(tile_input_ptr + start)
        else:
            in_range = start + input_offsets < num_inputs
            weights = tl.load(tile_weight_ptr + start, mask=in_range[None, :], other=0.0)
            values = tl.load(tile_input_ptr + start, mask=in_range[:, None], other=0.0)
        accumulator = tl.dot(weights, values, accumulator, input_precision="ieee")
    in_range = (row_offsets < num_rows)[None, :] & (output_offsets < num_outputs)[:, None]
    tile_offsets = rows[None, :] * num_outputs + outputs[:, None]
    result = accumulator.to(output_ptr.dtype.element_ty)
    if ADD_BIAS:
        bias = tl.load(bias_ptr + outputs)[:, None]
        result = (result.to(tl.float32) + bias.to(tl.float32)).to(output_ptr.dtype.element_ty)
    if ADD_RESIDUAL:
        residual = tl.load(residual_ptr + tile_offsets, mask=in_range, other=0.0)
        result = (result.to(tl.float32) + residual.to(tl.float32)).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + tile_offsets, result, mask=in_range)


def tile_for(num_rows: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return FLOAT32_TILE
    return next(tile for max_rows, tile in TILES.items() if num_rows <= max_rows)


def kernel_product(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """hidden [T, in], weight [out, in] -> [T, out], plus the residual, which is overwritten"""
    if bias is not None and residual is not None:  # together they stall the tensor cores
        return residual.add_(kernel_product(hidden, weight, bias))
    num_rows, num_inputs = hidden.shape
    num_outputs = weight.shape[0]
    output = hidden.new_empty(num_rows, num_outputs) if residual is None else residual
    tile = tile_for(num_rows, hidden.dtype)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs)
    product_kernel[num_tiles,](
        hidden,
        weight,
        bias,
        residual,
        output,
        num_rows,
        num_outputs,
        num_inputs,
        bias is not None,
        residual is not None,
        tile.rows,
        tile.outputs,
        tile.inputs,
        num_inputs % tile.inputs == 0,
        num_warps=4 if tile.outputs == 64 else 8,
        num_stages=tile.stages,
        **LAUNCH,
    )
    return output


@contextmanager
def without_split() -> Iterator[None]:
    """Let cuBLASLt compute, and never divide the sum of an output among thread blocks."""
    matmul: Any = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    # Each setting is a pair: sums in 16 bits are allowed, and sums that are split.
    previous = {
        name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in REDUCTIONS
    }
    torch.backends.cuda.preferred_blas_library("cublaslt")
    for name in REDUCTIONS:
        setattr(matmul, name, (False, False))
    try:
        yield
    finally:
        for name in REDUCTIONS:
            setattr(matmul, name, previous[name])
        torch.backends.cuda.preferred_blas_library(library)


def library_product(hidden: Tensor, weight: Tensor, output: Tensor) -> None:
    """Do what kernel_product() does, with cuBLASLt."""
    with without_split():
        torch.mm(hidden, weight.t(), out=output)


def empty_output(num_rows: int, weight: Tensor) -> Tensor:
    """Allocate a result. Its rows are padded in memory: cuBLASLt has only an old kernel for rows
    that are not aligned to 16 bytes."""
    num_outputs = weight.shape[0]
    padded = weight.new_empty(num_rows, triton.cdiv(num_outputs, 8) * 8)
    return padded[:, :num_outputs]


class LibraryShapes:
    """The numbers of rows for which the library has the bits of the kernel, for each weight shape.

    They are compared when a shape is first multiplied with many rows, on random activations. A
    different order of sums differs in some of their millions of results.
    """

    def __init__(self) -> None:
        self.rows_by_shape: dict[tuple[torch.Size, torch.dtype], tuple[int, ...]] = {}

    def rows(self, weight: Tensor) -> tuple[int, ...]:
        """Return the numbers of rows, in order. Before the comparison, which a CUDA graph cannot
        contain, there are none."""
        key = (weight.shape, weight.dtype)
        if key not in self.rows_by_shape:
            if not weight.is_cuda or torch.cuda.is_current_stream_capturing():
                return ()
            self.rows_by_shape[key] = agreeing_rows(weight)
        return self.rows_by_shape[key]


def agreeing_rows(weight: Tensor) -> tuple[int, ...]:
    """Compare the library with the kernel."""
    num_outputs, num_inputs = weight.shape
    candidates = [rows for rows in LIBRARY_ROWS if rows * num_outputs <= MAX_COMPARED_NUMBERS]
    if not candidates:
        return ()
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (candidates[-1], num_inputs)
    hidden = torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)
    expected = kernel_product(hidden, weight)
    agreeing = []
    for rows in candidates:
        output = empty_output(rows, weight)
        library_product(hidden[:rows], weight, output)
        if torch.equal(output, expected[:rows]):
            agreeing.append(rows)
    return tuple(agreeing)


def linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    shapes: LibraryShapes,
) -> Tensor:
    """hidden [T, in], weight [out, in] -> [T, out], plus the residual, which is overwritten"""
    hidden = hidden.contiguous()
    num_rows = len(hidden)
    allowed = shapes.rows(weight) if num_rows >= LIBRARY_ROWS[0] else ()
    if not allowed:
        return kernel_product(hidden, weight, bias, residual)
    sizes = block_sizes(num_rows, allowed)
    output = empty_output(sum(sizes), weight)
    first = 0
    for size in sizes:
        block = hidden[first : first + size]
        if len(block) < size:
            block = F.pad(block, (0, 0, 0, size - len(block)))
        library_product(block, weight, output[first : first + size])
        first += size
    output = output[:num_rows]
    if bias is not None:
        output.add_(bias)
    return output if residual is None else residual.add_(output)


def block_sizes(num_rows: int, allowed: tuple[int, ...]) -> list[int]:
    """Divide rows into blocks of numbers of rows that were compared. The last block is padded."""
    largest = allowed[-1]
    full_blocks, remaining_rows = divmod(num_rows, largest)
    sizes = [largest] * full_blocks
    if remaining_rows:
        sizes.append(next(rows for rows in allowed if rows >= remaining_rows))
    return sizes
