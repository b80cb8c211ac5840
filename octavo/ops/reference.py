"""Every op in plain PyTorch: the oracle for tests of the faster backends, and their documentation.

It runs on any device and never makes the host wait: loops follow batch.spans, which the host knows,
and true lengths are used only in masks on the device. It does not depend on models, requests or
block allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import (
    LOGIT_UNITS_PER_TEMPERATURE,
    MAX_LOGIT_UNITS,
    ForwardBatch,
    SamplingColumns,
    Watched,
    fp8_linear,
)
from octavo.ops.collectives import Collectives, SingleRank
from octavo.ops.fused_spec import (
    DecoderSpec,
    DraftHeadSpec,
    Fused,
    FusedDraftHead,
    FusedStep,
    StepSpec,
)
from octavo.ops.kv import KV, LARGEST, QuantKV, compress, expand
from octavo.ops.weight import JoinedWeight, QuantWeight, dense, rounds_activations

# Rows that are filtered at once: sorting takes ten times the memory of its input.
FILTERED_ROWS = 64


class Group(NamedTuple):
    """Neighbouring items with the same number of tokens, as one problem.

    The problem has L = W * B key positions.
    """

    tokens: slice  # its tokens in the packed batch
    items: int
    num: int  # the number of tokens of each item
    end: int  # an upper bound of the sequence lengths
    fresh: bool  # these are the first tokens of their sequences
    blocks: Tensor  # [items * W] physical blocks to read
    queries: Tensor  # [items, 1, num, 1] positions of the queries
    keys: Tensor  # [L] positions of the keys
    stale: Tensor  # [items, 1, L, 1] whether a key position is after the end of the sequence


class ReferenceOps:
    name = "reference"
    variant = ""
    capturable = False
    ranks: Collectives = SingleRank()

    def pack(self, weight: Any) -> Any:
        return weight

    def linear(
        self,
        hidden: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if isinstance(weight, JoinedWeight):
            output = torch.cat([self.linear(hidden, part) for part in weight.parts], 1)
            output = output if bias is None else output + bias
        elif isinstance(weight, QuantWeight) and rounds_activations(weight.format):
            output = fp8_linear.linear(hidden, weight, bias)
        else:
            output = F.linear(hidden, dense(weight, hidden.dtype), bias)
        return output if residual is None else output + residual

    def logits(self, hidden: Tensor, weight: Any) -> Tensor:
        return self.linear(hidden, weight)

    def embedding(self, token_ids: Tensor, weight: Any, scale: float = 1.0) -> Tensor:
        if isinstance(weight, QuantWeight):
            weight = weight[token_ids].dequantize()
            token_ids = torch.arange(len(token_ids), device=token_ids.device)
        output = F.embedding(token_ids, weight)
        return (
            output
            if scale == 1.0
            else output * torch.tensor(scale, dtype=weight.dtype, device="cpu").item()
        )

    def rms_norm(
        self, hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
    ) -> Tensor:
        output = F.rms_norm(hidden.float(), weight.shape, weight.float(), epsilon).to(hidden.dtype)
        return output if residual is None else output + residual

    def layer_norm(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        if residual is not None:
            hidden += residual
        return F.layer_norm(hidden.float(), weight.shape, weight.float(), bias.float(), epsilon).to(
            hidden.dtype
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.gelu(gate) * up

    def gelu(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden, approximate="tanh")

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
        _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        all_heads = qkv.view(qkv.shape[0], -1, head_dim)
        query, key, value = all_heads.split(
            [all_heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1
        )
        if q_norm is not None:
            query = self.rms_norm(query, q_norm, epsilon)
        if k_norm is not None:
            key = self.rms_norm(key, k_norm, epsilon)
        if cos_sin is not None:
            cos, sin = cos_sin[batch.positions].unsqueeze(2).unbind(1)  # each [T, 1, D / 2]
            query = rotate(query, cos, sin)
            key = rotate(key, cos, sin)
        if "write" not in batch.scratch:
            batch.scratch["write"] = (batch.kv_indices // block_size, batch.kv_indices % block_size)
        blocks, offsets = batch.scratch["write"]
        for kind, states in enumerate((key, value)):
            if isinstance(kv_cache, QuantKV):
                codes, kv_cache.scales[blocks, kind, :, offsets] = compress(states, kv_cache.dtype)
                as_bytes(kv_cache.codes)[blocks, kind, :, offsets] = as_bytes(codes)
            else:
                kv_cache[blocks, kind, :, offsets] = states.to(kv_cache.dtype)
        return query

    def attention(
        self, query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        if "groups" not in batch.scratch:
            batch.scratch["groups"] = list(group_items(batch, block_size))
        output = query.new_empty(query.shape)
        if isinstance(kv_cache, QuantKV):
            query = query.float()  # so that codes are not rounded before they are added up
        for index, group in enumerate(batch.scratch["groups"]):
            num_items = group.items
            num_tokens = group.num
            cached = gather_blocks(kv_cache, group.blocks).view(
                num_items, -1, 2, num_kv_heads, block_size, head_dim
            )
            cached = (
                cached.permute(2, 0, 3, 1, 4, 5)
                .reshape(2, num_items, num_kv_heads, -1, head_dim)
                .to(query.dtype)
            )
            visible_window = window if window < group.end else 0
            if group.fresh and not visible_window:  # SDPA computes a causal triangle without a mask
                (key, value) = cached[..., :num_tokens, :]
                mask = None
            else:
                # A key position may hold inf or NaN of another sequence, and 0 * NaN is NaN.
                (key, value) = cached.masked_fill_(group.stale, 0)
                mask = batch.scratch.get((index, visible_window))
                if mask is None:
                    mask = group.keys <= group.queries
                    if visible_window:
                        mask &= group.keys > group.queries - visible_window
                    batch.scratch[index, visible_window] = mask
            query_rows = (
                query[group.tokens].view(num_items, num_tokens, -1, head_dim).transpose(1, 2)
            )  # [items, Hq, num, D]
            if num_tokens == 1:
                # Query heads that share a key head become the rows of one product. On a CPU this is
                # twice as fast as one product for each head.
                query_rows = query_rows.reshape(num_items, num_kv_heads, -1, head_dim)
            result = F.scaled_dot_product_attention(
                query_rows,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query_rows.shape[1] != num_kv_heads,
            )
            output[group.tokens].view(num_items, num_tokens, -1, head_dim).copy_(
                result.reshape(num_items, -1, num_tokens, head_dim).transpose(1, 2)
            )
        return output

    def block_mass(
        self, query: Tensor, kv_cache: Tensor, watched: Watched, scale: float, window: int = 0
    ) -> None:
        _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        num_watched, num_blocks = watched.blocks.shape
        keys = (
            kv_cache[:, 0]
            .index_select(0, watched.blocks.flatten())
            .view(num_watched, num_blocks, num_kv_heads, block_size, head_dim)
            .float()
        )
        query_rows = query[watched.tokens].view(num_watched, num_kv_heads, -1, head_dim).float()
        scores = torch.einsum("nhgd,nwhbd->nhgwb", query_rows, keys).flatten(3) * scale
        positions = torch.arange(num_blocks * block_size, device=query.device)
        masked = positions >= watched.lengths[:, None]
        if window:
            masked |= positions < watched.lengths[:, None] - window
        probabilities = scores.masked_fill(masked[:, None, None], -torch.inf).softmax(-1)
        watched.mass += probabilities.view(num_watched, -1, num_blocks, block_size).sum(-1).mean(1)

    def shift(self, kv_cache: Tensor, blocks: Tensor, distance: int, cos_sin: Tensor) -> None:
        # YaRN scales cos and sin. The keys are scaled already, so the scale is divided out.
        cos, sin = cos_sin[distance] / cos_sin[0, 0]
        keys = kv_cache[:, :, 0]
        # One layer at a time, so that only some MB of the cache are copied at once.
        for layer in range(kv_cache.shape[1]):
            keys[blocks, layer] = rotate(keys[blocks, layer], cos, -sin)

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16, torch.float16, *LARGEST)

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        return None

    def fuse_draft_head(self, head: DraftHeadSpec) -> FusedDraftHead | None:
        return None

    def fuse_step(self, model: StepSpec) -> FusedStep | None:
        return None

    def choose(
        self, logits: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingColumns
    ) -> Tensor:
        rows = rows_of(sampling, slots)
        kept = keep_likely(logits.float(), rows)
        is_greedy = (rows.temperature == 0)[:, None]
        noise = gumbel(rows.seed_low, rows.seed_high, positions, logits.shape[1])
        temperature = torch.where(is_greedy, 1.0, rows.temperature[:, None])
        scores = kept / temperature + noise.masked_fill(is_greedy, 0.0)
        return scores.argmax(1).where(logits.amax(1).isfinite(), -1).int()


def as_bytes(codes: Tensor) -> Tensor:
    """View codes as int8, because torch has few operations on float8."""
    return codes.view(torch.int8)


def gather_blocks(kv_cache: KV, blocks: Tensor) -> Tensor:
    """Copy some blocks of kv_cache [N, 2, Hk, B, D], and expand them if they are compressed."""
    if not isinstance(kv_cache, QuantKV):
        return kv_cache.index_select(0, blocks)
    codes = as_bytes(kv_cache.codes).index_select(0, blocks).view(kv_cache.dtype)
    return expand(QuantKV(codes, kv_cache.scales.index_select(0, blocks)))


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate states [T, H, D] by the angles of cos and sin [T, 1, D / 2].

    Dimension i is rotated together with dimension i + D / 2.
    """
    first_half, second_half = states.float().chunk(2, dim=-1)
    return torch.cat(
        (first_half * cos - second_half * sin, second_half * cos + first_half * sin), dim=-1
    ).to(states.dtype)


