"""Every op in plain PyTorch: the oracle that faster backends are tested against, and the documentation of what they compute.

It runs on any device and never makes the host wait for it: loops follow batch.spans, which the host knows, and true lengths
act only through masks computed on the device. It knows nothing of models, requests or block allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import ForwardBatch, Watched
from octavo.ops.fused_spec import DecoderSpec, Fused
from octavo.ops.kv import KV, LARGEST, QuantKV, compress, expand
from octavo.ops.weight import QuantWeight, dense


class Group(NamedTuple):
    """Neighbouring items with the same number of tokens: one rectangular attention problem over L = W * B slots."""

    tokens: slice  # its place in the packed batch
    items: int
    num: int  # tokens of each item
    end: int  # no sequence is longer
    fresh: bool  # nothing precedes these tokens
    blocks: Tensor  # [items * W] physical blocks to read
    queries: Tensor  # [items, 1, num, 1] positions
    keys: Tensor  # [L] positions
    stale: Tensor  # [items, 1, L, 1] slots past the end of the sequence


class ReferenceOps:
    name = "reference"

    def pack(self, weight: Any) -> Any:
        return weight

    def linear(
        self, x: Tensor, weight: Any, bias: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        out = F.linear(x, dense(weight, x.dtype), bias)
        return out if add is None else out + add

    def logits(self, x: Tensor, weight: Any) -> Tensor:
        return self.linear(x, weight)

    def embedding(self, ids: Tensor, weight: Any, scale: float = 1.0) -> Tensor:
        if isinstance(weight, QuantWeight):
            ids, weight = torch.arange(len(ids), device=ids.device), weight[ids].dequantize()
        out = F.embedding(ids, weight)
        return (
            out
            if scale == 1.0
            else out * torch.tensor(scale, dtype=weight.dtype, device="cpu").item()
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
        out = F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
        return out if add is None else out + add

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, add: Tensor | None = None
    ) -> Tensor:
        if add is not None:
            x += add
        return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.gelu(gate) * up

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

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
        _, _, kv_heads, block_size, dim = kv.shape
        heads = qkv.view(qkv.shape[0], -1, dim)
        q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        if cos_sin is not None:
            cos, sin = cos_sin[batch.positions].unsqueeze(2).unbind(1)  # each [T, 1, D / 2]
            q = rotate(q, cos, sin)
            k = rotate(k, cos, sin)
        if "write" not in batch.scratch:
            batch.scratch["write"] = (batch.kv_indices // block_size, batch.kv_indices % block_size)
        block, offset = batch.scratch["write"]
        for kind, x in enumerate((k, v)):
            if isinstance(kv, QuantKV):
                codes, kv.scales[block, kind, :, offset] = compress(x, kv.dtype)
                as_bytes(kv.codes)[block, kind, :, offset] = as_bytes(codes)
            else:
                kv[block, kind, :, offset] = x.to(kv.dtype)
        return q

    def attention(
        self, q: Tensor, kv: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        _, _, kv_heads, block_size, dim = kv.shape
        if "groups" not in batch.scratch:
            batch.scratch["groups"] = list(group_items(batch, block_size))
        out = q.new_empty(q.shape)
        if isinstance(kv, QuantKV):
            q = q.float()  # so that nothing is rounded between a code and the sum it enters
        for index, group in enumerate(batch.scratch["groups"]):
            items = group.items
            num = group.num
            pages = gathered(kv, group.blocks).view(items, -1, 2, kv_heads, block_size, dim)
            pages = pages.permute(2, 0, 3, 1, 4, 5).reshape(2, items, kv_heads, -1, dim).to(q.dtype)
            seen = window if window < group.end else 0
            if group.fresh and not seen:  # the triangle that SDPA knows: no mask to build or read
                (k, v) = pages[..., :num, :]
                mask = None
            else:
                # What another sequence left in a slot may be inf or NaN, which no mask stops: 0 * NaN is NaN.
                (k, v) = pages.masked_fill_(group.stale, 0)
                mask = batch.scratch.get((index, seen))
                if mask is None:
                    mask = group.keys <= group.queries
                    if seen:
                        mask &= group.keys > group.queries - seen
                    batch.scratch[index, seen] = mask
            rows = q[group.tokens].view(items, num, -1, dim).transpose(1, 2)  # [items, Hq, num, D]
            if num == 1:
                # Query heads that share a key head are the rows of one product: on a CPU twice as fast as one product a head.
                rows = rows.reshape(items, kv_heads, -1, dim)
            result = F.scaled_dot_product_attention(
                rows,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=rows.shape[1] != kv_heads,
            )
            out[group.tokens].view(items, num, -1, dim).copy_(
                result.reshape(items, -1, num, dim).transpose(1, 2)
            )
        return out

    def block_mass(
        self, q: Tensor, kv: Tensor, watched: Watched, scale: float, window: int = 0
    ) -> None:
        _, _, kv_heads, block_size, dim = kv.shape
        count, width = watched.blocks.shape
        keys = (
            kv[:, 0]
            .index_select(0, watched.blocks.flatten())
            .view(count, width, kv_heads, block_size, dim)
            .float()
        )
        rows = q[watched.tokens].view(count, kv_heads, -1, dim).float()
        scores = torch.einsum("nhgd,nwhbd->nhgwb", rows, keys).flatten(3) * scale
        place = torch.arange(width * block_size, device=q.device)
        hidden = place >= watched.lengths[:, None]
        if window:
            hidden |= place < watched.lengths[:, None] - window
        part = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        watched.mass += part.view(count, -1, width, block_size).sum(-1).mean(1)

    def shift(self, kv: Tensor, blocks: Tensor, by: int, cos_sin: Tensor) -> None:
        cos, sin = cos_sin[by] / cos_sin[0, 0]  # YaRN's are scaled: the keys have had that already
        keys = kv[:, :, 0]
        for layer in range(kv.shape[1]):  # one at a time: some MB, not the whole cache, exist twice
            keys[blocks, layer] = rotate(keys[blocks, layer], cos, -sin)

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16, torch.float16, *LARGEST)

    def fuse(self, decoder: DecoderSpec) -> Fused | None:
        return None

    def choose(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: Tensor,
        seed_low: Tensor,
        seed_high: Tensor,
        position: Tensor,
    ) -> Tensor:
        at = rows.long()
        heat = temperature[at][:, None]
        noise = gumbel(seed_low[at], seed_high[at], position, logits.shape[1])
        drawn = logits.float() / torch.where(heat == 0, 1.0, heat) + noise.masked_fill(
            heat == 0, 0.0
        )
        chosen = drawn.argmax(1)
        return chosen.where(drawn.gather(1, chosen[:, None])[:, 0].isfinite(), -1).int()


def as_bytes(codes: Tensor) -> Tensor:
    """Codes as what can be indexed: torch has few operations on float8."""
    return codes.view(torch.int8)


def gathered(kv: KV, blocks: Tensor) -> Tensor:
    """Some blocks of kv [N, 2, Hk, B, D] as a tensor of their own; compressed ones as the numbers they stand for."""
    if not isinstance(kv, QuantKV):
        return kv.index_select(0, blocks)
    codes = as_bytes(kv.codes).index_select(0, blocks).view(kv.dtype)
    return expand(QuantKV(codes, kv.scales.index_select(0, blocks)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] by angles given as cos, sin [T, 1, D / 2]: dimension i turns together with dimension i + D / 2."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def group_items(batch: ForwardBatch, block_size: int) -> Iterator[Group]:
    """Only neighbours are joined, so that a group is a slice of the batch and needs no gather. Decoding rows, one token
    each, stand together in a plan and make one group."""
    device = batch.positions.device
    for (num, fresh), run in groupby(
        enumerate(batch.spans), key=lambda pair: (pair[1].num, pair[1].end == pair[1].num)
    ):
        members = list(run)
        items = len(members)
        first = members[0][1].first
        low = members[0][0]
        end = max(span.end for _, span in members)
        width = -(-end // block_size)
        tokens = slice(first, first + items * num)
        keys = torch.arange(width * block_size, device=device)
        yield Group(
            tokens=tokens,
            items=items,
            num=num,
            end=end,
            fresh=fresh and num > 1,
            blocks=batch.block_table[batch.slots[low : low + items], :width].flatten(),
            queries=batch.positions[tokens].view(items, 1, num, 1),
            keys=keys,
            stale=(keys >= batch.seq_lens[low : low + items, None]).view(items, 1, -1, 1),
        )


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits that scatters them well (xor-shift and multiply, twice). int32 in, int32 out."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def noise_key(seed_low: Tensor, seed_high: Tensor, position: Tensor) -> Tensor:
    """What the noise of a row is made from besides the token: [R] (int32), from seeds and positions [R] (int32)."""
    return _mix(seed_low ^ _mix(seed_high ^ _mix(position)))


def gumbel(seed_low: Tensor, seed_high: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Noise [R, vocab] for seeds and positions [R] (int32). Finest where it is largest, which is where it decides."""
    key = noise_key(seed_low, seed_high, position)
    tokens = _mix(torch.arange(vocab_size, dtype=torch.int32, device=key.device))
    bits = _mix(tokens[None, :] ^ key[:, None]).long() & 0xFFFFFFFF
    # 1 itself would forbid the token
    uniform = (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
