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


def mask_of_candidates(
    emitter: Emitter,
    logits: Value,
    tokens: Value,
    noise_key: Value,
    temperature: Value,
    best: Value,
) -> Value:
    """Return a bit for each of LANES tokens, with logits at this address: whether it may beat
    `best`."""

    def hash_lanes(bits: Value) -> Value:
        # The shifts and constants are those of _mix in octavo/ops/reference.py.
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * (0x846CA68B - 2**32)
        return bits ^ (bits >> 16)

    key = Value(emitter, emitter.builder.trunc(noise_key.llvm, INTS.element))
    token_bits = hash_lanes(hash_lanes(tokens) ^ emitter.splat(key))
    uniform = Value(emitter, emitter.builder.uitofp(token_bits.llvm, FLOATS)) * 2.0**-32
    bound = emitter.exp(
        emitter.load(logits, FLOATS) / emitter.splat(temperature) - emitter.splat(best)
    )
    # The bound is increased a little, because exp and the division are rounded.
    mask = uniform.compare("<", bound * 1.00001).llvm
    return Value(
        emitter, emitter.builder.zext(emitter.builder.bitcast(mask, ir.IntType(LANES)), i64)
    )


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
    first = Value(emitter, emitter.builder.trunc(first_token.llvm, INTS.element))
    tokens = emitter.lane_numbers() + emitter.splat(first)
    return mask_of_candidates(emitter, logits, tokens, noise_key, temperature, best)


@intrinsic(FLOAT, POINTER, INT)
def largest_of(emitter: Emitter, logits: Value, vectors: Value) -> Value:
    """Return the largest of LANES * vectors logits, or NaN if there is one."""
    largest = emitter.variable(emitter.constant(FLOATS, -math.inf))
    # Infinity minus itself is NaN too, so NaN is found by comparing instead of subtracting.
    nan_found = emitter.variable(emitter.constant(FLOATS, 0.0))
    with emitter.loop(vectors) as index:
        vector = emitter.load(logits + index * (4 * LANES), FLOATS)
        is_nan = Value(emitter, emitter.builder.fcmp_unordered("uno", vector.llvm, vector.llvm))
        nan_found.set(emitter.select(is_nan, vector, nan_found.get()))
        largest.set(emitter.maximum(largest.get(), vector))
    return emitter.largest(largest.get()) + emitter.total(nan_found.get())


@intrinsic(INT, POINTER, FLOAT)
def lanes_equal(emitter: Emitter, logits: Value, value: Value) -> Value:
    """Return a bit for each of LANES logits: whether it has this value."""
    mask = emitter.load(logits, FLOATS).compare("==", emitter.splat(value)).llvm
    bits = emitter.builder.bitcast(mask, ir.IntType(LANES))
    return Value(emitter, emitter.builder.zext(bits, i64))


@inner
def likeliest_token(logits: int, vocabulary: int) -> int:
    """Return the first token with the largest logit, or -1 if there is a NaN or the largest logit
    is not finite."""
    vectors = vocabulary // LANES
    largest = largest_of(logits, vectors)
    for token in range(vectors * LANES, vocabulary):
        logit = load_f32(logits + 4 * token)
        if logit > largest or logit != logit:
            largest = logit
    if not math.isfinite(largest):
        return -1
    first = 0
    while first < vectors * LANES:
        mask = lanes_equal(logits + 4 * first, largest)
        if mask != 0:
            while mask & 1 == 0:
                mask >>= 1
                first += 1
            return first
        first += LANES
    while load_f32(logits + 4 * first) != largest:
        first += 1
    return first


@inner
def noise_key_of(seed_low: int, seed_high: int, position: int) -> int:
    """Return the key of the noise at a position, as noise_key() of the reference."""
    key = hash_bits(position & 0xFFFFFFFF)
    key = hash_bits((seed_high & 0xFFFFFFFF) ^ key)
    return hash_bits((seed_low & 0xFFFFFFFF) ^ key)


@inner
def hash_bits(bits: int) -> int:
    """Hash an unsigned 32-bit number as _mix in octavo/ops/reference.py does."""
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
