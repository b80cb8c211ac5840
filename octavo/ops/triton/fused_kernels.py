"""The small ops between the matrix products. Each is one pass over its data.

They are bound by memory and by the number of kernels, each of which costs about a microsecond.
"""

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
    input_ptr,
    weight_ptr,
    residual_ptr,
    output_ptr,
    hidden_size,
    epsilon,
    ADD_RESIDUAL: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Normalise one token in each program."""
    start_next()
    wait_for_inputs()
    row_start = tl.program_id(0).to(tl.int64) * hidden_size
    columns = tl.arange(0, BLOCK_COLUMNS)
    mask = columns < hidden_size
    values = tl.load(input_ptr + row_start + columns, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / hidden_size + epsilon)
    values *= factor * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD_RESIDUAL:
        values = values.to(output_ptr.dtype.element_ty).to(tl.float32) + tl.load(
            residual_ptr + row_start + columns, mask=mask, other=0.0
        ).to(tl.float32)
    tl.store(output_ptr + row_start + columns, values, mask=mask)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None) -> Tensor:
    output = torch.empty_like(hidden)
    num_tokens, hidden_size = hidden.shape
    block_columns = triton.next_power_of_2(hidden_size)
    norm_kernel[num_tokens,](
        hidden,
        weight,
        hidden if residual is None else residual,
        output,
        hidden_size,
        epsilon,
        residual is not None,
        block_columns,
        num_warps=min(16, max(1, block_columns // 512)),
        **LAUNCH,
    )
    return output


@triton.jit
def layer_norm_kernel(
    input_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    output_ptr,
    hidden_size,
    epsilon,
    ADD_RESIDUAL: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Normalise one token in each program. ADD_RESIDUAL first adds the residual to the input."""
    start_next()
    wait_for_inputs()
    row_start = tl.program_id(0).to(tl.int64) * hidden_size
    columns = tl.arange(0, BLOCK_COLUMNS)
    mask = columns < hidden_size
    values = tl.load(input_ptr + row_start + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD_RESIDUAL:
        values += tl.load(residual_ptr + row_start + columns, mask=mask, other=0.0).to(tl.float32)
        values = values.to(input_ptr.dtype.element_ty)
        tl.store(input_ptr + row_start + columns, values, mask=mask)
        values = values.to(tl.float32)
    values = tl.where(mask, values - tl.sum(values, 0) / hidden_size, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / hidden_size + epsilon)
    values *= tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    values += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output_ptr + row_start + columns, values, mask=mask)


def layer_norm(
    hidden: Tensor, weight: Tensor, bias: Tensor, epsilon: float, residual: Tensor | None
) -> Tensor:
    output = torch.empty_like(hidden)
    num_tokens, hidden_size = hidden.shape
    block_columns = triton.next_power_of_2(hidden_size)
    layer_norm_kernel[num_tokens,](
        hidden,
        weight,
        bias,
        hidden if residual is None else residual,
        output,
        hidden_size,
        epsilon,
        residual is not None,
        block_columns,
        num_warps=min(16, max(1, block_columns // 512)),
        **LAUNCH,
    )
    return output


@triton.jit
def gelu_kernel(input_ptr, output_ptr, num_values, BLOCK_COLUMNS: tl.constexpr):
    start_next()
    wait_for_inputs()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    values = tl.load(input_ptr + offsets, mask=offsets < num_values, other=0.0).to(tl.float32)
    tl.store(output_ptr + offsets, _gelu(values), mask=offsets < num_values)


def gelu(hidden: Tensor) -> Tensor:
    output = torch.empty_like(hidden)
    block_columns = 1024
    gelu_kernel[triton.cdiv(hidden.numel(), block_columns),](
        hidden, output, hidden.numel(), block_columns, num_warps=4, **LAUNCH
    )
    return output


@triton.jit
def _gelu(values):
    # tanh(z) = 2 sigmoid(2 z) - 1
    return values * tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))


@triton.jit
def act_mul_kernel(
    gate_up_ptr, output_ptr, intermediate, GELU: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    start_next()
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = columns < intermediate
    gate = tl.load(gate_up_ptr + token * 2 * intermediate + columns, mask=mask, other=0.0).to(
        tl.float32
    )
    up = tl.load(
        gate_up_ptr + token * 2 * intermediate + intermediate + columns, mask=mask, other=0.0
    ).to(tl.float32)
    if GELU:
        gate = _gelu(gate)
    else:
        gate *= tl.sigmoid(gate)
    tl.store(output_ptr + token * intermediate + columns, gate * up, mask=mask)


def act_mul(gate_up: Tensor, gelu: bool) -> Tensor:
    num_tokens = gate_up.shape[0]
    intermediate = gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, intermediate)
    block_columns = min(2048, triton.next_power_of_2(intermediate))
    act_mul_kernel[num_tokens, triton.cdiv(intermediate, block_columns)](
        gate_up, output, intermediate, gelu, block_columns, num_warps=4, **LAUNCH
    )
    return output


