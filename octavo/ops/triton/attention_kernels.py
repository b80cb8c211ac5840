"""Causal attention over the paged KV cache, read in place: one kernel for decoding rows, one for everything else.

Both pack the G query heads that share a key head into the rows of one tile, so that each key and value is read once.
Both keep a running maximum and sum (online softmax), in float32 and in powers of two. Of compressed KV (octavo.ops.kv) the codes
themselves are multiplied: a key's scale goes into its score, a value's into its weight.

    decode    one program a (sequence, key head, split): all of it is reading KV, so the split count only serves to
              occupy every multiprocessor; with several splits a second kernel joins their partial results
    prefill   one program a (tile of query tokens, key head), longest first: mostly matrix products. A few tokens behind a long
              context, as after a hit in the prefix cache, are too few programs: they are split like decoding rows
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import ForwardBatch
from octavo.ops.kv import KV, LARGEST, QuantKV
from octavo.ops.triton import kv_codes
from octavo.ops.triton.dependent_launch import LAUNCH, start_next, wait_for_inputs
from octavo.ops.triton.fused_kernels import arguments

LOG2E = 1.4426950408889634
# Bytes for tiles: a program may have 227 KiB on Hopper, 99 on small Ampere and Ada chips, and needs some for the rest.
SHARED_MEMORY = 196608
if torch.cuda.is_available():
    SHARED_MEMORY = int(
        0.85 * getattr(torch.cuda.get_device_properties(0), "shared_memory_per_block_optin", 232448)
    )
# They begin anywhere in what was sent to the device: a kernel for each way they may be aligned would be compiled amid the work.
LISTS = ["table_rows", "query_start", "seq_lens"]
# that keep an H200's multiprocessors evenly busy with sequences of different lengths
PROGRAMS = 8 * 132
# rows that decode beside prompts, at least: of fewer there are kernels that the first such step
# would compile
BESIDE = 32
# so few tokens of sequences that may be so long are split: always alike, so one kernel more
FEW = 64
LONG = 1024
SPLITS = 8


@triton.jit
def _weigh(
    score,
    scale,
    column,
    position,
    own,
    peak,
    total,
    WINDOW: tl.constexpr,
    EDGE: tl.constexpr,
    BLIND: tl.constexpr,
):
    """Scores [rows, N] become weights; `scale` is one for all rows or [rows], `column` the same as it meets a score. BLIND: a row
    may have seen nothing yet. Returns the weights, what earlier sums must be multiplied by, and the new peak and total."""
    if EDGE:
        score = tl.where(position[None, :] <= own[:, None], score, -float("inf"))
    if WINDOW > 0:
        score = tl.where(position[None, :] > own[:, None] - WINDOW, score, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
    shift = new_peak
    # all of the tile lies before its window or behind its position, which leaves its maximum at
    # -inf
    if BLIND:
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    p = tl.exp2(score * column - shift[:, None])
    shrink = tl.exp2(peak - shift)
    return p, shrink, new_peak, total * shrink + tl.sum(p, 1)


@triton.jit
def _attend(
    queries, keys, values, key_scales, value_scales, table, low, high, own, peak, total, acc, scale, s_block, s_token, s_scales,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, EDGE: tl.constexpr,
    BLIND: tl.constexpr, PRECISION: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Take in the positions low .. high - 1, tile by tile. `own` [rows]: each row's position, which it sees up to and
    including. Without EDGE the tiles are whole and every row sees all of them, so nothing is masked but by the window.
    LARGEST: of the codes that KV is compressed to, or 0; `scale` is then each row's, and acc in units of 1 / LARGEST."""
    d = tl.arange(0, DP)
    n = tl.arange(0, N)
    for start in range(low, high, N):
        position = start + n
        # the tile lies in one block: one look-up, and offsets that are the same in every round
        if B % N == 0:
            at = (start % B + n) * s_token
            block = tl.load(table + start // B).to(tl.int64) * s_block
            page_k = keys + block
            page_v = values + block
        else:
            block = tl.load(table + position // B, mask=position < high, other=0).to(tl.int64)
            at = block * s_block + (position % B) * s_token
            page_k = keys
            page_v = values
        # what lies behind the end may be NaN, which no weight of zero takes away: load zeros
        # there
        if EDGE:
            inside = position < high
            k = tl.load(
                page_k + (at[None, :] + d[:, None]),
                mask=inside[None, :] & (d[:, None] < D),
                other=0.0,
            )
            v = tl.load(
                page_v + (at[:, None] + d[None, :]),
                mask=inside[:, None] & (d[None, :] < D),
                other=0.0,
            )
        elif D == DP:
            k = tl.load(page_k + (at[None, :] + d[:, None]))
            v = tl.load(page_v + (at[:, None] + d[None, :]))
        else:
            k = tl.load(page_k + (at[None, :] + d[:, None]), mask=d[:, None] < D, other=0.0)
            v = tl.load(page_v + (at[:, None] + d[None, :]), mask=d[None, :] < D, other=0.0)
        if LARGEST > 0:
            key_scale, value_scale = _scales(
                key_scales, value_scales, table, start, high, s_scales, B, N, EDGE
            )
            score = tl.dot(queries, kv_codes.numbers(k, queries.dtype), input_precision=PRECISION)
            score *= key_scale[None, :]
            p, shrink, peak, total = _weigh(
                score, scale, scale[:, None], position, own, peak, total, WINDOW, EDGE, BLIND
            )
            p = (p * (value_scale * LARGEST)[None, :]).to(queries.dtype)
            acc = tl.dot(
                p,
                kv_codes.numbers(v, queries.dtype),
                acc * shrink[:, None],
                input_precision=PRECISION,
            )
        else:
            score = tl.dot(queries, k, input_precision=PRECISION)
            p, shrink, peak, total = _weigh(
                score, scale, scale, position, own, peak, total, WINDOW, EDGE, BLIND
            )
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return peak, total, acc


@triton.jit
def _scales(
    key_scales,
    value_scales,
    table,
    start,
    high,
    s_scales,
    B: tl.constexpr,
    N: tl.constexpr,
    EDGE: tl.constexpr,
):
    """A tile's two scales [N]; zeros behind the end, where anything may lie."""
    n = tl.arange(0, N)
    position = start + n
    if B % N == 0:
        slot = tl.load(table + start // B).to(tl.int64) * s_scales + (start % B + n)
    else:
        slot = (
            tl.load(table + position // B, mask=position < high, other=0).to(tl.int64) * s_scales
            + position % B
        )
    if EDGE:
        inside = position < high
        return tl.load(key_scales + slot, mask=inside, other=0.0), tl.load(
            value_scales + slot, mask=inside, other=0.0
        )
    return tl.load(key_scales + slot), tl.load(value_scales + slot)


@triton.jit
def _attend_words(
    q0, q1, q2, q3, keys, values, key_scales, value_scales, table, low, high, own, peak, total, a0, a1, a2, a3,
    scale, s_block, s_token, s_scales,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """_attend for few rows and codes that are read as words of four: dimensions 4i, 4i + 1, 4i + 2 and 4i + 3 are four problems
    of a quarter of the width. Strides are in words. The matrix units want neighbouring positions of a value in one register,
    and bytes can only be brought there one by one, which took half of the time; words are taken apart where they are."""
    i = tl.arange(0, DP // 4)
    n = tl.arange(0, N)
    for start in range(low, high, N):
        position = start + n
        at = (start % B + n) * s_token
        block = tl.load(table + start // B).to(tl.int64) * s_block
        if EDGE:
            inside = position < high
            k = tl.load(
                keys + block + (at[None, :] + i[:, None]),
                mask=inside[None, :] & (i[:, None] < D // 4),
                other=0,
            )
            v = tl.load(
                values + block + (at[:, None] + i[None, :]),
                mask=inside[:, None] & (i[None, :] < D // 4),
                other=0,
            )
        elif D == DP:
            k = tl.load(keys + block + (at[None, :] + i[:, None]))
            v = tl.load(values + block + (at[:, None] + i[None, :]))
        else:
            k = tl.load(
                keys + block + (at[None, :] + i[:, None]), mask=i[:, None] < D // 4, other=0
            )
            v = tl.load(
                values + block + (at[:, None] + i[None, :]), mask=i[None, :] < D // 4, other=0
            )
        key_scale, value_scale = _scales(
            key_scales, value_scales, table, start, high, s_scales, B, N, EDGE
        )
        k0, k1, k2, k3 = kv_codes.quarters(k, q0.dtype, LARGEST)
        score = tl.dot(q0, k0, input_precision=PRECISION)
        score = tl.dot(q1, k1, score, input_precision=PRECISION)
        score = tl.dot(q2, k2, score, input_precision=PRECISION)
        score = tl.dot(q3, k3, score, input_precision=PRECISION)
        score *= key_scale[None, :]
        p, shrink, peak, total = _weigh(
            score, scale, scale[:, None], position, own, peak, total, WINDOW, EDGE, WINDOW > 0
        )
        p = (p * (value_scale * LARGEST)[None, :]).to(q0.dtype)
        v0, v1, v2, v3 = kv_codes.quarters(v, q0.dtype, LARGEST)
        a0 = tl.dot(p, v0, a0 * shrink[:, None], input_precision=PRECISION)
        a1 = tl.dot(p, v1, a1 * shrink[:, None], input_precision=PRECISION)
        a2 = tl.dot(p, v2, a2 * shrink[:, None], input_precision=PRECISION)
        a3 = tl.dot(p, v3, a3 * shrink[:, None], input_precision=PRECISION)
    return peak, total, a0, a1, a2, a3


@triton.jit(do_not_specialize_on_alignment=LISTS)
def decode_kernel(
    q, kv, scales, table, table_rows, seq_lens, out, part, part_max, part_sum, scale,
    s_block, s_kind, s_head, s_token, s_scales, s_scales_kind, s_scales_head, s_table,
    HEADS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, LARGEST: tl.constexpr,
    WORDS: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """BESIDE: the kernel before is prefill_kernel with FIRST, so its inputs are there. It ends after that one."""
    start_next()
    if not BESIDE:
        wait_for_inputs()
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + seq)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // N
    each = tl.cdiv(tl.cdiv(length, N) - first, SPLITS)
    low = (first + split * each) * N
    high = tl.minimum(low + each * N, length)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    rows = seq * HEADS + head * G + g
    mask = (g[:, None] < G) & (d[None, :] < D)
    row_scale = scale
    if WORDS:
        i = tl.arange(0, DP // 4)
        at = q + rows[:, None] * D + 4 * i[None, :]
        inside = (g[:, None] < G) & (i[None, :] < D // 4)
        q0, q1, q2, q3, row_scale = kv_codes.four_queries(at, inside, scale)
    else:
        queries = tl.load(q + rows[:, None] * D + d[None, :], mask=mask, other=0.0)
        if LARGEST > 0:
            queries, row_scale = kv_codes.queries(queries, scale)
    own = tl.zeros([GP], tl.int32) + length - 1
    peak = tl.full([GP], -float("inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    table += tl.load(table_rows + seq).to(tl.int64) * s_table
    keys = kv + head * s_head
    values = kv + head * s_head + s_kind
    key_scales = scales
    value_scales = scales
    if LARGEST > 0:
        key_scales += head * s_scales_head
        value_scales = key_scales + s_scales_kind
    whole = tl.maximum(high // N * N, low)
    if WORDS:
        a0 = tl.zeros([GP, DP // 4], tl.float32)
        a1 = a0
        a2 = a0
        a3 = a0
        peak, total, a0, a1, a2, a3 = _attend_words(
            q0, q1, q2, q3, keys, values, key_scales, value_scales, table, low, whole, own, peak, total, a0, a1, a2, a3,
            row_scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, False, PRECISION, LARGEST,
        )  # fmt: skip
        peak, total, a0, a1, a2, a3 = _attend_words(
            q0, q1, q2, q3, keys, values, key_scales, value_scales, table, whole, high, own, peak, total, a0, a1, a2, a3,
            row_scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, True, PRECISION, LARGEST,
        )  # fmt: skip
        acc = tl.interleave(tl.interleave(a0, a2), tl.interleave(a1, a3))
    else:
        acc = tl.zeros([GP, DP], tl.float32)
        peak, total, acc = _attend(
            queries, keys, values, key_scales, value_scales, table, low, whole, own, peak, total, acc,
            row_scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, False, WINDOW > 0, PRECISION, LARGEST,
        )  # fmt: skip
        peak, total, acc = _attend(
            queries, keys, values, key_scales, value_scales, table, whole, high, own, peak, total, acc,
            row_scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, True, WINDOW > 0, PRECISION, LARGEST,
        )  # fmt: skip
    if LARGEST > 0:
        acc *= 1.0 / LARGEST
    if SPLITS == 1:
        tl.store(out + rows[:, None] * D + d[None, :], acc / total[:, None], mask=mask)
    else:
        _keep(part, part_max, part_sum, rows * SPLITS + split, peak, total, acc, g < G, D)
    if BESIDE:
        wait_for_inputs()


@triton.jit
def _keep(part, part_max, part_sum, at, peak, total, acc, inside, D: tl.constexpr):
    """What a split has found out about its rows, for join_kernel."""
    d = tl.arange(0, acc.shape[1])
    tl.store(part + at[:, None] * D + d[None, :], acc, mask=inside[:, None] & (d[None, :] < D))
    tl.store(part_max + at, peak, mask=inside)
    tl.store(part_sum + at, total, mask=inside)


@triton.jit
def join_kernel(
    part,
    part_max,
    part_sum,
    out,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLITS: tl.constexpr,
    SP: tl.constexpr,
):
    """One program a query head: weigh the splits' results by their maxima. An empty split has maximum -inf, weight 0."""
    start_next()
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    d = tl.arange(0, DP)
    peaks = tl.load(part_max + row * SPLITS + s, mask=s < SPLITS, other=-float("inf"))
    weight = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(weight * tl.load(part_sum + row * SPLITS + s, mask=s < SPLITS, other=0.0), 0)
    mask = (s[:, None] < SPLITS) & (d[None, :] < D)
    acc = tl.load(part + (row * SPLITS + s)[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(out + row * D + d, tl.sum(acc * weight[:, None], 0) / total, mask=d < D)


@triton.jit
def _find_item(query_start, tile, num_items, BLOCK_Q: tl.constexpr):
    """The item whose tiles include `tile`, when item i owns those from query_start[i] // BLOCK_Q + i on."""
    low = 0
    high = num_items
    while low < high - 1:
        mid = (low + high) // 2
        if tl.load(query_start + mid) // BLOCK_Q + mid <= tile:
            low = mid
        else:
            high = mid
    return low


@triton.jit(do_not_specialize=["num_items"], do_not_specialize_on_alignment=LISTS)
def prefill_kernel(
    q, kv, scales, table, table_rows, query_start, seq_lens, out, part, part_max, part_sum, scale, num_items,
    s_block, s_kind, s_head, s_token, s_scales, s_scales_kind, s_scales_head, s_table,
    HEADS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    LARGEST: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """FIRST: what comes next needs the same inputs and nothing of this one: it may start as soon as these are there."""
    if FIRST:
        wait_for_inputs()
        start_next()
    else:
        start_next()
        wait_for_inputs()
    BLIND: tl.constexpr = WINDOW > 0 or SPLITS > 1
    BLOCK_Q: tl.constexpr = M // GP
    head = tl.program_id(1)
    # the last tiles of a sequence have the most to read: they go first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tile += tl.load(query_start) // BLOCK_Q
    item = _find_item(query_start, tile, num_items, BLOCK_Q)
    begin = tl.load(query_start + item)
    end = tl.load(query_start + item + 1)
    token = (tile - begin // BLOCK_Q - item) * BLOCK_Q
    if token < end - begin:
        past = tl.load(seq_lens + item) - (end - begin)  # positions before this step's
        m = tl.arange(0, M)
        d = tl.arange(0, DP)
        local = token + m // GP
        g = m % GP
        rows = (begin + local).to(tl.int64) * HEADS + head * G + g
        inside = (local < end - begin) & (g < G)
        mask = inside[:, None] & (d[None, :] < D)
        queries = tl.load(q + rows[:, None] * D + d[None, :], mask=mask, other=0.0)
        row_scale = scale
        if LARGEST > 0:
            queries, row_scale = kv_codes.queries(queries, scale)
        own = past + local
        low = 0
        if WINDOW > 0:
            low = tl.maximum(past + token - WINDOW + 1, 0) // N * N
        diagonal = (past + token + 1) // N * N  # before it, every row sees everything
        high = past + tl.minimum(token + BLOCK_Q, end - begin)
        if SPLITS > 1:
            each = tl.cdiv(tl.cdiv(high - low, N), SPLITS) * N
            low += tl.program_id(2) * each
            high = tl.minimum(low + each, high)
        diagonal = tl.maximum(tl.minimum(diagonal, high), low)
        table += tl.load(table_rows + item).to(tl.int64) * s_table
        keys = kv + head * s_head
        values = kv + head * s_head + s_kind
        key_scales = scales
        value_scales = scales
        if LARGEST > 0:
            key_scales += head * s_scales_head
            value_scales = key_scales + s_scales_kind
        peak = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        peak, total, acc = _attend(
            queries, keys, values, key_scales, value_scales, table, low, diagonal, own, peak, total, acc,
            row_scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, False, BLIND, PRECISION, LARGEST,
        )  # fmt: skip
        peak, total, acc = _attend(
            queries, keys, values, key_scales, value_scales, table, diagonal, high, own, peak, total, acc,
            row_scale, s_block, s_token, s_scales, D, DP, B, N, WINDOW, True, BLIND, PRECISION, LARGEST,
        )  # fmt: skip
        if LARGEST > 0:
            acc *= 1.0 / LARGEST
        if SPLITS == 1:
            tl.store(out + rows[:, None] * D + d[None, :], acc / total[:, None], mask=mask)
        else:
            _keep(
                part,
                part_max,
                part_sum,
                rows * SPLITS + tl.program_id(2),
                peak,
                total,
                acc,
                inside,
                D,
            )


def attention(q: Tensor, kv: KV, batch: ForwardBatch, scale: float, window: int) -> Tensor:
    """As Ops.attention. A plan lists decoding rows first, one token each; the rest is prefill. Where there are both, prefill
    starts first, and decoding takes what it leaves: the one computes, the other reads."""
    out = torch.empty_like(q)
    decoding = next((i for i, span in enumerate(batch.spans) if span.num != 1), len(batch.spans))
    beside = False
    if decoding < len(batch.spans):
        beside = _prefill(q, kv, batch, out, decoding, scale, window)
    if decoding:
        _decode(q, kv, batch, out, decoding, scale, window, beside)
    return out


def _shape(q: Tensor, kv: KV) -> dict[str, Any]:
    """What both kernels are specialised for."""
    heads = q.shape[1]
    (_, _, kv_heads, block, dim) = kv.shape
    return dict(HEADS=heads, G=heads // kv_heads, D=dim, DP=max(16, triton.next_power_of_2(dim)), B=block,
                PRECISION="ieee" if q.dtype == torch.float32 else "tf32", LARGEST=LARGEST.get(kv.dtype, 0.0))  # fmt: skip


def _tile(kv: KV, dim: int) -> dict[str, int]:
    """Positions a tile, and how many tiles are on their way at once: as many as shared memory holds, up to four. A tile within
    one block has cheaper addresses: with blocks of 64 prefill runs a quarter faster than with blocks of 16."""
    tile = max(16, min(64, 32768 // (dim * kv.dtype.itemsize)))
    return {
        "N": tile,
        "num_stages": max(1, min(4, SHARED_MEMORY // (2 * tile * dim * kv.dtype.itemsize))),
    }


def _parts(q: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what the splits of these queries find out: sums, maxima, totals."""
    if splits == 1:
        return q, q, q  # not used
    part = torch.empty(*q.shape[:2], splits, q.shape[2], dtype=torch.float32, device=q.device)
    peaks, totals = torch.empty(2, *part.shape[:3], dtype=torch.float32, device=q.device).unbind(0)
    return part, peaks, totals


def _join(
    parts: tuple[Tensor, Tensor, Tensor], out: Tensor, splits: int, shape: dict[str, Any]
) -> None:
    if splits > 1:
        size = triton.next_power_of_2(splits)
        join_kernel[out.shape[0] * out.shape[1],](
            *parts, out, shape["D"], shape["DP"], splits, size, num_warps=4, **LAUNCH
        )


def _decode(
    q: Tensor,
    kv: KV,
    batch: ForwardBatch,
    out: Tensor,
    count: int,
    scale: float,
    window: int,
    beside: bool,
) -> None:
    shape = _shape(q, kv)
    kv_heads = kv.shape[2]
    tile = _tile(kv, shape["DP"])
    words = isinstance(kv, QuantKV) and shape["DP"] >= 64 and shape["B"] % tile["N"] == 0
    tensors, strides = arguments(QuantKV(kv.codes.view(torch.int32), kv.scales) if words else kv)  # type: ignore[union-attr]
    # that any row may be: what is split alike needs no kernel of its own
    longest = batch.block_table.shape[1] * shape["B"]
    splits = max(1, min(PROGRAMS // (count * kv_heads), triton.cdiv(longest, tile["N"]), 32))
    splits = 1 << round(math.log2(splits))
    # Two tiles on their way in each program rather than one. Three such programs fit a multiprocessor, where five fit otherwise:
    # not where there are a few more than three, which would be a second, short round.
    deeper = shape["DP"] == 128 and kv.dtype.itemsize == 2 and tile["num_stages"] == 4
    if deeper and not 3 < count * kv_heads * splits / (PROGRAMS / 8) <= 4:
        tile["num_stages"] = 6  # as the compiler counts
    parts = _parts(q[:count], splits)
    decode_kernel[count, kv_heads, splits](
        q, *tensors, batch.block_table, batch.slots, batch.seq_lens, out, *parts, scale * LOG2E,
        *strides, batch.block_table.stride(0),
        GP=max(16, triton.next_power_of_2(shape["G"])), SPLITS=splits, WINDOW=window, WORDS=words, BESIDE=beside,
        num_warps=1 if words and shape["DP"] < 128 else 2, **tile, **shape, **LAUNCH,
    )  # fmt: skip
    _join(parts, out[:count], splits, shape)


def _prefill(
    q: Tensor, kv: KV, batch: ForwardBatch, out: Tensor, skip: int, scale: float, window: int
) -> bool:
    """Returns whether decoding may start beside it."""
    shape = _shape(q, kv)
    kv_heads = kv.shape[2]
    (tensors, strides) = arguments(kv)
    group = triton.next_power_of_2(shape["G"])
    items = len(batch.spans) - skip
    tokens = q.shape[0] - skip
    rows = max(group, 64)
    tiles = tokens // (rows // group) + items + (skip > 0)  # from above: some stay empty
    longest = batch.block_table.shape[1] * shape["B"]  # that any item may be: as in _decode
    splits = SPLITS if tokens <= FEW and longest >= LONG else 1
    parts = _parts(q, splits)
    first = skip >= BESIDE and splits == 1
    prefill_kernel[tiles, kv_heads, splits](
        q, *tensors, batch.block_table, batch.slots[skip:], batch.query_start[skip:], batch.seq_lens[skip:], out, *parts,
        scale * LOG2E, items, *strides, batch.block_table.stride(0),
        GP=group, M=rows, SPLITS=splits, WINDOW=window, FIRST=first, num_warps=4, **_tile(kv, shape["DP"]), **shape, **LAUNCH,
    )  # fmt: skip
    _join(tuple(part[skip:] for part in parts), out[skip:], splits, shape)  # type: ignore[arg-type]
    return first