def group_items(batch: ForwardBatch, block_size: int) -> Iterator[Group]:
    """Group neighbouring items, so that a group is a slice of the batch and needs no gather.

    Decoding items, with one token each, are neighbours in a batch and form one group.
    """
    device = batch.positions.device
    for (num_tokens, fresh), members_run in groupby(
        enumerate(batch.spans),
        key=lambda indexed_span: (indexed_span[1].num, indexed_span[1].end == indexed_span[1].num),
    ):
        members = list(members_run)
        num_items = len(members)
        first_token = members[0][1].first
        first_item = members[0][0]
        max_length = max(span.end for _, span in members)
        num_blocks = -(-max_length // block_size)
        tokens = slice(first_token, first_token + num_items * num_tokens)
        keys = torch.arange(num_blocks * block_size, device=device)
        yield Group(
            tokens=tokens,
            items=num_items,
            num=num_tokens,
            end=max_length,
            fresh=fresh and num_tokens > 1,
            blocks=batch.block_table[
                batch.slots[first_item : first_item + num_items], :num_blocks
            ].flatten(),
            queries=batch.positions[tokens].view(num_items, 1, num_tokens, 1),
            keys=keys,
            stale=(keys >= batch.seq_lens[first_item : first_item + num_items, None]).view(
                num_items, 1, -1, 1
            ),
        )


def keep_likely(logits: Tensor, rows: SamplingColumns) -> Tensor:
    """Set all but the likeliest tokens of logits [R, vocab] (float32) to -inf, by the parameters of
    each row.

    First remove tokens that are less than min_p times as likely as the likeliest one, then all but
    the top_k likeliest. Then normalise the others, and keep the smallest set of the likeliest
    tokens whose probabilities sum to at least top_p.
    """
    if logits.device.type == "cpu" and not is_filtered(rows, logits.shape[1]).any():
        return logits  # a GPU would have to wait for the answer
    chunks = zip(
        logits.split(FILTERED_ROWS),
        zip(*(column.split(FILTERED_ROWS) for column in rows), strict=True),
        strict=True,
    )
    return torch.cat([_keep_likely(part, SamplingColumns._make(row)) for part, row in chunks])


def _keep_likely(logits: Tensor, rows: SamplingColumns) -> Tensor:
    distance = logits.amax(1, keepdim=True) - logits
    units_per_logit = LOGIT_UNITS_PER_TEMPERATURE / torch.where(
        rows.temperature == 0, 1.0, rows.temperature
    )
    units = (distance * units_per_logit[:, None]).clamp(max=MAX_LOGIT_UNITS).nan_to_num(0.0).int()
    ordered, order = units.sort(dim=1, stable=True)
    ranks = torch.arange(logits.shape[1], device=logits.device)[None, :]
    unlikely = (ordered > rows.max_distance[:, None]) | (ranks >= rows.top_k[:, None])
    weights = (-ordered.double() / LOGIT_UNITS_PER_TEMPERATURE).exp().masked_fill(unlikely, 0.0)
    reached = weights.cumsum(1) - weights >= rows.top_p.double()[:, None] * weights.sum(1)[:, None]
    dropped = unlikely | (reached & (rows.top_p < 1)[:, None])
    dropped[:, 0] = False
    dropped &= (rows.temperature > 0)[:, None]
    return logits.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), -torch.inf)


