"""A decoder as data, for a backend that computes all layers in one call.

Weights have the layout that ops.pack() returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.ops import ForwardBatch
    from octavo.ops.kv import KV

# A fused decoder takes hidden [T, hidden], a batch and kv [N, layers, 2, Hk, B, D]. It may
# overwrite hidden. It returns one of:
#   - the hidden states after the last norm, [T, hidden], or [R, hidden] of batch.logit_indices if
#     batch.last is set
#   - a tuple of these hidden states and their logits
#   - None if it does not support such a batch; it has not changed hidden then
# If batch.watched is set, it adds the attention mass to it, as ops.block_mass() does.
Fused: TypeAlias = "Callable[[Tensor, ForwardBatch, KV], Tensor | tuple[Tensor, Tensor] | None]"


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer.

    hidden += out(attention(qkv(norm(hidden))))
    hidden += down(act(gate) * up), where gate and up are the halves of gate_up(norm(hidden))
    """

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    # the biases of qkv, out, gate_up and down
    biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    attn_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_attn_norm: Tensor | None
    post_mlp_norm: Tensor | None
    cos_sin: Tensor  # [max_position, 2, D / 2]
    window: int  # the number of positions that a token sees; 0 means all


@dataclass(slots=True)
class DecoderSpec:
    """The layers of a decoder and the sizes that they share."""

    layers: list[DecoderLayer]
    norm: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    gelu: bool  # the activation is GELU (tanh) instead of SiLU
    dtype: torch.dtype
    head: Any = None  # the weight of the output head
