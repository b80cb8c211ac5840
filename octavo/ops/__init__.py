"""The backend interface: what a model may ask of a device. Same names, same shapes, several implementations.

`reference` is plain PyTorch, runs everywhere and is the oracle that every faster backend is tested against.
A model never asks which backend it has. Letters in the shapes below:

    T  tokens of all sequences in the step, packed without padding      Hq, Hk  query heads, key/value heads
    S  sequences (items) in the step                                    D       head dimension
    B  positions in a block                                             N       blocks in the pool
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.ops.fused_spec import DecoderSpec, Fused
    from octavo.ops.kv import KV

log = logging.getLogger(__name__)


class Span(NamedTuple):
    """One item's place in the packed batch, as far as the host knows it without asking the device."""

    first: int  # index of its first token in the packed batch
    num: int  # how many tokens
    end: int  # at least its sequence length after this step


@dataclass(slots=True)
class Watched:
    """Items of one token each, of which it is wanted how their attention is spread over their blocks."""

    tokens: Tensor  # [n] indices into T (int64)
    lengths: Tensor  # [n] as seq_lens
    blocks: Tensor  # [n, W] of the cache, as far as the longest reaches (int64)
    mass: Tensor  # [n, W] float32: what the layers add up to, each the mean over its heads


@dataclass(slots=True)
class ForwardBatch:
    """What one forward pass computes. All tensors are on the device, integers int32 unless said otherwise."""

    ids: Tensor  # [T] token ids (int64)
    positions: Tensor  # [T] (int64)
    kv_indices: Tensor  # [T] block * B + offset, where each token's K and V go (int64)
    query_start: Tensor  # [S + 1] packed offsets
    # [S] positions readable after this step's writes: the last token's position + 1
    seq_lens: Tensor
    # [rows, W] physical block of each logical block; entries past a sequence's end are any valid
    # block
    block_table: Tensor
    slots: Tensor  # [S] each item's batch slot: its row of block_table
    logit_indices: Tensor  # [R] indices into T of the tokens whose logits are wanted (int64)
    spans: list[Span]  # [S] the host's view
    # The sampled items' last tokens alone, as a batch of one token an item, where nothing else of the hidden states is wanted:
    # a model's last layer then computes K and V for all tokens and the rest for these.
    last: ForwardBatch | None = None
    watched: Watched | None = None  # items whose attention is looked at
    # What a backend derives from the fields above once and every layer reads (masks, write targets). A batch is one step's.
    scratch: dict[Any, Any] = field(default_factory=dict)


class Ops(Protocol):
    """All arithmetic a decoder needs. Norms, softmax and rotation are computed in float32 inside, whatever the input is."""

    name: str

    def pack(self, weight: Any) -> Any:
        """weight [out, in], a Tensor or a QuantWeight (octavo.ops.weight), in the layout that this backend's linear() reads
        fastest, perhaps weight itself. Called once, when loading is over; what it returns may be opaque: only linear()
        reads it, and embedding() if the weight was quantised."""
        ...

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        """All layers of a decoder as one function, for all batches or for some; None where this backend computes them op by op.
        Called after pack()."""
        ...

    def linear(
        self, x: Tensor, weight: Any, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        """x [T, in], weight [out, in] (packed or not) -> [T, out], plus add [T, out] where given. What add was is gone: its
        memory may hold the result."""
        ...

    def logits(self, x: Tensor, weight: Any) -> Tensor:
        """As linear, for a head: the result's rows may lie further apart than they are long."""
        ...

    def embedding(self, ids: Tensor, weight: Any, scale: float = 1.0) -> Tensor:
        """ids [T], weight [vocab, hidden] -> [T, hidden], times scale (rounded to the weight's dtype, as Gemma does).
        A quantised weight gives float32."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
        """x [..., hidden], weight [hidden] -> like x, plus add where given"""
        ...

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, add: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden] -> like x. Where add is given it is added to x itself first, in place."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * inter] -> silu(gate) * up, [T, inter]"""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * inter] -> gelu_tanh(gate) * up, [T, inter]"""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """tanh-approximated GELU"""
        ...

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
        """Split qkv [T, (Hq + 2 Hk) * D]; normalise q and k per head where norms [D] are given; rotate both by
        cos_sin [max_position, 2, D / 2] (None: no rotation); write k and v to batch.kv_indices of kv [N, 2, Hk, B, D],
        compressed if it is a QuantKV. Returns q [T, Hq, D]. One op, because on a GPU it is one kernel."""
        ...

    def attention(
        self, q: Tensor, kv: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        """Causal attention of q [T, Hq, D] over the paged kv [N, 2, Hk, B, D] -> [T, Hq, D]. Query head h reads key head
        h // (Hq // Hk). A token at position p sees positions p - window + 1 .. p (window 0: all). Sums are in float32."""
        ...

    def block_mass(
        self, q: Tensor, kv: Tensor, watched: Watched, scale: float, window: int = 0
    ) -> None:
        """Add to watched.mass the part of attention that each block gets from the watched tokens of q [T, Hq, D], which is
        as in attention(), the mean over heads. kv [N, 2, Hk, B, D]: plain numbers."""
        ...

    def shift(self, kv: Tensor, blocks: Tensor, by: int, cos_sin: Tensor) -> None:
        """Turn the keys of some blocks [n] (int64) of kv [N, layers, 2, Hk, B, D], plain numbers, back by this many positions,
        as if they had been written that much nearer to the front. cos_sin [max_position, 2, D / 2]: what turned them."""
        ...

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """What kv may be made of where activations are of this dtype: plain numbers, or codes (octavo.ops.kv)."""
        ...

    def choose(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: Tensor,
        seed_low: Tensor,
        seed_high: Tensor,
        position: Tensor,
    ) -> Tensor:
        """Draw a token from softmax(logits / temperature) for each of logits [R, vocab]; temperature 0 takes the likeliest.
        rows [R] says which entries of temperature (float32) and the seed's halves are whose; position [R] is the new
        token's. The draw is a function of (logits, temperature, seed, position). Returns [R] int32; -1 where one
        of the logits is NaN or the largest not finite."""
        ...


def select(device: str) -> Ops:
    """The backend for a device."""
    if device == "cpu":
        from octavo.ops.cpu import CpuOps

        return CpuOps()
    try:
        from octavo.ops.triton import TritonOps

        return TritonOps()
    except ImportError as missing:
        from octavo.ops.reference import ReferenceOps

        log.warning(
            "Triton cannot be used (%s): running plain PyTorch, several times slower", missing
        )
        return ReferenceOps()
