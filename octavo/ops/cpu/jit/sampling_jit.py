"""The draw of a token: argmax of logits / temperature + noise, the same hash of (seed, position, token) as the reference's.

The noise is -log(E) with E >= u, the hash as a number in (0, 1), so a token can only win if u < exp(its score - the best so
far). That test is all that most tokens cost: the two logarithms are computed for few.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.cpu.jit.llvm_intrinsics import (
    FLOATS,
    INTS,
    LANES,
    POINTER,
    Emitter,
    Value,
    i64,
    inner,
    intrinsic,
    load_f32,
)

INT = types.int64
FLOAT = types.float32


@intrinsic(INT, POINTER, INT, INT, FLOAT, FLOAT)
def candidates(
    e: Emitter, logits: Value, first: Value, key: Value, heat: Value, best: Value
) -> Value:
    """Which of LANES tokens from `first` on may have a score above `best`: a bit each."""

    def mix(x: Value) -> Value:
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * (0x846CA68B - 2**32)
        return x ^ (x >> 16)

    tokens = e.lane_numbers() + e.splat(Value(e, e.b.trunc(first.v, INTS.element)))
    bits = mix(mix(tokens) ^ e.splat(Value(e, e.b.trunc(key.v, INTS.element))))
    uniform = Value(e, e.b.uitofp(bits.v, FLOATS)) * 2.0**-32
    odds = e.exp(e.load(logits, FLOATS) / e.splat(heat) - e.splat(best))
    # A little more than the bound, for what exp and the division round.
    mask = uniform.compare("<", odds * 1.00001).v
    return Value(e, e.b.zext(e.b.bitcast(mask, ir.IntType(LANES)), i64))


@inner
def mixed(x: int) -> int:
    """The reference's _mix, on an unsigned 32-bit number."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@inner
def score(logit: float, token: int, key: int, heat: float) -> Any:
    uniform = FLOAT(mixed(mixed(token) ^ (key & 0xFFFFFFFF))) * FLOAT(2.0**-32) + FLOAT(2.0**-33)
    uniform = min(uniform, FLOAT(1 - 2.0**-24))
    return logit / heat - FLOAT(math.log(-math.log1p(-uniform)))


@inner
def draw(logits: int, vocabulary: int, likeliest: int, key: int, heat: float) -> int:
    """The token drawn from logits [vocabulary], of which `likeliest` is the largest."""
    chosen = likeliest
    best = score(load_f32(logits + 4 * likeliest), likeliest, key, heat)
    first = 0
    while first < vocabulary:
        if first + LANES <= vocabulary:
            mask = candidates(logits + 4 * first, first, key, heat, best)
        else:
            mask = (1 << (vocabulary - first)) - 1
        token = first
        while mask != 0:
            if mask & 1:
                found = score(load_f32(logits + 4 * token), token, key, heat)
                if found > best or (found == best and token < chosen):
                    best = found
                    chosen = token
            mask >>= 1
            token += 1
        first += LANES
    return chosen
