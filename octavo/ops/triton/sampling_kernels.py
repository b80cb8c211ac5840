"""Samples tokens in one pass without sorting: argmax of logits / temperature + gumbel noise.

The noise is a hash of (seed, position, token), as in the reference. The hash has the same bits; the
logarithms of the noise may differ in the last place. For rows with min-p, top-k or top-p the pass
finds the likeliest token, and octavo/ops/cuda/filtered_sampling.cu samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import MAX_LOGIT_UNITS, SamplingColumns
from octavo.ops.cuda import filtered_sampling
from octavo.ops.reference import keep_likely, rows_of

ON_GPU = tl.constexpr(torch.cuda.is_available())


@triton.jit
def _mix(bits):
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _log(values):
    """Return the natural logarithm, on a GPU with the hardware's accuracy of 22 bits.

    The accurate logarithm would take as long as the rest of the kernel.
    """
    if ON_GPU:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    else:
        return tl.log(values)


@triton.jit
def choose_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_p_ptr,
    top_k_ptr,
    max_distance_ptr,
    seed_low_ptr,
    seed_high_ptr,
    positions_ptr,
    best_value_ptr,
    best_token_ptr,
    vocab_size,
    stride_logits,
    stride_float,
    stride_int,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    SKIP_FILTERED: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
):
    """Find the best token in one part of the vocabulary, for one row.

    With SKIP_FILTERED, the best token of a row with min-p, top-k or top-p is the likeliest one.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot * stride_float)
    if SKIP_FILTERED:
        has_top_p = tl.load(top_p_ptr + slot * stride_float) < 1
        has_top_k = tl.load(top_k_ptr + slot * stride_int) < vocab_size
        has_min_p = tl.load(max_distance_ptr + slot * stride_int) < MAX_DISTANCE
        temperature = tl.where(has_top_p | has_top_k | has_min_p, 0.0, temperature)
    noise_key = _mix(tl.load(positions_ptr + row).to(tl.uint32, bitcast=True))
    noise_key = _mix(
        tl.load(seed_high_ptr + slot * stride_int).to(tl.uint32, bitcast=True) ^ noise_key
    )
    noise_key = _mix(
        tl.load(seed_low_ptr + slot * stride_int).to(tl.uint32, bitcast=True) ^ noise_key
    )
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_tokens = tl.zeros([BLOCK], tl.int32) + vocab_size
    for step in range(STEPS):
        tokens = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        mask = tokens < vocab_size
        scores = tl.load(
            logits_ptr + row.to(tl.int64) * stride_logits + tokens, mask=mask, other=-float("inf")
        ).to(tl.float32)
        if temperature > 0:
            noise_bits = _mix(_mix(tokens.to(tl.uint32, bitcast=True)) ^ noise_key)
            uniform = tl.minimum(
                noise_bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10,
                0.99999994,
            )
            # Triton has no log1p. The series is exact enough for small values, where the noise is
            # large.
            log1p = tl.where(
                uniform < 1e-3,
                -uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334)),
                _log(1.0 - uniform),
            )
            scores = scores / temperature - _log(-log1p)
            scores = tl.where(mask, scores, -float("inf"))
        scores = tl.where(scores == scores, scores, float("inf"))  # a NaN must win
        better = scores > best
        best = tl.where(better, scores, best)
        best_tokens = tl.where(better, tokens, best_tokens)
    largest = tl.max(best, 0)
    num_parts = tl.num_programs(1)
    tl.store(best_value_ptr + row * num_parts + part, largest)
    tl.store(
        best_token_ptr + row * num_parts + part,
        tl.min(tl.where(best == largest, best_tokens, vocab_size), 0),
    )


@triton.jit
def join_kernel(
    best_value_ptr, best_token_ptr, output_ptr, num_parts, vocab_size, PARTS_PADDED: tl.constexpr
):
    row = tl.program_id(0)
    part_offsets = tl.arange(0, PARTS_PADDED)
    values = tl.load(
        best_value_ptr + row * num_parts + part_offsets,
        mask=part_offsets < num_parts,
        other=-float("inf"),
    )
    tokens = tl.load(
        best_token_ptr + row * num_parts + part_offsets,
        mask=part_offsets < num_parts,
        other=2**31 - 1,
    )
    largest = tl.max(values, 0)
    best_token = tl.min(tl.where(values == largest, tokens, 2**31 - 1), 0)
    finite = (largest > -float("inf")) & (largest < float("inf"))  # false for NaN too
    tl.store(output_ptr + row, tl.where(finite, tl.minimum(best_token, vocab_size - 1), -1))


def choose(logits: Tensor, slots: Tensor, positions: Tensor, sampling: SamplingColumns) -> Tensor:
    """Implement Ops.choose."""
    num_rows, vocab_size = logits.shape
    can_filter = filtered_sampling.is_available(logits.device, logits.dtype)
    if not can_filter:
        logits = keep_likely(logits.float(), rows_of(sampling, slots))
    block_tokens = 1024
    steps = 4
    num_parts = triton.cdiv(vocab_size, block_tokens * steps)
    values = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    output = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    choose_kernel[num_rows, num_parts](
        logits,
        slots,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.max_distance,
        sampling.seed_low,
        sampling.seed_high,
        positions,
        values,
        tokens,
        vocab_size,
        logits.stride(0),
        sampling.temperature.stride(0),
        sampling.top_k.stride(0),
        block_tokens,
        steps,
        can_filter,
        MAX_LOGIT_UNITS,
        num_warps=4,
    )
    join_kernel[num_rows,](
        values,
        tokens,
        output,
        num_parts,
        vocab_size,
        triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    if can_filter:
        filtered_sampling.sample_filtered(logits, slots, positions, sampling, output)
    return output
