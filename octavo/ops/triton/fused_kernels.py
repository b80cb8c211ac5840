"""The small operations between the matrix products, each one pass over its data: they are bound by memory and by the
number of kernels, about a microsecond each however little they do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.kv import KV, LARGEST, QuantKV
from octavo.ops.triton.dependent_launch import LAUNCH, start_next, wait_for_inputs


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
        value = value.to(out.dtype.element_ty).to(tl.float32) + tl.load(
            add + row + c, mask=mask, other=0.0
        ).to(tl.float32)
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
def layer_norm_kernel(
    x, weight, bias, add, out, hidden, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a token. ADD: x becomes x + add first."""
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64) * hidden
    c = tl.arange(0, BLOCK)
    mask = c < hidden
    value = tl.load(x + row + c, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(add + row + c, mask=mask, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty)
        tl.store(x + row + c, value, mask=mask)
        value = value.to(tl.float32)
    value = tl.where(mask, value - tl.sum(value, 0) / hidden, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    value *= tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + c, value, mask=mask)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, add: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    layer_norm_kernel[tokens,](
        x, weight, bias, x if add is None else add, out, hidden, eps, add is not None, block,
        num_warps=min(16, max(1, block // 512)), **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit
def gelu_kernel(x, out, count, BLOCK: tl.constexpr):
    start_next()
    wait_for_inputs()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, _gelu(value), mask=at < count)


def gelu(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    block = 1024
    gelu_kernel[triton.cdiv(x.numel(), block),](x, out, x.numel(), block, num_warps=4, **LAUNCH)
    return out


@triton.jit
def _gelu(x):
    # tanh(z) = 2 sigmoid(2 z) - 1
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def act_mul_kernel(gate_up, out, inter, GELU: tl.constexpr, BLOCK: tl.constexpr):
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < inter
    gate = tl.load(gate_up + row * 2 * inter + c, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inter + inter + c, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        gate = _gelu(gate)
    else:
        gate *= tl.sigmoid(gate)
    tl.store(out + row * inter + c, gate * up, mask=mask)


def act_mul(gate_up: Tensor, gelu: bool) -> Tensor:
    tokens = gate_up.shape[0]
    inter = gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, inter)
    block = min(2048, triton.next_power_of_2(inter))
    act_mul_kernel[tokens, triton.cdiv(inter, block)](
        gate_up, out, inter, gelu, block, num_warps=4, **LAUNCH
    )
    return out


@triton.jit
def _turned(
    at,
    h,
    cos,
    sin,
    weight,
    eps,
    heads,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Both halves [heads, D / 2] of some heads at `at`, normalised and rotated: dimension i turns with i + D / 2."""
    c = tl.arange(0, HALF)
    mask = (h[:, None] < heads) & (c[None, :] < D // 2)
    a = tl.load(at + h[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + h[:, None] * D + D // 2 + c[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a *= factor * tl.load(weight + c, mask=c < D // 2, other=0.0).to(tl.float32)[None, :]
        b *= (
            factor
            * tl.load(weight + D // 2 + c, mask=c < D // 2, other=0.0).to(tl.float32)[None, :]
        )
        a = a.to(at.dtype.element_ty).to(tl.float32)  # as the reference rounds between the two
        b = b.to(at.dtype.element_ty).to(tl.float32)
    if ROPE:
        return a * cos - b * sin, b * cos + a * sin, mask
    return a, b, mask


@triton.jit
def _code(x, LARGEST: tl.constexpr):
    """x, in -LARGEST..LARGEST, as an int8 or as the bits of a float8 (e4m3): to the nearest, ties to even."""
    if LARGEST == 127.0:
        # the sum with 1.5 * 2^23 has no bits for fractions
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)
    bits = x.to(tl.int32, bitcast=True)
    large = bits & 0x7FFFFFFF
    # exponent's bias: 127 to 7, (127 - 7) << 3 is 960
    large = ((large + 0x7FFFF + ((large >> 20) & 1)) >> 20) - 960
    # below 2^-6 the code counts steps of 2^-9
    small = ((tl.abs(x) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    return (tl.where(tl.abs(x) < 0.015625, small, large) | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _compress(a, b, rounded, kv, LARGEST: tl.constexpr):
    """Codes of both halves [heads, D / 2], first rounded to the dtype that `rounded` points to, and scales [heads]: what
    octavo.ops.kv.compress() computes."""
    a = a.to(rounded.dtype.element_ty).to(tl.float32)
    b = b.to(rounded.dtype.element_ty).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
    spoiled = tl.sum(a * 0.0, 1) + tl.sum(b * 0.0, 1)  # NaN, if anything is not finite
    usable = (peak >= 1e-30) & (spoiled == 0.0)
    factor = tl.div_rn(LARGEST, tl.where(usable, peak, 1.0))[:, None]
    a = tl.where(usable[:, None], a * factor, 0.0)
    b = tl.where(usable[:, None], b * factor, 0.0)
    scale = tl.where(usable, tl.div_rn(peak, LARGEST), 0.0) + spoiled
    kind: tl.constexpr = kv.dtype.element_ty
    return _code(a, LARGEST).to(kind, bitcast=True), _code(b, LARGEST).to(kind, bitcast=True), scale


@triton.jit
def rope_cache_kernel(
    qkv, q_out, kv, scales, slots, positions, cos_sin, q_norm, k_norm, eps,
    s_block, s_kind, s_head, s_token, s_scales, s_scales_kind, s_scales_head,
    HQ: tl.constexpr, HK: tl.constexpr, HQP: tl.constexpr, HKP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    B: tl.constexpr, QNORM: tl.constexpr, KNORM: tl.constexpr, ROPE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One program a token, all its heads: q to q_out, k and v to their slot in the cache; LARGEST: the largest code, or 0."""
    start_next()
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    c = tl.arange(0, HALF)
    hq = tl.arange(0, HQP)
    hk = tl.arange(0, HKP)
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
    out_scale = scales
    if LARGEST > 0:
        out_scale = scales + (slot // B) * s_scales + hk * s_scales_head + slot % B
        a, b, scale = _compress(a, b, qkv, kv, LARGEST)
        tl.store(out_scale, scale, mask=hk < HK)
    tl.store(out, a, mask=mask)
    tl.store(out + D // 2, b, mask=mask)
    a, b, mask = _turned(row + (HQ + HK) * D, hk, cos, sin, k_norm, eps, HK, D, HALF, False, False)
    if LARGEST > 0:
        a, b, scale = _compress(a, b, qkv, kv, LARGEST)
        tl.store(out_scale + s_scales_kind, scale, mask=hk < HK)
    tl.store(out + s_kind, a, mask=mask)
    tl.store(out + s_kind + D // 2, b, mask=mask)


def rope_and_cache(
    qkv: Tensor,
    kv: KV,
    batch: ForwardBatch,
    cos_sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    _, _, kv_heads, block, dim = kv.shape
    tokens = qkv.shape[0]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(tokens, heads, dim)
    size = triton.next_power_of_2
    tensors, strides = arguments(kv)
    rope_cache_kernel[tokens,](
        qkv, q, *tensors, batch.kv_indices, batch.positions, cos_sin, q_norm, k_norm, eps, *strides,
        heads, kv_heads, size(heads), size(kv_heads), dim, size(dim // 2), block,
        q_norm is not None, k_norm is not None, cos_sin is not None, LARGEST.get(kv.dtype, 0.0), num_warps=4, **LAUNCH,
    )  # fmt: skip
    return q


def arguments(kv: KV) -> tuple[tuple[Tensor, Tensor | None], tuple[int | None, ...]]:
    """What kernels take for kv [N, 2, Hk, B, D]: its numbers or codes, scales if there are any, and the strides of both."""
    if isinstance(kv, QuantKV):
        return (kv.codes, kv.scales), (*kv.codes.stride()[:4], *kv.scales.stride()[:3])
    return (kv, None), (*kv.stride()[:4], None, None, None)
