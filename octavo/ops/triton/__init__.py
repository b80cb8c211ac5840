"""The CUDA backend: Triton kernels for attention and for what lies between the matrix products, cuBLAS for the large ones.

Each kernel is the twin of one reference op: same name, same shapes, same rounding points.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.cuda import decode_megakernel
from octavo.ops.fused_spec import DecoderSpec, Fused
from octavo.ops.kv import KV
from octavo.ops.reference import ReferenceOps
from octavo.ops.triton import attention_kernels, dense_gemv, fused_kernels, quant, sampling_kernels
from octavo.ops.weight import JoinedWeight, QuantWeight


class TritonOps(ReferenceOps):
    name = "triton"

    def pack(self, weight: Any) -> Any:
        if isinstance(weight, JoinedWeight):
            return JoinedWeight(self.pack(part) for part in weight.parts)
        return quant.PackedWeight(weight) if isinstance(weight, QuantWeight) else weight

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        return decode_megakernel.fuse(decoder)

    def linear(
        self, x: Tensor, weight: Any, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        if isinstance(weight, quant.PackedWeight):
            return quant.linear(x, weight, bias, add)
        if isinstance(weight, JoinedWeight):
            y = torch.cat([self.linear(x, part) for part in weight.parts], 1)
            y = y if bias is None else y.add_(bias)
            return y if add is None else add.add_(y)
        if x.shape[0] == 1:
            return dense_gemv.gemv(x, weight, bias, add)
        if add is None:
            return super().linear(x, weight, bias)
        add.addmm_(x, weight.t())  # in the product's own epilogue
        return add if bias is None else add.add_(bias)

    def logits(self, x: Tensor, weight: Any) -> Tensor:
        """Rows that begin on 16 bytes: for those that begin anywhere (GPT-2 has 50,257 tokens) cuBLAS has an old kernel alone."""
        if not isinstance(weight, Tensor) or weight.shape[0] % 8 == 0 or x.shape[0] == 1:
            return self.linear(x, weight)
        rows = x.shape[0]
        vocab = weight.shape[0]
        return torch.mm(x, weight.t(), out=x.new_empty(rows, -(-vocab // 8) * 8)[:, :vocab])

    def embedding(self, ids: Tensor, weight: Any, scale: float = 1.0) -> Tensor:
        if isinstance(weight, quant.PackedWeight):
            return quant.embedding(ids, weight, scale)
        return super().embedding(ids, weight, scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
        return fused_kernels.rms_norm(x, weight, eps, add)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, add: Tensor | None = None
    ) -> Tensor:
        return fused_kernels.layer_norm(x, weight, bias, eps, add)

    def gelu(self, x: Tensor) -> Tensor:
        return fused_kernels.gelu(x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return fused_kernels.act_mul(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return fused_kernels.act_mul(gate_up, gelu=True)

    def rope_and_cache(
        self,
        qkv: Tensor,
        kv: KV,
        batch: ForwardBatch,
        cos_sin: Tensor | None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        return fused_kernels.rope_and_cache(qkv, kv, batch, cos_sin, q_norm, k_norm, eps)

    def attention(
        self, q: Tensor, kv: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        return attention_kernels.attention(q, kv, batch, scale, window)

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Plain KV is multiplied as it is, so it must be like the queries; Triton knows float8 (e4m3) from Ada and Hopper on."""
        float8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
        return (dtype, torch.int8, torch.float8_e4m3fn) if float8 else (dtype, torch.int8)

    def choose(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: Tensor,
        seed_low: Tensor,
        seed_high: Tensor,
        position: Tensor,
    ) -> Tensor:
        return sampling_kernels.choose(logits, rows, temperature, seed_low, seed_high, position)
