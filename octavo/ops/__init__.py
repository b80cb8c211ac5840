"""The backend interface: the operations that a model may call.

`reference` is plain PyTorch. It runs everywhere and is the oracle for tests of the faster backends.
A model never asks which backend it has. The letters in the shapes below mean:

    T         tokens of all sequences in the step, packed without padding
    S         sequences (items) in the step
    B         positions in a block
    N         blocks in the pool
    Hq, Hk    query heads, key/value heads
    D         head dimension
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.ops.collectives import Collectives
    from octavo.ops.fused_spec import (
        DecoderSpec,
        DraftHeadSpec,
        Fused,
        FusedDraftHead,
        FusedStep,
        StepSpec,
    )
    from octavo.ops.kv import KV


class Span(NamedTuple):
    """The position of one item in the packed batch, as the host knows it."""

    first: int  # the index of its first token in the packed batch
    num: int  # its number of tokens
    end: int  # an upper bound of its sequence length after this step


@dataclass(slots=True)
class Watched:
    """Items of one token each whose attention mass per block is measured."""

    tokens: Tensor  # [n] indices into T (int64)
    lengths: Tensor  # [n] sequence lengths, as seq_lens
    blocks: Tensor  # [n, W] blocks of the cache, for the longest sequence (int64)
    mass: Tensor  # [n, W] float32, the sum over layers of the mean over heads


@dataclass(slots=True)
class ForwardBatch:
    """The inputs of one forward pass.

    All tensors are on the device. Integers are int32 unless another dtype is given.
    """

    ids: Tensor  # [T] token ids (int64)
    positions: Tensor  # [T] (int64)
    kv_indices: Tensor  # [T] the index block * B + offset of each token's K and V (int64)
    query_start: Tensor  # [S + 1] offsets into the packed batch
    seq_lens: Tensor  # [S] sequence lengths after this step: the last token's position + 1
    # [rows, W] the physical block of each logical block; entries after a sequence's end are any
    # valid block
    block_table: Tensor
    slots: Tensor  # [S] the batch slot of each item, which is its row of block_table
    logit_indices: Tensor  # [R] indices into T of the tokens whose logits are needed (int64)
    spans: list[Span]  # [S] the host's view of the items
    # The last tokens of the sampled items, as a batch with one token for each item. It is set if no
    # other hidden states are needed: the last layer then computes K and V for all tokens, and the
    # rest for these tokens only.
    last: ForwardBatch | None = None
    watched: Watched | None = None  # items whose attention mass is measured
    # [T, layers, hidden] The hidden states before some layers. The model sets it if a draft head
    # has asked for them.
    aux_hidden_states: Tensor | None = None
    # Values that a backend derives once from the fields above and every layer reads, such as masks.
    scratch: dict[Any, Any] = field(default_factory=dict)


class SamplingColumns(NamedTuple):
    """The sampling parameters of all batch slots, one entry for each slot.

    Likelihood is compared by the distance of a logit from the largest one of its row, in logit
    units (LOGIT_UNITS_PER_TEMPERATURE), rounded down. Tokens at the same distance rank by their id.
    """

    temperature: Tensor  # float32; 0: take the likeliest token
    top_p: Tensor  # float32; 1: off
    top_k: Tensor  # int32; as large as the vocabulary: off
    max_distance: Tensor  # int32, min-p in logit units; MAX_LOGIT_UNITS or more: off
    seed_low: Tensor  # int32
    seed_high: Tensor  # int32


# A logit unit is the unit in which distances between logits are integers: temperature / 2^26.
LOGIT_UNITS_PER_TEMPERATURE = 2**26
MAX_LOGIT_UNITS = 2**31 - 128  # the largest float32 below 2^31; larger distances count as this one


class Ops(Protocol):
    """All arithmetic that a decoder needs.

    Norms, softmax and rotation are computed in float32 for every input dtype.
    """

    name: str
    variant: str  # names the operators of another backend; "" if there are none
    capturable: bool  # whether steps can be captured as CUDA graphs
    # The ranks that hold the parts of a divided model (octavo/model/tensor_parallel.py).
    ranks: Collectives

    def pack(self, weight: Any) -> Any:
        """Return weight [out, in] in the layout that this backend's linear() reads fastest.

        The weight is a Tensor or a QuantWeight (octavo.ops.weight). This is called once, after
        loading. The result may be opaque: only linear() reads it, and embedding() if the weight is
        quantised.
        """
        ...

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        """Return a function that computes all layers of a decoder, for all batches or for some.

        Return None if this backend computes them op by op. This is called after pack().
        """
        ...

    def fuse_draft_head(self, head: DraftHeadSpec) -> FusedDraftHead | None:
        """Return an object that computes a draft head in few calls.

        Return None if this backend computes it op by op. This is called after pack().
        """
        ...

    def fuse_step(self, model: StepSpec) -> FusedStep | None:
        """Return a function that computes steps that decode, from batch slots to new tokens.

        Return None if this backend has none. This is called after pack().
        """
        ...

    def linear(
        self,
        hidden: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """hidden [T, in], weight [out, in] (packed or not) -> [T, out]

        If a residual [T, out] is given, it is added, and its memory may be overwritten.
        """
        ...

    def logits(self, hidden: Tensor, weight: Any) -> Tensor:
        """Compute logits like linear(). The rows of the result may be padded in memory."""
        ...

    def embedding(self, token_ids: Tensor, weight: Any, scale: float = 1.0) -> Tensor:
        """token_ids [T], weight [vocab, hidden] -> [T, hidden], times scale

        The scale is rounded to the weight's dtype, as in Gemma. A quantised weight gives float32.
        """
        ...

    def rms_norm(
        self, hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
    ) -> Tensor:
        """hidden [..., hidden], weight [hidden] -> like hidden, plus the residual if given"""
        ...

    def layer_norm(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        """hidden [T, hidden] -> like hidden. A residual is first added to hidden, in place."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * inter] -> silu(gate) * up, [T, inter]"""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * inter] -> gelu_tanh(gate) * up, [T, inter]"""
        ...

    def gelu(self, hidden: Tensor) -> Tensor:
        """Compute GELU in its tanh approximation."""
        ...

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
        """Split qkv [T, (Hq + 2 Hk) * D], write K and V to the cache, and return Q [T, Hq, D].

        Q and K are normalised per head if the norms [D] are given, and rotated by
        cos_sin [max_position, 2, D / 2] unless it is None. K and V are written to batch.kv_indices
        of kv_cache [N, 2, Hk, B, D], compressed if it is a QuantKV. This is one op because it is
        one kernel on a GPU.
        """
        ...

    def attention(
        self, query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        """Causal attention of query [T, Hq, D] over kv_cache [N, 2, Hk, B, D] -> [T, Hq, D]

        Query head h reads key head h // (Hq // Hk). A token at position p sees the positions
        p - window + 1 .. p, or all positions up to p if window is 0. Sums are in float32.
        """
        ...

    def block_mass(
        self, query: Tensor, kv_cache: Tensor, watched: Watched, scale: float, window: int = 0
    ) -> None:
        """Add the attention mass of each block to watched.mass, as a mean over heads.

        query [T, Hq, D] is the same as in attention(). kv_cache [N, 2, Hk, B, D] is not compressed.
        """
        ...

    def shift(self, kv_cache: Tensor, blocks: Tensor, distance: int, cos_sin: Tensor) -> None:
        """Rotate the keys of some blocks [n] (int64) back by `distance` positions.

        Afterwards the keys are as if they had been written at earlier positions.
        kv_cache [N, layers, 2, Hk, B, D] is not compressed. cos_sin [max_position, 2, D / 2] is the
        rope table that the keys were rotated by.
        """
        ...

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes of numbers or codes (octavo.ops.kv) that the KV cache may have.

        `dtype` is the dtype of activations.
        """
        ...

    def choose(
        self, logits: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingColumns
    ) -> Tensor:
        """Sample a token from softmax(logits / temperature) for each row of logits [R, vocab].

        Only tokens that min-p, then top-k, then top-p keep are sampled. slots [R] are the rows'
        batch slots, positions [R] the positions of the new tokens (int32). A token depends on
        (logits, parameters, seed, position) only. Returns [R] int32, with -1 for a row that has a
        NaN or whose largest logit is not finite.
        """
        ...