def rows_of(sampling: SamplingColumns, slots: Tensor) -> SamplingColumns:
    """Return the parameters of some slots [R] (int32)."""
    return SamplingColumns._make(column[slots.long()] for column in sampling)


def is_filtered(rows: SamplingColumns, vocab_size: int) -> Tensor:
    """Return which rows are sampled with min-p, top-k or top-p [R] (bool)."""
    has_filter = (
        (rows.top_k < vocab_size) | (rows.top_p < 1) | (rows.max_distance < MAX_LOGIT_UNITS)
    )
    return has_filter & (rows.temperature > 0)


def _mix(bits: Tensor) -> Tensor:
    """Hash int32 to int32 with a bijection: xor-shift and multiply, twice."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def noise_key(seed_low: Tensor, seed_high: Tensor, position: Tensor) -> Tensor:
    """Hash seeds and positions [R] (int32) to the noise key of each row, [R] (int32)."""
    return _mix(seed_low ^ _mix(seed_high ^ _mix(position)))


def gumbel(seed_low: Tensor, seed_high: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Return gumbel noise [R, vocab] for seeds and positions [R] (int32).

    Its resolution is finest where the noise is largest, because large noise decides the sample.
    """
    key = noise_key(seed_low, seed_high, position)
    tokens = _mix(torch.arange(vocab_size, dtype=torch.int32, device=key.device))
    bits = _mix(tokens[None, :] ^ key[:, None]).long() & 0xFFFFFFFF
    # A uniform number of 1 would give infinite noise.
    uniform = (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
