"""Quantised rows times quantised weights: bytes multiplied into 32-bit sums, scaled once a strip of 32 inputs.

    y[r, n] = sum over groups g of d[n, g] * (sum over its strips t of  s[r, t] * (sum of code[n, k] * x[r, k] - zero * sum of x))
                                 + m[n, g] * (sum over its strips t of  s[r, t] * sum of x)

x is int8 with a scale for each row and strip, computed just before (`quantize_strips`); weights are as weight_layout.py lays them out:
LANES outputs side by side, so that a vector holds four inputs of each and no sum ever crosses lanes. Either `zero` or `m`
is there, not both. A row's result does not depend on the rows computed with it: the order of its sums is always the same.

One scale for a whole row of activations would be a little faster and is not good enough: a few of them are a hundred times
larger than the rest, and int8 weights then cost 3.7% of perplexity, against 0.4% on the same text.
"""

from __future__ import annotations

from typing import Any

from numba import types

from octavo.ops.cpu.jit.llvm_intrinsics import (
    BYTES,
    FLOATS,
    HALVES,
    INTS,
    ISA,
    LANES,
    POINTER,
    VOID,
    Emitter,
    Value,
    f32,
    i32,
    inner,
    intrinsic,
    load_i64,
)

STRIP = 32  # inputs that one turn of the inner loop multiplies; groups are multiples of it
INT = types.int64

# A weight to the kernels: a record of int64.
CODES, SCALE, LEAST, BIAS, INPUTS, OUTPUTS, GROUP, BITS, FIELDS = range(9)

# A row of activations: int8 [padded inputs], then for each strip its scale, its sum, and their product.


@inner
def padded(inputs: int, group: int) -> int:
    """Inputs up to whole groups."""
    return (inputs + group - 1) // group * group


