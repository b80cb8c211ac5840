"""The small operations between the matrix products, each one pass over its data: they are bound by memory and by the
number of kernels, about a microsecond each however little they do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.triton.overlap import LAUNCH, start_next, wait_for_inputs


@triton.jit
def norm_kernel(
    x, weight, add, out, hidden, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a token."""
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64) * hidden
    c = tl.arange(0, BLOCK)
    mask = c < hidden
    value = tl.load(x + row + c, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    value *= factor * tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value = value.to(out.dtype.element_ty).to(tl.float32) + tl.load(add + row + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + c, value, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    norm_kernel[tokens,](
        x, weight, x if add is None else add, out, hidden, eps, add is not None, block,
        num_warps=min(16, max(1, block // 512)), **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit
def act_mul_kernel(gate_up, out, inter, GELU: tl.constexpr, BLOCK: tl.constexpr):
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < inter
    gate = tl.load(gate_up + row * 2 * inter + c, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inter + inter + c, mask=mask, other=0.0).to(tl.float32)
    if GELU:  # tanh(z) = 2 sigmoid(2 z) - 1
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    tl.store(out + row * inter + c, gate * up, mask=mask)


def act_mul(gate_up: Tensor, gelu: bool) -> Tensor:
    tokens, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inter)
    block = min(2048, triton.next_power_of_2(inter))
    act_mul_kernel[tokens, triton.cdiv(inter, block)](gate_up, out, inter, gelu, block, num_warps=4, **LAUNCH)
    return out


@triton.jit
def _turned(at, h, cos, sin, weight, eps, heads, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """Both halves [heads, D / 2] of some heads at `at`, normalised and rotated: dimension i turns with i + D / 2."""
    c = tl.arange(0, HALF)
    mask = (h[:, None] < heads) & (c[None, :] < D // 2)
    a = tl.load(at + h[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + h[:, None] * D + D // 2 + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a *= factor * tl.load(weight + c, mask=c < D // 2, other=0.0).to(tl.float32)[None, :]
        b *= factor * tl.load(weight + D // 2 + c, mask=c < D // 2, other=0.0).to(tl.float32)[None, :]
        a = a.to(at.dtype.element_ty).to(tl.float32)  # as the reference rounds between the two
        b = b.to(at.dtype.element_ty).to(tl.float32)
    if ROPE:
        return a * cos - b * sin, b * cos + a * sin, mask
    return a, b, mask


@triton.jit
def rope_cache_kernel(
    qkv, q_out, kv, slots, positions, cos_sin, q_norm, k_norm, eps, s_block, s_kind, s_head, s_token,
    HQ: tl.constexpr, HK: tl.constexpr, HQP: tl.constexpr, HKP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    B: tl.constexpr, QNORM: tl.constexpr, KNORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """One program a token, all its heads: q to q_out, k and v to their slot in the cache."""
    start_next()
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    c, hq, hk = tl.arange(0, HALF), tl.arange(0, HQP), tl.arange(0, HKP)
    cos = tl.zeros([1, HALF], tl.float32)
    sin = cos
    if ROPE:
        at = cos_sin + tl.load(positions + token) * D
        cos = tl.load(at + c, mask=c < D // 2, other=0.0)[None, :]
        sin = tl.load(at + D // 2 + c, mask=c < D // 2, other=0.0)[None, :]
    row = qkv + token * (HQ + 2 * HK) * D
    a, b, mask = _turned(row, hq, cos, sin, q_norm, eps, HQ, D, HALF, QNORM, ROPE)
    out = q_out + token * HQ * D + hq[:, None] * D + c[None, :]
    tl.store(out, a, mask=mask)
    tl.store(out + D // 2, b, mask=mask)
    a, b, mask = _turned(row + HQ * D, hk, cos, sin, k_norm, eps, HK, D, HALF, KNORM, ROPE)
    out = kv + (slot // B) * s_block + hk[:, None] * s_head + (slot % B) * s_token + c[None, :]
    tl.store(out, a, mask=mask)
    tl.store(out + D // 2, b, mask=mask)
    a, b, mask = _turned(row + (HQ + HK) * D, hk, cos, sin, k_norm, eps, HK, D, HALF, False, False)
    tl.store(out + s_kind, a, mask=mask)
    tl.store(out + s_kind + D // 2, b, mask=mask)


def rope_and_cache(
    qkv: Tensor, kv: Tensor, batch: ForwardBatch, cos_sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, eps: float
) -> Tensor:
    _, _, kv_heads, block, dim = kv.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(tokens, heads, dim)
    size = triton.next_power_of_2
    rope_cache_kernel[tokens,](
        qkv, q, kv, batch.kv_slots, batch.positions, cos_sin, q_norm, k_norm, eps,
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        heads, kv_heads, size(heads), size(kv_heads), dim, size(dim // 2), block,
        q_norm is not None, k_norm is not None, cos_sin is not None, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return q
