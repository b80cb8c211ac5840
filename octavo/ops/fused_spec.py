"""A decoder as data, for a backend that computes all layers in one call.

Weights have the layout that ops.pack() returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.ops import ForwardBatch, SamplingColumns
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


# ---- draft heads ---------------------------------------------------------------------------------


@dataclass(slots=True)
class DraftHeadSpec:
    """A draft head (octavo/model/draft_head.py) as data."""

    decoder: DecoderSpec  # one layer, whose attention reads a token and a hidden state side by side
    embedding: Any  # the weight of the target's embedding
    hidden_norm: Tensor  # the norm of the hidden state; the layer's attn_norm is the token's
    token_ids: Tensor  # [draft vocabulary] the target's id of each draft token (int64)
    norms_residual: bool  # the residual is the hidden state after its norm


class SlotMemory(NamedTuple):
    """The memory of the batch slots: columns of one table, with a row for each slot. All numbers
    have 32 bits."""

    tokens: Tensor  # [slots, positions]
    computed: Tensor  # [slots] positions whose KV is computed
    dropped: Tensor  # [slots] positions of the text that are not in the cache
    block_table: Tensor  # [slots, W]
    sampling: SamplingColumns


class FusedDraftHead(Protocol):
    """`outputs` [slots, hidden] are the head's outputs behind the last token of each slot, from
    which drafts are continued. kv_cache is [N, 2, Hk, B, D]."""

    def compute(self, hidden: Tensor, batch: ForwardBatch, kv_cache: KV) -> Tensor:
        """Compute the layer, as DraftHead.compute does."""
        ...

    def extend(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        memory: SlotMemory,
        outputs: Tensor,
        kv_cache: KV,
    ) -> None:
        """Compute the layer behind a step that decodes, and update `outputs`. hidden [R, hidden] is
        overwritten."""
        ...

    def draft(
        self,
        slots: Tensor,
        counts: list[int],
        memory: SlotMemory,
        outputs: Tensor,
        kv_cache: KV,
        max_len: int,
    ) -> None:
        """Write counts[i] drafts behind the known tokens of slots[i], for slots [S] (int32). No
        draft is behind position max_len."""
        ...


# ---- whole steps ---------------------------------------------------------------------------------


@dataclass(slots=True)
class StepSpec:
    """A model as data: from token ids to logits."""

    decoder: DecoderSpec  # with the output head
    embedding: Any  # the weight of the embedding
    embedding_scale: float


class StepRows(NamedTuple):
    """The R rows of a step that decodes. Each row is one token of a slot, at the position
    memory.computed[slot] + offset."""

    slots: Tensor  # [R] int32
    offsets: Tensor  # [R] int32: 0, 1, 2... for the rows of one slot, which are neighbours
    num_sequences: int  # slots with rows
    memory: SlotMemory
    max_len: int  # no row is at or behind this position


class StepResults(NamedTuple):
    batch: ForwardBatch  # what was computed
    hidden: Tensor  # [R, hidden] after the last norm
    logits: Tensor  # [R, vocab]
    tokens: Tensor  # [R] int32: the sampled tokens, which are in the slots too
    kept: Tensor  # [R] int32: 1 if all drafts up to the token of this row were accepted


# A fused step computes rows, samples a token behind each, and advances each slot over the rows that
# are kept. kv is [N, layers, 2, Hk, B, D].
FusedStep: TypeAlias = "Callable[[StepRows, KV], StepResults]"