@inner
def row_bytes(inputs: int, group: int) -> int:
    """Of a quantised row: codes, then 3 x 4 bytes a strip, 64-byte aligned."""
    size = (inputs + group - 1) // group * group
    return (size + 12 * (size // STRIP) + 63) // 64 * 64


@intrinsic(VOID, POINTER, POINTER, INT)
def quantize_strips(e: Emitter, x: Value, out: Value, strips: Value) -> None:
    """float32 [strips * STRIP] -> a quantised row."""
    scales = out + strips * STRIP
    sums = scales + strips * 4
    products = scales + strips * 8
    with e.loop(strips) as t:
        values = [e.load(x + t * (4 * STRIP) + 4 * i, FLOATS) for i in range(0, STRIP, LANES)]
        most = e.absolute(values[0])
        for v in values[1:]:
            most = e.maximum(most, e.absolute(v))
        scale = e.largest(most) / 127.0
        inverse = e.splat(
            e.select(scale.compare(">", 0.0), e.constant(f32, 1.0) / scale, e.constant(f32, 0.0))
        )
        codes = [e.to_int(e.round(v * inverse)) for v in values]
        total = codes[0]
        for c in codes[1:]:
            total = total + c
        for i, c in enumerate(codes):
            e.store(e.narrow(c), out + t * STRIP + i * LANES)
        amount = e.total(total)
        e.store(scale, scales + t * 4)
        e.store(amount, sums + t * 4)
        e.store(e.to_float(amount) * scale, products + t * 4)


def tile(rows: int, bits: int, least: bool) -> Any:
    """The kernel of LANES outputs for some rows at once, which share the work of unpacking the weights."""
    zero = 0 if least else 1 << (bits - 1)
    strip_bytes = STRIP * LANES * bits // 8
    signed = bits == 8 and not ISA.dot  # bytes as they are stored have their top bit flipped
    # a block takes long enough to hide the next one's way from memory; fewer rows just stream
    asks = rows > 2

    @intrinsic(VOID, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, POINTER, INT, INT, INT)
    def run(
        e: Emitter, codes: Value, scale: Value, mins: Value, x: Value, x_stride: Value, groups: Value, strips: Value,
        y: Value, y_stride: Value, ahead: Value, info_ahead: Value,
    ) -> None:  # fmt: skip
        starts = [x + x_stride * r for r in range(rows)]
        count = groups * strips
        infos = [start + count * STRIP for start in starts]
        result = [e.variable(e.constant(FLOATS, 0.0)) for _ in range(rows)]
        partial = [e.variable(e.constant(FLOATS, 0.0)) for _ in range(rows)]
        with e.loop(groups) as g:
            for r in range(rows):
                partial[r].set(e.constant(FLOATS, 0.0))
            m = e.to_float(e.load(mins + g * (2 * LANES), HALVES)) if least else None
            for info in ((scale, mins) if least else (scale,)) if asks else ():
                e.prefetch(info + g * (2 * LANES) + info_ahead)
            with e.loop(strips) as s:
                strip = g * strips + s
                base = codes + strip * strip_bytes
                inputs = strip * STRIP
                for line in range(0, strip_bytes if asks else 0, 64):
                    e.prefetch(base + ahead + line)
                sums = [e.constant(INTS, 0)] * rows
                if zero and not signed:
                    sums = [
                        e.splat(e.load(info + (count + strip) * 4, i32) * -zero) for info in infos
                    ]
                for k in range(STRIP // 4):  # a quad at a time: registers are for the sums
                    if bits == 8:
                        quad = e.load(base + k * 4 * LANES, BYTES)
                        quad = quad ^ -128 if signed else quad
                    else:
                        both = e.load(base + (k // 2) * 4 * LANES, BYTES)
                        # bytes do not shift
                        quad = (
                            ((both.bits(INTS) >> 4) & 0x0F0F0F0F).bits(BYTES)
                            if k % 2
                            else both & 15
                        )
                    for r in range(rows):
                        four = e.splat(e.load(starts[r] + inputs + 4 * k, i32)).bits(BYTES)
                        sums[r] = (e.dot4_signed if signed else e.dot4)(sums[r], quad, four)
                for r in range(rows):
                    factor = e.splat(e.load(infos[r] + strip * 4, f32))
                    partial[r].set(e.fma(e.to_float(sums[r]), factor, partial[r].get()))
                    if m is not None:
                        result[r].set(
                            e.fma(
                                m,
                                e.splat(e.load(infos[r] + (count * 2 + strip) * 4, f32)),
                                result[r].get(),
                            )
                        )
            d = e.to_float(e.load(scale + g * (2 * LANES), HALVES))
            for r in range(rows):
                result[r].set(e.fma(partial[r].get(), d, result[r].get()))
        for r in range(rows):
            e.store(result[r].get(), y + y_stride * r)

    return run


TILE = 8 if LANES == 16 else 4  # rows: as many as registers hold
four_8, four_4, four_2, four_1 = (tile(n, 4, False) for n in (TILE, 4, 2, 1))
least_8, least_4, least_2, least_1 = (tile(n, 4, True) for n in (TILE, 4, 2, 1))
eight_8, eight_4, eight_2, eight_1 = (tile(n, 8, False) for n in (TILE, 4, 2, 1))


@inner
def block_product(
    weight: int, block: int, x: int, x_stride: int, rows: int, y: int, y_stride: int, ahead: int
) -> int:
    """Outputs block * LANES .. + LANES of up to TILE rows -> y, LANES float32 a row. Returns how many rows it took. The block
    that lies `ahead` blocks further is asked for meanwhile."""
    group = load_i64(weight + 8 * GROUP)
    bits = load_i64(weight + 8 * BITS)
    size = padded(load_i64(weight + 8 * INPUTS), group)
    groups = size // group
    strips = group // STRIP
    stride = size * LANES * bits // 8
    info_stride = groups * LANES * 2
    codes = load_i64(weight + 8 * CODES) + block * stride
    d = load_i64(weight + 8 * SCALE) + block * info_stride
    m, ahead, info_ahead = load_i64(weight + 8 * LEAST), ahead * stride, ahead * info_stride
    if bits == 8:
        if rows >= TILE:
            eight_8(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
            return TILE
        if rows >= 4:
            eight_4(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
            return 4
        if rows >= 2:
            eight_2(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
            return 2
        eight_1(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
        return 1
    if m == 0:
        if rows >= TILE:
            four_8(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
            return TILE
        if rows >= 4:
            four_4(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
            return 4
        if rows >= 2:
            four_2(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
            return 2
        four_1(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
        return 1
    m += block * info_stride
    if rows >= TILE:
        least_8(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
        return TILE
    if rows >= 4:
        least_4(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
        return 4
    if rows >= 2:
        least_2(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
        return 2
    least_1(codes, d, m, x, x_stride, groups, strips, y, y_stride, ahead, info_ahead)
    return 1
