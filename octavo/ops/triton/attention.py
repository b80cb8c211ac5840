"""Causal attention over the paged KV cache, read in place: one kernel for decoding rows, one for everything else.

Both pack the G query heads that share a key head into the rows of one tile, so that each key and value is read once.
Both keep a running maximum and sum (online softmax), in float32 and in powers of two. Of compressed KV (octavo.ops.kv) codes
are multiplied as they are: a key's scale goes into its score, a value's into its weight.

    decode    one program a (sequence, key head, split): all of it is reading KV, so the split count only serves to
              occupy every multiprocessor; with several splits a second kernel joins their partial results
    prefill   one program a (tile of query tokens, key head), longest first: mostly matrix products
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.kv import KV, QuantKV
from octavo.ops.triton.fused import arguments
from octavo.ops.triton.overlap import LAUNCH, start_next, wait_for_inputs

LOG2E = 1.4426950408889634
# Bytes for tiles: a program may have 227 KiB on Hopper, 99 on small Ampere and Ada chips, and needs some for the rest.
SHARED_MEMORY = 196608
if torch.cuda.is_available():
    SHARED_MEMORY = int(0.85 * getattr(torch.cuda.get_device_properties(0), "shared_memory_per_block_optin", 232448))
PROGRAMS = 8 * 132  # that keep an H200's multiprocessors evenly busy with sequences of different lengths


@triton.jit
def _attend(
    queries, keys, values, key_scales, value_scales, table, low, high, own, peak, total, acc, scale, s_block, s_token, s_scales,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Take in the positions low .. high - 1, tile by tile. `own` [rows]: each row's position, which it sees up to and
    including. Without EDGE the tiles are whole and every row sees all of them, so nothing is masked but by the window."""
    d, n = tl.arange(0, DP), tl.arange(0, N)
    for start in range(low, high, N):
        position = start + n
        if B % N == 0:  # the tile lies in one block: one look-up, and offsets that are the same in every round
            at = (start % B + n) * s_token
            block = tl.load(table + start // B).to(tl.int64) * s_block
            page_k, page_v = keys + block, values + block
        else:
            block = tl.load(table + position // B, mask=position < high, other=0).to(tl.int64)
            at = block * s_block + (position % B) * s_token
            page_k, page_v = keys, values
        if EDGE:  # what lies behind the end may be NaN, which no weight of zero takes away: load zeros there
            inside = position < high
            k = tl.load(page_k + (at[None, :] + d[:, None]), mask=inside[None, :] & (d[:, None] < D), other=0.0)
            v = tl.load(page_v + (at[:, None] + d[None, :]), mask=inside[:, None] & (d[None, :] < D), other=0.0)
        elif D == DP:
            k = tl.load(page_k + (at[None, :] + d[:, None]))
            v = tl.load(page_v + (at[:, None] + d[None, :]))
        else:
            k = tl.load(page_k + (at[None, :] + d[:, None]), mask=d[:, None] < D, other=0.0)
            v = tl.load(page_v + (at[:, None] + d[None, :]), mask=d[None, :] < D, other=0.0)
        if CODED:
            if B % N == 0:
                slot = tl.load(table + start // B).to(tl.int64) * s_scales + (start % B + n)
            else:
                slot = tl.load(table + position // B, mask=position < high, other=0).to(tl.int64) * s_scales + position % B
            if EDGE:
                key_scale = tl.load(key_scales + slot, mask=position < high, other=0.0)
                value_scale = tl.load(value_scales + slot, mask=position < high, other=0.0)
            else:
                key_scale, value_scale = tl.load(key_scales + slot), tl.load(value_scales + slot)
            score = tl.dot(queries, k.to(queries.dtype), input_precision=PRECISION) * key_scale[None, :]
        else:
            score = tl.dot(queries, k, input_precision=PRECISION)
        if EDGE:
            score = tl.where(position[None, :] <= own[:, None], score, -float("inf"))
        if WINDOW > 0:
            score = tl.where(position[None, :] > own[:, None] - WINDOW, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
        shift = new_peak
        if WINDOW > 0:  # all of the tile may lie before a row's window, which leaves its maximum at -inf
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        p = tl.exp2(score * scale - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if CODED:  # codes are exact in bfloat16, and its exponents hold a weight times any scale
            COMPUTE: tl.constexpr = tl.float32 if queries.dtype == tl.float32 else tl.bfloat16
            p = (p * value_scale[None, :]).to(COMPUTE)
            acc = tl.dot(p, v.to(COMPUTE), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
    return peak, total, acc


@triton.jit
def decode_kernel(
    q, kv, scales, table, table_rows, seq_lens, out, part, part_max, part_sum, scale,
    s_block, s_kind, s_head, s_token, s_scales, s_scales_kind, s_scales_head, s_table,
    HEADS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_inputs()
    seq, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + seq)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // N
    each = tl.cdiv(tl.cdiv(length, N) - first, SPLITS)
    low = (first + split * each) * N
    high = tl.minimum(low + each * N, length)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    rows = seq * HEADS + head * G + g
    mask = (g[:, None] < G) & (d[None, :] < D)
    queries = tl.load(q + rows[:, None] * D + d[None, :], mask=mask, other=0.0)
    own = tl.zeros([GP], tl.int32) + length - 1
    peak = tl.full([GP], -float("inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    table += tl.load(table_rows + seq).to(tl.int64) * s_table
    keys, values = kv + head * s_head, kv + head * s_head + s_kind
    key_scales, value_scales = scales, scales
    if CODED:
        key_scales = scales + head * s_scales_head
        value_scales = key_scales + s_scales_kind
    whole = tl.maximum(high // N * N, low)
    peak, total, acc = _attend(
        queries, keys, values, key_scales, value_scales, table, low, whole, own, peak, total, acc,
        scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, False, PRECISION, CODED,
    )  # fmt: skip
    peak, total, acc = _attend(
        queries, keys, values, key_scales, value_scales, table, whole, high, own, peak, total, acc,
        scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, True, PRECISION, CODED,
    )  # fmt: skip
    if SPLITS == 1:
        tl.store(out + rows[:, None] * D + d[None, :], acc / total[:, None], mask=mask)
    else:
        at = rows * SPLITS + split
        tl.store(part + at[:, None] * D + d[None, :], acc, mask=mask)
        tl.store(part_max + at, peak, mask=g < G)
        tl.store(part_sum + at, total, mask=g < G)


@triton.jit
def join_kernel(part, part_max, part_sum, out, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr):
    """One program a query head: weigh the splits' results by their maxima. An empty split has maximum -inf, weight 0."""
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SP), tl.arange(0, DP)
    peaks = tl.load(part_max + row * SPLITS + s, mask=s < SPLITS, other=-float("inf"))
    weight = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(weight * tl.load(part_sum + row * SPLITS + s, mask=s < SPLITS, other=0.0), 0)
    mask = (s[:, None] < SPLITS) & (d[None, :] < D)
    acc = tl.load(part + (row * SPLITS + s)[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(out + row * D + d, tl.sum(acc * weight[:, None], 0) / total, mask=d < D)


@triton.jit
def _find_item(query_start, tile, num_items, BLOCK_Q: tl.constexpr):
    """The item whose tiles include `tile`, when item i owns those from query_start[i] // BLOCK_Q + i on."""
    low, high = 0, num_items
    while low < high - 1:
        mid = (low + high) // 2
        if tl.load(query_start + mid) // BLOCK_Q + mid <= tile:
            low = mid
        else:
            high = mid
    return low


@triton.jit
def prefill_kernel(
    q, kv, scales, table, table_rows, query_start, seq_lens, out, scale, num_items,
    s_block, s_kind, s_head, s_token, s_scales, s_scales_kind, s_scales_head, s_table,
    HEADS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_inputs()
    BLOCK_Q: tl.constexpr = M // GP
    head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a sequence have the most to read: they go first
    tile += tl.load(query_start) // BLOCK_Q
    item = _find_item(query_start, tile, num_items, BLOCK_Q)
    begin, end = tl.load(query_start + item), tl.load(query_start + item + 1)
    token = (tile - begin // BLOCK_Q - item) * BLOCK_Q
    if token < end - begin:
        past = tl.load(seq_lens + item) - (end - begin)  # positions before this step's
        m, d = tl.arange(0, M), tl.arange(0, DP)
        local, g = token + m // GP, m % GP
        rows = (begin + local).to(tl.int64) * HEADS + head * G + g
        mask = ((local < end - begin) & (g < G))[:, None] & (d[None, :] < D)
        queries = tl.load(q + rows[:, None] * D + d[None, :], mask=mask, other=0.0)
        own = past + local
        low = 0
        if WINDOW > 0:
            low = tl.maximum(past + token - WINDOW + 1, 0) // N * N
        diagonal = (past + token + 1) // N * N  # before it, every row sees everything
        high = past + tl.minimum(token + BLOCK_Q, end - begin)
        table += tl.load(table_rows + item).to(tl.int64) * s_table
        keys, values = kv + head * s_head, kv + head * s_head + s_kind
        key_scales, value_scales = scales, scales
        if CODED:
            key_scales = scales + head * s_scales_head
            value_scales = key_scales + s_scales_kind
        peak = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        peak, total, acc = _attend(
            queries, keys, values, key_scales, value_scales, table, low, diagonal, own, peak, total, acc,
            scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, False, PRECISION, CODED,
        )  # fmt: skip
        peak, total, acc = _attend(
            queries, keys, values, key_scales, value_scales, table, tl.maximum(low, diagonal), high, own, peak, total, acc,
            scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, True, PRECISION, CODED,
        )  # fmt: skip
        tl.store(out + rows[:, None] * D + d[None, :], acc / total[:, None], mask=mask)


def attention(q: Tensor, kv: KV, batch: ForwardBatch, scale: float, window: int) -> Tensor:
    """As Ops.attention. A plan lists decoding rows first, one token each; the rest is prefill."""
    out = torch.empty_like(q)
    decoding = next((i for i, span in enumerate(batch.spans) if span.num != 1), len(batch.spans))
    if decoding:
        _decode(q, kv, batch, out, decoding, scale, window)
    if decoding < len(batch.spans):
        _prefill(q, kv, batch, out, decoding, scale, window)
    return out


def _shape(q: Tensor, kv: KV) -> dict[str, Any]:
    """What both kernels are specialised for."""
    heads, (_, _, kv_heads, block, dim) = q.shape[1], kv.shape
    return dict(HEADS=heads, G=heads // kv_heads, D=dim, DP=max(16, triton.next_power_of_2(dim)), B=block,
                PRECISION="ieee" if q.dtype == torch.float32 else "tf32", CODED=isinstance(kv, QuantKV))  # fmt: skip


def _tile(kv: KV, dim: int) -> dict[str, int]:
    """Positions a tile, and how many tiles are on their way at once: as many as shared memory holds, up to four. A tile within
    one block has cheaper addresses: with blocks of 64 prefill runs a quarter faster than with blocks of 16."""
    tile = max(16, min(64, 32768 // (dim * kv.dtype.itemsize)))
    return {"N": tile, "num_stages": max(1, min(4, SHARED_MEMORY // (2 * tile * dim * kv.dtype.itemsize)))}


def _decode(q: Tensor, kv: KV, batch: ForwardBatch, out: Tensor, count: int, scale: float, window: int) -> None:
    shape, kv_heads, (tensors, strides) = _shape(q, kv), kv.shape[2], arguments(kv)
    tile = _tile(kv, shape["DP"])
    longest = max(span.end for span in batch.spans[:count])
    splits = max(1, min(PROGRAMS // (count * kv_heads), triton.cdiv(longest, tile["N"]), 32))
    part = part_max = part_sum = out
    if splits > 1:
        part = torch.empty(count, q.shape[1], splits, q.shape[2], dtype=torch.float32, device=q.device)
        part_max = torch.empty(2, count, q.shape[1], splits, dtype=torch.float32, device=q.device)
        part_max, part_sum = part_max.unbind(0)
    decode_kernel[count, kv_heads, splits](
        q, *tensors, batch.block_table, batch.rows, batch.seq_lens, out, part, part_max, part_sum, scale * LOG2E,
        *strides, batch.block_table.stride(0),
        GP=max(16, triton.next_power_of_2(shape["G"])), SPLITS=splits, WINDOW=window, num_warps=2, **tile, **shape, **LAUNCH,
    )  # fmt: skip
    if splits > 1:
        join_kernel[count * q.shape[1],](
            part, part_max, part_sum, out, shape["D"], shape["DP"], splits, triton.next_power_of_2(splits), num_warps=4, **LAUNCH
        )


def _prefill(q: Tensor, kv: KV, batch: ForwardBatch, out: Tensor, skip: int, scale: float, window: int) -> None:
    shape, kv_heads, (tensors, strides) = _shape(q, kv), kv.shape[2], arguments(kv)
    group = triton.next_power_of_2(shape["G"])
    items, tokens = len(batch.spans) - skip, q.shape[0] - skip
    rows = max(group, 64 if max(span.num for span in batch.spans[skip:]) * group > 16 else 16)
    tiles = tokens // (rows // group) + items + (skip > 0)  # from above: some stay empty
    prefill_kernel[tiles, kv_heads](
        q, *tensors, batch.block_table, batch.rows[skip:], batch.query_start[skip:], batch.seq_lens[skip:], out, scale * LOG2E,
        items, *strides, batch.block_table.stride(0),
        GP=group, M=rows, WINDOW=window, num_warps=4, **_tile(kv, shape["DP"]), **shape, **LAUNCH,
    )  # fmt: skip
