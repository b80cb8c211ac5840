"""Batch-invariant operators on a GPU: the bits of a row do not depend on the other rows of a step.

    products       invariant_product.py: one order of sums for every number of rows
    quantised      quant/quant_gemm.py for every number of rows, or quant/activation_gemm.py for fp8
                   formats that round activations. No sum is split
    attention      invariant_attention.py: one kernel and one order for prompts and decoding rows
    the rest       the kernels of the CUDA backend: each program computes one row, or single numbers
    megakernel     off, as is the GEMV: both add in another order

docs/determinism.md has the promise, and tests/test_determinism.py compares the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.errors import InvalidRequest
from octavo.ops import ForwardBatch
from octavo.ops.fused_spec import DecoderSpec, Fused
from octavo.ops.kv import KV
from octavo.ops.triton import (
    TritonOps,
    has_kernels,
    invariant_attention,
    invariant_product,
    quant,
)
from octavo.ops.triton.quant.activation_gemm import Rounded
from octavo.ops.triton.quant.quant_gemm import Gemm
from octavo.ops.weight import QuantWeight, rounds_activations

# Tiles of products with quantised weights, by the largest number of rows. One block of weights is
# multiplied at a time, and no sum is divided, so all of them add in the same order.
QUANT_TILES = {
    16: Gemm(rows=16, outputs=64, blocks=1, stages=4, resident=3, splits=1),
    64: Gemm(rows=64, outputs=64, blocks=1, stages=3, resident=3, splits=1),
    2**31: Gemm(
        rows=128, outputs=128, blocks=1, stages=3, resident=2, outputs_per_warp=32, splits=1
    ),
}
# Weights and activations of fp8: products of 128 inputs are added outside of the tensor cores.
QUANT_FP8_TILES = {
    max_rows: Rounded(rounded.tile._replace(splits=1))
    for max_rows, rounded in quant.ROUNDED_FP8.items()
    if rounded.tile is not None
}
# For float32 activations, which tensor cores do not multiply exactly, and for older GPUs.
QUANT_FLOAT32_TILE = quant.FALLBACK_TILING._replace(splits=1)


class InvariantTritonOps(TritonOps):
    variant = "deterministic"

    def __init__(self) -> None:
        super().__init__()
        self.library_shapes = invariant_product.LibraryShapes()

    def pack(self, weight: Any) -> Any:
        if isinstance(weight, QuantWeight) and not has_kernels(weight.format):
            raise InvalidRequest(
                f"deterministic has no kernel for weights of the format {weight.format} on this "
                "GPU: use another format, or leave deterministic out",
                "deterministic",
            )
        return super().pack(weight)

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        return None

    def linear(
        self,
        hidden: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if isinstance(weight, quant.TritonWeight):
            tiling = quant_tiling(len(hidden), hidden.dtype, weight)
            return quant.linear(hidden, weight, bias, residual, tiling)
        if not isinstance(weight, Tensor):
            return super().linear(hidden, weight, bias, residual)  # calls this for each part
        return invariant_product.linear(hidden, weight, bias, residual, self.library_shapes)

    def logits(self, hidden: Tensor, weight: Any) -> Tensor:
        return self.linear(hidden, weight)

    def attention(
        self, query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        return invariant_attention.attention(query, kv_cache, batch, scale, window)


def quant_tiling(num_rows: int, dtype: torch.dtype, weight: quant.TritonWeight) -> quant.Tiling:
    tiles: Mapping[int, quant.Tiling] = QUANT_TILES
    if rounds_activations(weight.format):
        tiles = QUANT_FP8_TILES
    elif dtype == torch.float32 or quant.BEFORE_HOPPER:
        return QUANT_FLOAT32_TILE
    return next(tile for max_rows, tile in tiles.items() if num_rows <= max_rows)
