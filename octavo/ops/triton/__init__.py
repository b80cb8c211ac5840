"""The CUDA backend: Triton kernels for attention and for what lies between the matrix products, cuBLAS for the large ones.

Each kernel is the twin of one reference op: same name, same shapes, same rounding points.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.reference import ReferenceOps
from octavo.ops.triton import attention, fused, gemm, quant, sample
from octavo.ops.weight import QuantWeight


class TritonOps(ReferenceOps):
    name = "triton"

    def pack(self, weight: Any) -> Any:
        return quant.PackedWeight(weight) if isinstance(weight, QuantWeight) else weight

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, quant.PackedWeight):
            return quant.linear(x, weight, bias)
        if x.shape[0] == 1 and isinstance(weight, Tensor):
            return gemm.gemv(x, weight, bias)
        return super().linear(x, weight, bias)

    def embedding(self, ids: Tensor, weight: Any, scale: float = 1.0) -> Tensor:
        if isinstance(weight, quant.PackedWeight):
            return quant.embedding(ids, weight, scale)
        return super().embedding(ids, weight, scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused.add_rms_norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return fused.add_rms_norm(x, residual, weight, eps)

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
