"""A decoder as data: what a backend needs to compute all layers in one go. Weights are as ops.pack() returned them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.ops import ForwardBatch
    from octavo.ops.kv import KV

# (x [T, hidden], batch, kv [N, layers, 2, Hk, B, D]) -> hidden states after the last norm, [T, hidden], or where the batch has a
# `last` those of its logit_rows, [R, hidden]; or these and their logits, where it has made both. x may be overwritten. What a
# watched batch asks for is added to its mass, as ops.block_mass() would. None, and x as it was: not for such a batch.
Fused: TypeAlias = "Callable[[Tensor, ForwardBatch, KV], Tensor | tuple[Tensor, Tensor] | None]"


@dataclass(slots=True)
class DecoderLayer:
    """One layer: x += out(attention(qkv(norm(x)))); x += down(act(gate) * up), gate and up = gate_up(norm(x))."""

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    # of the four, in this order
    biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    attn_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_attn_norm: Tensor | None
    post_mlp_norm: Tensor | None
    cos_sin: Tensor  # [max_position, 2, D / 2]
    window: int  # positions it sees; 0: all


@dataclass(slots=True)
class DecoderSpec:
    layers: list[DecoderLayer]
    norm: Tensor
    heads: int
    kv_heads: int
    dim: int
    eps: float
    scale: float
    gelu: bool  # else silu
    dtype: torch.dtype
    head: Any = None  # the weights of the logits
