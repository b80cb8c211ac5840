"""The CUDA backend: Triton kernels for attention and for what lies between the matrix products, cuBLAS for the large ones.

Each kernel is the twin of one reference op: same name, same shapes, same rounding points.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.reference import ReferenceOps
from octavo.ops.triton import attention, fused, gemm, sample


class TritonOps(ReferenceOps):
    name = "triton"

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        if not isinstance(weight, Tensor):
            return super().linear(x, weight, bias, add)
        if x.shape[0] == 1:
            return gemm.gemv(x, weight, bias, add)
        if add is None:
            return super().linear(x, weight, bias)
        add.addmm_(x, weight.t())  # in the product's own epilogue
        return add if bias is None else add.add_(bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
        return fused.rms_norm(x, weight, eps, add)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return fused.act_mul(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return fused.act_mul(gate_up, gelu=True)

    def rope_and_cache(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: ForwardBatch,
        cos_sin: Tensor | None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        return fused.rope_and_cache(qkv, kv, batch, cos_sin, q_norm, k_norm, eps)

    def attention(self, q: Tensor, kv: Tensor, batch: ForwardBatch, scale: float, window: int = 0) -> Tensor:
        return attention.attention(q, kv, batch, scale, window)

    def choose(
        self, logits: Tensor, rows: Tensor, temperature: Tensor, seed_low: Tensor, seed_high: Tensor, position: Tensor
    ) -> Tensor:
        return sample.choose(logits, rows, temperature, seed_low, seed_high, position)
