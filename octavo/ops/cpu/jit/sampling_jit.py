"""Samples a token: argmax of logits / temperature + noise, with the noise of the reference.

The noise is -log(E) with E >= u, where u is the hash of (seed, position, token) as a number in
(0, 1). So a token can win only if u < exp(its score - the best score so far). Most tokens cost only
this test, and the two logarithms are computed for few tokens.
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
    emitter: Emitter,
    logits: Value,
    first_token: Value,
    noise_key: Value,
    temperature: Value,
    best: Value,
) -> Value:
    """Return a bit for each of LANES tokens from first_token on: whether it may beat `best`."""

    def hash_lanes(bits: Value) -> Value:
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * (0x846CA68B - 2**32)
        return bits ^ (bits >> 16)

    tokens = emitter.lane_numbers() + emitter.splat(
        Value(emitter, emitter.builder.trunc(first_token.llvm, INTS.element))
    )
    token_bits = hash_lanes(
        hash_lanes(tokens)
        ^ emitter.splat(Value(emitter, emitter.builder.trunc(noise_key.llvm, INTS.element)))
    )
    uniform = Value(emitter, emitter.builder.uitofp(token_bits.llvm, FLOATS)) * 2.0**-32
    bound = emitter.exp(
        emitter.load(logits, FLOATS) / emitter.splat(temperature) - emitter.splat(best)
    )
    # The bound is increased a little, because exp and the division are rounded.
    mask = uniform.compare("<", bound * 1.00001).llvm
    return Value(
        emitter, emitter.builder.zext(emitter.builder.bitcast(mask, ir.IntType(LANES)), i64)
    )


@inner
def hash_bits(bits: int) -> int:
    """Hash an unsigned 32-bit number as _mix of the reference does."""
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


@inner
def score(logit: float, token: int, noise_key: int, temperature: float) -> Any:
    uniform = FLOAT(hash_bits(hash_bits(token) ^ (noise_key & 0xFFFFFFFF))) * FLOAT(
        2.0**-32
    ) + FLOAT(2.0**-33)
    uniform = min(uniform, FLOAT(1 - 2.0**-24))
    return logit / temperature - FLOAT(math.log(-math.log1p(-uniform)))


@inner
def sample_token(
    logits: int, vocabulary: int, most_likely: int, noise_key: int, temperature: float
) -> int:
    """Sample a token from logits [vocabulary]. The logit of `most_likely` is the largest."""
    chosen = most_likely
    best = score(load_f32(logits + 4 * most_likely), most_likely, noise_key, temperature)
    first_token = 0
    while first_token < vocabulary:
        if first_token + LANES <= vocabulary:
            mask = candidates(logits + 4 * first_token, first_token, noise_key, temperature, best)
        else:
            mask = (1 << (vocabulary - first_token)) - 1
        token = first_token
        while mask != 0:
            if mask & 1:
                token_score = score(load_f32(logits + 4 * token), token, noise_key, temperature)
                if token_score > best or (token_score == best and token < chosen):
                    best = token_score
                    chosen = token
            mask >>= 1
            token += 1
        first_token += LANES
    return chosen
