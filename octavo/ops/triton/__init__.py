"""The CUDA backend: Triton kernels for attention and for small ops, cuBLAS for large products.

Each kernel computes one op of the reference, with the same name, shapes and rounding points.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops import ForwardBatch, SamplingColumns
from octavo.ops.cuda import decode_megakernel
from octavo.ops.fused_spec import DecoderSpec, Fused
from octavo.ops.kv import KV
from octavo.ops.reference import ReferenceOps
from octavo.ops.triton import attention_kernels, dense_gemv, fused_kernels, quant, sampling_kernels
from octavo.ops.weight import JoinedWeight, QuantWeight, WeightFormat, rounds_activations


class TritonOps(ReferenceOps):
    name = "triton"
    capturable = True

    def __init__(self, cascade_attention: bool = False):
        self.cascade_attention = cascade_attention

    def pack(self, weight: Any) -> Any:
        if isinstance(weight, JoinedWeight):
            return JoinedWeight(self.pack(part) for part in weight.parts)
        if isinstance(weight, QuantWeight) and not has_kernels(weight.format):
            return weight  # The reference computes its products.
        return quant.TritonWeight(weight) if isinstance(weight, QuantWeight) else weight

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        return decode_megakernel.fuse(decoder)

    def linear(
        self,
        hidden: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if isinstance(weight, quant.TritonWeight):
            return quant.linear(hidden, weight, bias, residual)
        if isinstance(weight, JoinedWeight):
            output = torch.cat([self.linear(hidden, part) for part in weight.parts], 1)
            output = output if bias is None else output.add_(bias)
            return output if residual is None else residual.add_(output)
        if isinstance(weight, QuantWeight):
            return super().linear(hidden, weight, bias, residual)
        if hidden.shape[0] == 1:
            return dense_gemv.gemv(hidden, weight, bias, residual)
        if residual is None:
            return super().linear(hidden, weight, bias)
        residual.addmm_(hidden, weight.t())  # the epilogue of the product adds the residual
        return residual if bias is None else residual.add_(bias)

    def logits(self, hidden: Tensor, weight: Any) -> Tensor:
        """Compute logits with rows that are aligned to 16 bytes.

        cuBLAS has only an old kernel for unaligned rows, such as those of GPT-2 with 50,257 tokens.
        """
        if not isinstance(weight, Tensor) or weight.shape[0] % 8 == 0 or hidden.shape[0] == 1:
            return self.linear(hidden, weight)
        rows = hidden.shape[0]
        vocab_size = weight.shape[0]
        return torch.mm(
            hidden, weight.t(), out=hidden.new_empty(rows, -(-vocab_size // 8) * 8)[:, :vocab_size]
        )

    def embedding(self, token_ids: Tensor, weight: Any, scale: float = 1.0) -> Tensor:
        if isinstance(weight, quant.TritonWeight):
            return quant.embedding(token_ids, weight, scale)
        return super().embedding(token_ids, weight, scale)

    def rms_norm(
        self, hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
    ) -> Tensor:
        return fused_kernels.rms_norm(hidden, weight, epsilon, residual)

    def layer_norm(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        return fused_kernels.layer_norm(hidden, weight, bias, epsilon, residual)

    def gelu(self, hidden: Tensor) -> Tensor:
        return fused_kernels.gelu(hidden)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return fused_kernels.act_mul(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return fused_kernels.act_mul(gate_up, gelu=True)

    def rope_and_cache(
        self,
        qkv: Tensor,
        kv_cache: KV,
        batch: ForwardBatch,
        cos_sin: Tensor | None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        epsilon: float = 1e-6,
    ) -> Tensor:
        return fused_kernels.rope_and_cache(qkv, kv_cache, batch, cos_sin, q_norm, k_norm, epsilon)

    def attention(
        self, query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        return attention_kernels.attention(
            query, kv_cache, batch, scale, window, self.cascade_attention
        )

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes that KV may have.

        Plain KV has the dtype of the queries. Triton supports float8 (e4m3) from Ada and Hopper on.
        """
        return (dtype, torch.int8, torch.float8_e4m3fn) if multiplies_fp8() else (dtype, torch.int8)

    def choose(
        self, logits: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingColumns
    ) -> Tensor:
        return sampling_kernels.choose(logits, slots, positions, sampling)


def has_kernels(weight_format: WeightFormat) -> bool:
    """Whether there are kernels for a format on this GPU.

    There are none for fp8 weights in blocks whose activations are not rounded.
    """
    if rounds_activations(weight_format):
        return multiplies_fp8()
    return not (weight_format.is_float and weight_format.group_size)


def multiplies_fp8() -> bool:
    """Whether the GPU has instructions for e4m3 numbers: Ada, Hopper and later ones."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