@triton.jit
def _norm_and_rope(
    heads_ptr,
    head_offsets,
    cos,
    sin,
    weight_ptr,
    epsilon,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    USE_NORM: tl.constexpr,
    USE_ROPE: tl.constexpr,
):
    """Load, normalise and rotate heads. Dimension i is rotated together with i + HEAD_DIM / 2.

    Returns both halves [heads, HEAD_DIM / 2] and their mask.
    """
    columns = tl.arange(0, HALF_PADDED)
    head_mask = (head_offsets[:, None] < num_heads) & (columns[None, :] < HEAD_DIM // 2)
    first_half = tl.load(
        heads_ptr + head_offsets[:, None] * HEAD_DIM + columns[None, :], mask=head_mask, other=0.0
    ).to(tl.float32)
    second_half = tl.load(
        heads_ptr + head_offsets[:, None] * HEAD_DIM + HEAD_DIM // 2 + columns[None, :],
        mask=head_mask,
        other=0.0,
    ).to(tl.float32)
    if USE_NORM:
        factor = tl.rsqrt(
            (tl.sum(first_half * first_half, 1) + tl.sum(second_half * second_half, 1)) / HEAD_DIM
            + epsilon
        )[:, None]
        first_half *= (
            factor
            * tl.load(weight_ptr + columns, mask=columns < HEAD_DIM // 2, other=0.0).to(tl.float32)[
                None, :
            ]
        )
        second_half *= (
            factor
            * tl.load(
                weight_ptr + HEAD_DIM // 2 + columns, mask=columns < HEAD_DIM // 2, other=0.0
            ).to(tl.float32)[None, :]
        )
        first_half = first_half.to(heads_ptr.dtype.element_ty).to(
            tl.float32
        )  # the reference rounds here too
        second_half = second_half.to(heads_ptr.dtype.element_ty).to(tl.float32)
    if USE_ROPE:
        return first_half * cos - second_half * sin, second_half * cos + first_half * sin, head_mask
    return first_half, second_half, head_mask


@triton.jit
def code_of(values, LARGEST_CODE: tl.constexpr):
    """Round values in -LARGEST_CODE..LARGEST_CODE to int8, or to the bits of a float8 (e4m3).

    Ties are rounded to even.
    """
    if LARGEST_CODE == 127.0:
        # The sum with 1.5 * 2^23 has no bits for fractions, so it is rounded.
        return ((values + 12582912.0) - 12582912.0).to(tl.int8)
    bits = values.to(tl.int32, bitcast=True)
    large = bits & 0x7FFFFFFF
    # The exponent's bias changes from 127 to 7, and (127 - 7) << 3 is 960.
    large = ((large + 0x7FFFF + ((large >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the code counts steps of 2^-9.
    small = ((tl.abs(values) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    return (tl.where(tl.abs(values) < 0.015625, small, large) | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _compress(first_half, second_half, rounded_ptr, kv_ptr, LARGEST_CODE: tl.constexpr):
    """Compute codes of both halves [heads, HEAD_DIM / 2] and scales [heads].

    This is octavo.ops.kv.compress(). The values are first rounded to the dtype of `rounded_ptr`.
    """
    first_half = first_half.to(rounded_ptr.dtype.element_ty).to(tl.float32)
    second_half = second_half.to(rounded_ptr.dtype.element_ty).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(first_half), 1), tl.max(tl.abs(second_half), 1))
    not_finite = tl.sum(first_half * 0.0, 1) + tl.sum(
        second_half * 0.0, 1
    )  # NaN if any value is not finite, else 0
    usable = (largest >= 1e-30) & (not_finite == 0.0)
    factor = tl.div_rn(LARGEST_CODE, tl.where(usable, largest, 1.0))[:, None]
    first_half = tl.where(usable[:, None], first_half * factor, 0.0)
    second_half = tl.where(usable[:, None], second_half * factor, 0.0)
    scale = tl.where(usable, tl.div_rn(largest, LARGEST_CODE), 0.0) + not_finite
    code_type: tl.constexpr = kv_ptr.dtype.element_ty
    return (
        code_of(first_half, LARGEST_CODE).to(code_type, bitcast=True),
        code_of(second_half, LARGEST_CODE).to(code_type, bitcast=True),
        scale,
    )


@triton.jit
def rope_cache_kernel(
    qkv_ptr,
    query_out_ptr,
    kv_ptr,
    scales_ptr,
    kv_indices_ptr,
    positions_ptr,
    cos_sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    epsilon,
    stride_block,
    stride_kind,
    stride_head,
    stride_token,
    stride_scale_block,
    stride_scale_kind,
    stride_scale_head,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_HEADS_PADDED: tl.constexpr,
    KEY_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    USE_QUERY_NORM: tl.constexpr,
    USE_KEY_NORM: tl.constexpr,
    USE_ROPE: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):
    """Normalise and rotate all heads of one token in each program.

    Queries are written to query_out_ptr, keys and values to their KV index in the cache.
    LARGEST_CODE is the largest code of compressed KV, or 0 for plain KV.
    """
    start_next()
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    kv_index = tl.load(kv_indices_ptr + token)
    columns = tl.arange(0, HALF_PADDED)
    query_head = tl.arange(0, QUERY_HEADS_PADDED)
    key_head = tl.arange(0, KEY_HEADS_PADDED)
    cos = tl.zeros([1, HALF_PADDED], tl.float32)
    sin = cos
    if USE_ROPE:
        angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * HEAD_DIM
        cos = tl.load(angles_ptr + columns, mask=columns < HEAD_DIM // 2, other=0.0)[None, :]
        sin = tl.load(
            angles_ptr + HEAD_DIM // 2 + columns, mask=columns < HEAD_DIM // 2, other=0.0
        )[None, :]
    token_ptr = qkv_ptr + token * (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM
    first_half, second_half, head_mask = _norm_and_rope(
        token_ptr,
        query_head,
        cos,
        sin,
        query_norm_ptr,
        epsilon,
        QUERY_HEADS,
        HEAD_DIM,
        HALF_PADDED,
        USE_QUERY_NORM,
        USE_ROPE,
    )
    output_ptr = (
        query_out_ptr
        + token * QUERY_HEADS * HEAD_DIM
        + query_head[:, None] * HEAD_DIM
        + columns[None, :]
    )
    tl.store(output_ptr, first_half, mask=head_mask)
    tl.store(output_ptr + HEAD_DIM // 2, second_half, mask=head_mask)
    first_half, second_half, head_mask = _norm_and_rope(
        token_ptr + QUERY_HEADS * HEAD_DIM,
        key_head,
        cos,
        sin,
        key_norm_ptr,
        epsilon,
        KEY_HEADS,
        HEAD_DIM,
        HALF_PADDED,
        USE_KEY_NORM,
        USE_ROPE,
    )
    output_ptr = (
        kv_ptr
        + (kv_index // BLOCK_SIZE) * stride_block
        + key_head[:, None] * stride_head
        + (kv_index % BLOCK_SIZE) * stride_token
        + columns[None, :]
    )
    scale_ptr = scales_ptr
    if LARGEST_CODE > 0:
        scale_ptr = (
            scales_ptr
            + (kv_index // BLOCK_SIZE) * stride_scale_block
            + key_head * stride_scale_head
            + kv_index % BLOCK_SIZE
        )
        first_half, second_half, scale = _compress(
            first_half, second_half, qkv_ptr, kv_ptr, LARGEST_CODE
        )
        tl.store(scale_ptr, scale, mask=key_head < KEY_HEADS)
    tl.store(output_ptr, first_half, mask=head_mask)
    tl.store(output_ptr + HEAD_DIM // 2, second_half, mask=head_mask)
    first_half, second_half, head_mask = _norm_and_rope(
        token_ptr + (QUERY_HEADS + KEY_HEADS) * HEAD_DIM,
        key_head,
        cos,
        sin,
        key_norm_ptr,
        epsilon,
        KEY_HEADS,
        HEAD_DIM,
        HALF_PADDED,
        False,
        False,
    )
    if LARGEST_CODE > 0:
        first_half, second_half, scale = _compress(
            first_half, second_half, qkv_ptr, kv_ptr, LARGEST_CODE
        )
        tl.store(scale_ptr + stride_scale_kind, scale, mask=key_head < KEY_HEADS)
    tl.store(output_ptr + stride_kind, first_half, mask=head_mask)
    tl.store(output_ptr + stride_kind + HEAD_DIM // 2, second_half, mask=head_mask)


def rope_and_cache(
    qkv: Tensor,
    kv_cache: KV,
    batch: ForwardBatch,
    cos_sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    epsilon: float,
) -> Tensor:
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    padded = triton.next_power_of_2
    tensors, strides = kv_arguments(kv_cache)
    rope_cache_kernel[num_tokens,](
        qkv,
        query,
        *tensors,
        batch.kv_indices,
        batch.positions,
        cos_sin,
        q_norm,
        k_norm,
        epsilon,
        *strides,
        num_heads,
        num_kv_heads,
        padded(num_heads),
        padded(num_kv_heads),
        head_dim,
        padded(head_dim // 2),
        block_size,
        q_norm is not None,
        k_norm is not None,
        cos_sin is not None,
        LARGEST.get(kv_cache.dtype, 0.0),
        num_warps=4,
        **LAUNCH,
    )
    return query


def kv_arguments(kv_cache: KV) -> tuple[tuple[Tensor, Tensor | None], tuple[int | None, ...]]:
    """Return the kernel arguments for kv_cache [N, 2, Hk, B, D].

    They are its numbers or codes, the scales or None, and the strides of both.
    """
    if isinstance(kv_cache, QuantKV):
        return (kv_cache.codes, kv_cache.scales), (
            *kv_cache.codes.stride()[:4],
            *kv_cache.scales.stride()[:3],
        )
    return (kv_cache, None), (*kv_cache.stride()[:4], None, None, None)
