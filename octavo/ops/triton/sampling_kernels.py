"""Choosing tokens without sorting the vocabulary: argmax of logits / temperature + gumbel noise, in one pass.

The noise is the reference's: the same hash of (seed, position, token), bit for bit, through logarithms that differ in the
last place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ON_GPU = tl.constexpr(torch.cuda.is_available())


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log(x):
    """Natural logarithm; on a GPU the hardware's own, good to 22 bits: the accurate one takes as long as all the rest."""
    if ON_GPU:
        two = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return two * 0.6931471805599453
    else:
        return tl.log(x)


@triton.jit
def choose_kernel(
    logits, rows, temperature, seed_low, seed_high, position, best_value, best_token, vocab, s_logits, s_float, s_int,
    BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The best of one part of one row's vocabulary."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    state = tl.load(rows + row).to(tl.int64)
    heat = tl.load(temperature + state * s_float)
    key = _mix(tl.load(position + row).to(tl.uint32, bitcast=True))
    key = _mix(tl.load(seed_high + state * s_int).to(tl.uint32, bitcast=True) ^ key)
    key = _mix(tl.load(seed_low + state * s_int).to(tl.uint32, bitcast=True) ^ key)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32) + vocab
    for step in range(STEPS):
        c = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        mask = c < vocab
        value = tl.load(
            logits + row.to(tl.int64) * s_logits + c, mask=mask, other=-float("inf")
        ).to(tl.float32)
        if heat > 0:
            bits = _mix(_mix(c.to(tl.uint32, bitcast=True)) ^ key)
            uniform = tl.minimum(
                bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994
            )
            # log1p(-u), which Triton lacks: exact enough where u is small, which is where the noise is large
            log1p = tl.where(
                uniform < 1e-3,
                -uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334)),
                _log(1.0 - uniform),
            )
            value = value / heat - _log(-log1p)
            value = tl.where(mask, value, -float("inf"))
        value = tl.where(value == value, value, float("inf"))  # NaN: nothing may be better
        better = value > top
        top = tl.where(better, value, top)
        token = tl.where(better, c, token)
    peak = tl.max(top, 0)
    parts = tl.num_programs(1)
    tl.store(best_value + row * parts + part, peak)
    tl.store(best_token + row * parts + part, tl.min(tl.where(top == peak, token, vocab), 0))


@triton.jit
def join_kernel(best_value, best_token, out, parts, vocab, P: tl.constexpr):
    row = tl.program_id(0)
    p = tl.arange(0, P)
    value = tl.load(best_value + row * parts + p, mask=p < parts, other=-float("inf"))
    token = tl.load(best_token + row * parts + p, mask=p < parts, other=2**31 - 1)
    peak = tl.max(value, 0)
    best = tl.min(tl.where(value == peak, token, 2**31 - 1), 0)
    finite = (peak > -float("inf")) & (peak < float("inf"))  # which no NaN is
    tl.store(out + row, tl.where(finite, tl.minimum(best, vocab - 1), -1))


def choose(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    seed_low: Tensor,
    seed_high: Tensor,
    position: Tensor,
) -> Tensor:
    """As Ops.choose."""
    count, vocab = logits.shape
    block = 1024
    steps = 4
    parts = triton.cdiv(vocab, block * steps)
    value = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    token = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(count, dtype=torch.int32, device=logits.device)
    choose_kernel[count, parts](
        logits, rows, temperature, seed_low, seed_high, position, value, token, vocab,
        logits.stride(0), temperature.stride(0), seed_low.stride(0), block, steps, num_warps=4,
    )  # fmt: skip
    join_kernel[count,](value, token, out, parts, vocab, triton.next_power_of_2(parts), num_warps=1)
    return out
