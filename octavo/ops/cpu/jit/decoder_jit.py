"""What a team of threads runs: a quantised matrix product, attention or an activation alone, or all layers of a decoder in one go.

The layers hold no Python between them: norms, products, rotation, the cache's writes, attention, the activation. Phases that
work on rows split the tokens, products split the outputs, attention splits sequences and heads. Knows addresses and sizes;
where they come from is the caller's business.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.cpu.jit import attention_jit, matmul_jit, thread_barrier
from octavo.ops.cpu.jit.llvm_intrinsics import (
    F8,
    F16,
    F32,
    FLOATS,
    I8,
    LANES,
    POINTER,
    SIZES,
    VOID,
    Emitter,
    Value,
    f32,
    inner,
    intrinsic,
    kernel,
    load_f16,
    load_f32,
    load_i64,
    load_u8,
    prefetch_column,
    store_f32,
    store_i64,
)
from octavo.ops.cpu.jit.matmul_jit import (
    STRIP,
    TILE,
    block_product,
    padded,
    quantize_strips,
    row_bytes,
)
from octavo.ops.cpu.jit.sampling_jit import draw

INT = types.int64
FLOAT = types.float32
NOTHING = types.void

# ---- rows ---------------------------------------------------------------------------------------------------


@intrinsic(FLOAT, POINTER, INT)
def sum_of_squares(e: Emitter, x: Value, vectors: Value) -> Value:
    total = e.variable(e.constant(FLOATS, 0.0))
    with e.loop(vectors) as i:
        v = e.load(x + i * (4 * LANES), FLOATS)
        total.set(e.fma(v, v, total.get()))
    return e.total(total.get())


@intrinsic(VOID, POINTER, FLOAT, POINTER, POINTER, INT)
def scale_by(
    e: Emitter, x: Value, factor: Value, weight: Value, out: Value, vectors: Value
) -> None:
    """out = x * factor * weight"""
    with e.loop(vectors) as i:
        at = i * (4 * LANES)
        e.store(e.load(x + at, FLOATS) * e.splat(factor) * e.load(weight + at, FLOATS), out + at)


@intrinsic(VOID, POINTER, POINTER, INT)
def add_to(e: Emitter, x: Value, more: Value, vectors: Value) -> None:
    with e.loop(vectors) as i:
        at = x + i * (4 * LANES)
        e.store(e.load(at, FLOATS) + e.load(more + i * (4 * LANES), FLOATS), at)


def turn(kind: ir.Type) -> Any:
    @intrinsic(VOID, POINTER, POINTER, POINTER, POINTER)
    def run(e: Emitter, low: Value, high: Value, cos: Value, sin: Value) -> None:
        """Pairs (low, high), one or a vector of them, by their angles."""
        a, b, c, s = (e.load(at, kind) for at in (low, high, cos, sin))
        e.store(a * c - b * s, low)
        e.store(b * c + a * s, high)

    return run


turn_one = turn(f32)
turn_many = turn(FLOATS)


def turn_stored(kind: int) -> Any:
    size = SIZES[kind]

    @intrinsic(VOID, POINTER, INT, POINTER)
    def run(e: Emitter, x: Value, half: Value, angles: Value) -> None:
        """turn() of a stored vector [2 * half], by cosines and sines [2, half]."""
        with e.loop(half / LANES) as i:
            low = x + i * (size * LANES)
            at = angles + i * (4 * LANES)
            high = low + half * size
            a = e.load_floats(low, kind)
            b = e.load_floats(high, kind)
            c = e.load(at, FLOATS)
            s = e.load(at + half * 4, FLOATS)
            e.store_floats(a * c - b * s, low, kind)
            e.store_floats(b * c + a * s, high, kind)

    return run


turn_f32 = turn_stored(F32)
turn_f16 = turn_stored(F16)


def copy(kind: int) -> Any:
    @intrinsic(VOID, POINTER, POINTER, INT)
    def run(e: Emitter, source: Value, target: Value, vectors: Value) -> None:
        with e.loop(vectors) as i:
            e.store_floats(
                e.load(source + i * (4 * LANES), FLOATS), target + i * (SIZES[kind] * LANES), kind
            )

    return run


copy_f32 = copy(F32)
copy_f16 = copy(F16)


@intrinsic(FLOAT, POINTER, INT)
def peak(e: Emitter, x: Value, vectors: Value) -> Value:
    """The largest magnitude, or NaN where anything is not finite."""
    most = e.variable(e.constant(FLOATS, 0.0))
    spoiled = e.variable(e.constant(FLOATS, 0.0))
    with e.loop(vectors) as i:
        v = e.load(x + i * (4 * LANES), FLOATS)
        most.set(e.maximum(most.get(), e.absolute(v)))
        spoiled.set(spoiled.get() + v * 0.0)
    return e.largest(most.get()) + e.total(spoiled.get())


def encode(kind: int, largest: float) -> Any:
    @intrinsic(VOID, POINTER, POINTER, INT, FLOAT)
    def run(e: Emitter, source: Value, target: Value, vectors: Value, inverse: Value) -> None:
        """Codes of source * inverse."""
        with e.loop(vectors) as i:
            x = e.load(source + i * (4 * LANES), FLOATS) * e.splat(inverse)
            # NaN too
            x = e.maximum(e.minimum(x, e.constant(FLOATS, largest)), e.constant(FLOATS, -largest))
            e.store_floats(x, target + i * LANES, kind)

    return run


encode_i8 = encode(I8, 127.0)
encode_f8 = encode(F8, 448.0)


@inner
def store_vector(source: int, target: int, scale: int, kind: int, dim: int) -> None:
    """One head's key or value into the cache; codes as octavo.ops.kv defines them."""
    if kind == F32:
        copy_f32(source, target, dim // LANES)
    elif kind == F16:
        copy_f16(source, target, dim // LANES)
    else:
        most = peak(source, dim // LANES)
        largest = FLOAT(127.0 if kind == I8 else 448.0)
        zero = most < FLOAT(1e-30)
        store_f32(scale, FLOAT(0.0) if zero else most / largest)
        inverse = FLOAT(0.0) if zero else largest / most
        if kind == I8:
            encode_i8(source, target, dim // LANES, inverse)
        else:
            encode_f8(source, target, dim // LANES, inverse)


@intrinsic(VOID, POINTER, POINTER, POINTER, INT)
def gate(e: Emitter, gates: Value, ups: Value, out: Value, gelu: Value) -> None:
    """act(gate) * up of one vector. gelu (tanh) is g * sigmoid(2 z), silu is g * sigmoid(g)."""
    g = e.load(gates, FLOATS)
    z = (g + g * g * g * 0.044715) * (2 * math.sqrt(2 / math.pi))
    z = e.select(e.splat(gelu.compare("!=", 0)), z, g)
    down = e.exp(e.constant(FLOATS, 0.0) - z)
    e.store(g / (down + 1.0) * e.load(ups, FLOATS), out)


@inner
def norm(x: int, weight: int, out: int, eps: float, size: int) -> None:
    mean = sum_of_squares(x, size // LANES) / FLOAT(size)
    scale_by(x, FLOAT(1.0) / FLOAT(math.sqrt(mean + eps)), weight, out, size // LANES)


@inner
def rotate(x: int, angles: int, half: int) -> None:
    """One head [2 * half], by the row of cosines and sines at `angles`."""
    i = 0
    while i + LANES <= half:
        turn_many(x + 4 * i, x + 4 * (i + half), angles + 4 * i, angles + 4 * (i + half))
        i += LANES
    while i < half:
        turn_one(x + 4 * i, x + 4 * (i + half), angles + 4 * i, angles + 4 * (i + half))
        i += 1


@inner
def move(source: int, target: int, size: int) -> None:
    for i in range(size):
        store_f32(target + 4 * i, load_f32(source + 4 * i))


@inner
def quantize_row(x: int, inputs: int, group: int, out: int, spare: int) -> None:
    """float32 [inputs] -> a quantised row; `spare` is where a row is padded that is not whole groups."""
    size = padded(inputs, group)
    if size > inputs:
        move(x, spare, inputs)
        for k in range(inputs, size):
            store_f32(spare + 4 * k, 0.0)
        x = spare
    quantize_strips(x, out, size // STRIP)


# ---- phases -------------------------------------------------------------------------------------------------


# A job: a record of int64.
KIND, ROWS, WEIGHT, X, QUANTIZED, SPARE, SPARE_SIZE, Y = range(8)  # of a product
# of a decoder, beside most of the above
LAYERS, LAYER_COUNT, HIDDEN, INNER, EPS, GELU, BATCH, LAST_NORM = range(8, 16)
(
    DELTA,
    QKV,
    MIXED,
    ACTED,
    POSITIONS,
    SLOTS,
    IDS,
    FACTOR,
    WINDOW_OF,
    HEAT,
    LAST,
    LAST_COUNT,
    FIELDS,
) = range(16, 29)
PRODUCT, ATTENTION, DECODER, EMBED, CHOOSE, SHIFT, ACTIVATE = range(7)
ACTIVATE_BYTES = 4 * 4 * LANES  # of a thread's scratch, for ACTIVATE

# A layer: four weights' records, then these.
WEIGHTS = 4 * matmul_jit.FIELDS
ATTN_NORM, MLP_NORM, Q_NORM, K_NORM, POST_ATTN, POST_MLP, WINDOW, ANGLES = range(
    WEIGHTS, WEIGHTS + 8
)
LAYER_FIELDS = WEIGHTS + 8
PHASES_OF_LAYER = 10  # as decode() has them; one more follows the last layer


@inner
def spare(me: int, job: int) -> int:
    """This thread's own scratch."""
    return load_i64(job + 8 * SPARE) + load_i64(me + 8 * thread_barrier.NUMBER) * load_i64(
        job + 8 * SPARE_SIZE
    )


@inner
def quantize_rows(me: int, job: int, x: int, rows: int, weight: int) -> None:
    """float32 [rows, inputs] -> the job's quantised rows, as this weight wants them."""
    inputs = load_i64(weight + 8 * matmul_jit.INPUTS)
    group = load_i64(weight + 8 * matmul_jit.GROUP)
    size = row_bytes(inputs, group)
    out = load_i64(job + 8 * QUANTIZED)
    own = spare(me, job)
    r = thread_barrier.take(me, rows)
    while r >= 0:
        quantize_row(x + r * inputs * 4, inputs, group, out + r * size, own)
        r = thread_barrier.take(me, rows)
    thread_barrier.finish(me, rows)


@inner
def add_bias(y: int, stride: int, rows: int, bias: int) -> None:
    for r in range(rows):
        add_to(y + r * stride, bias, 1)


@inner
def rows_at_once(rows: int, size: int) -> int:
    """Rows whose quantised form stays in a core's own cache while the weights pass."""
    return min(rows, max(TILE, (160_000 // size) // TILE * TILE))


@inner
def multiply(me: int, job: int, weight: int, rows: int, y: int, outputs: int, gated: int) -> None:
    """Quantised rows times a weight -> y [rows, outputs] float32. Gated: the weight's first half is the gate, the second what
    it multiplies; 1 is silu, 2 is gelu."""
    inputs = load_i64(weight + 8 * matmul_jit.INPUTS)
    group = load_i64(weight + 8 * matmul_jit.GROUP)
    x = load_i64(job + 8 * QUANTIZED)
    size = row_bytes(inputs, group)
    bias = load_i64(weight + 8 * matmul_jit.BIAS)
    tiles = spare(me, job)  # two of [TILE, LANES]
    second = tiles + TILE * LANES * 4
    blocks = (outputs + LANES - 1) // LANES
    share = max(1, blocks // (thread_barrier.threads(me) * 6))
    pieces = (blocks + share - 1) // share
    at_once = rows_at_once(rows, size)
    piece = thread_barrier.take(me, pieces)
    while piece >= 0:
        for first in range(0, rows, at_once):
            end = min(first + at_once, rows)
            for block in range(piece * share, min(piece * share + share, blocks)):
                # within the piece, or the next
                ahead = (
                    1 if block % share < share - 1 else (thread_barrier.threads(me) - 1) * share + 1
                )
                direct = gated == 0 and (block + 1) * LANES <= outputs
                r = first
                while r < end:
                    source = x + r * size
                    target = y + (r * outputs + block * LANES) * 4
                    prefetch_column(target + LANES * 4, outputs * 4, min(TILE, end - r))
                    if direct:
                        done = block_product(
                            weight, block, source, size, end - r, target, outputs * 4, ahead
                        )
                        if bias != 0:
                            add_bias(target, outputs * 4, done, bias + block * LANES * 4)
                    else:
                        done = block_product(
                            weight, block, source, size, end - r, tiles, LANES * 4, ahead
                        )
                        if bias != 0:
                            add_bias(tiles, LANES * 4, done, bias + block * LANES * 4)
                        if gated == 0:
                            for i in range(done):
                                move(
                                    tiles + i * LANES * 4,
                                    target + i * outputs * 4,
                                    outputs - block * LANES,
                                )
                        else:
                            block_product(
                                weight,
                                block + blocks,
                                source,
                                size,
                                end - r,
                                second,
                                LANES * 4,
                                ahead,
                            )
                            if bias != 0:
                                add_bias(
                                    second, LANES * 4, done, bias + (block + blocks) * LANES * 4
                                )
                            for i in range(done):
                                gate(
                                    tiles + i * LANES * 4,
                                    second + i * LANES * 4,
                                    target + i * outputs * 4,
                                    gated - 1,
                                )
                    r += done
        piece = thread_barrier.take(me, pieces)
    thread_barrier.finish(me, pieces)


@inner
def add_and_norm(me: int, job: int, post: int, weight: int, then: int, first: int) -> None:
    """Add what the last product gave to the hidden states (`first`: there is none yet; post: normalised before), then norm
    them and quantise the result for the product that comes next."""
    rows = load_i64(job + 8 * ROWS)
    size = load_i64(job + 8 * HIDDEN)
    eps = load_f32(job + 8 * EPS)
    x = load_i64(job + 8 * X)
    delta = load_i64(job + 8 * DELTA)
    own = spare(me, job)
    group = load_i64(then + 8 * matmul_jit.GROUP)
    quantized = load_i64(job + 8 * QUANTIZED)
    stride = row_bytes(size, group)
    r = thread_barrier.take(me, rows)
    while r >= 0:
        at = x + r * size * 4
        more = delta + r * size * 4
        if first == 0:
            if post != 0:
                norm(more, post, more, eps, size)
            add_to(at, more, size // LANES)
        norm(at, weight, own, eps, size)
        quantize_row(own, size, group, quantized + r * stride, own + size * 4)
        r = thread_barrier.take(me, rows)
    thread_barrier.finish(me, rows)


@inner
def last_norm(me: int, job: int, post: int) -> None:
    """What the last product gave is added and all is normed -> Y: of the rows LAST [LAST_COUNT], or of the
    first LAST_COUNT (LAST is 0)."""
    size = load_i64(job + 8 * HIDDEN)
    eps = load_f32(job + 8 * EPS)
    weight = load_i64(job + 8 * LAST_NORM)
    x = load_i64(job + 8 * X)
    delta = load_i64(job + 8 * DELTA)
    rows = load_i64(job + 8 * LAST_COUNT)
    last = load_i64(job + 8 * LAST)
    r = thread_barrier.take(me, rows)
    while r >= 0:
        row = r if last == 0 else load_i64(last + 8 * r)
        at = x + row * size * 4
        more = delta + row * size * 4
        if post != 0:
            norm(more, post, more, eps, size)
        add_to(at, more, size // LANES)
        norm(at, weight, load_i64(job + 8 * Y) + r * size * 4, eps, size)
        r = thread_barrier.take(me, rows)
    thread_barrier.finish(me, rows)


@inner
def rotate_and_store(me: int, job: int, layer: int, kv: int, scales: int) -> None:
    """Of each token's qkv: norm and rotate queries and keys, write keys and values to its slot."""
    batch = load_i64(job + 8 * BATCH)
    eps = load_f32(job + 8 * EPS)
    heads = load_i64(batch + 8 * attention_jit.HEADS)
    kv_heads = load_i64(batch + 8 * attention_jit.KV_HEADS)
    dim = load_i64(batch + 8 * attention_jit.DIM)
    block_size = load_i64(batch + 8 * attention_jit.BLOCK_SIZE)
    stride = load_i64(batch + 8 * attention_jit.QUERY_STRIDE)
    qkv = load_i64(job + 8 * QKV)
    q_norm = load_i64(layer + 8 * Q_NORM)
    k_norm = load_i64(layer + 8 * K_NORM)
    angles = load_i64(layer + 8 * ANGLES)
    positions = load_i64(job + 8 * POSITIONS)
    slots = load_i64(job + 8 * SLOTS)
    rows = load_i64(job + 8 * ROWS)
    kind = load_i64(batch + 8 * attention_jit.KIND)
    size = SIZES[kind]
    t = thread_barrier.take(me, rows)
    while t >= 0:
        row = qkv + t * stride
        turn = angles + load_i64(positions + 8 * t) * dim * 4
        slot = load_i64(slots + 8 * t)
        block = slot // block_size
        offset = slot % block_size
        at = kv + block * load_i64(batch + 8 * attention_jit.BLOCK_STRIDE) + offset * dim * size
        scale = scales + block * load_i64(batch + 8 * attention_jit.SCALES_STRIDE) + offset * 4
        for h in range(heads + kv_heads):
            head = row + h * dim * 4
            weight = q_norm if h < heads else k_norm
            if weight != 0:
                norm(head, weight, head, eps, dim)
            rotate(head, turn, dim // 2)
        for h in range(2 * kv_heads):
            place = h * block_size
            store_vector(
                row + (heads + h) * dim * 4, at + place * dim * size, scale + place * 4, kind, dim
            )
        t = thread_barrier.take(me, rows)
    thread_barrier.finish(me, rows)


@inner
def attend(me: int, batch: int, kv: int, scales: int, window: int) -> None:
    pieces = attention_jit.count_tasks(batch)
    piece = thread_barrier.take(me, pieces)
    while piece >= 0:
        attention_jit.run_task(
            batch, piece, load_i64(me + 8 * thread_barrier.NUMBER), kv, scales, window
        )
        piece = thread_barrier.take(me, pieces)
    thread_barrier.finish(me, pieces)


# ---- jobs ---------------------------------------------------------------------------------------------------


@inner
def decode(me: int, job: int) -> None:
    rows = load_i64(job + 8 * ROWS)
    hidden = load_i64(job + 8 * HIDDEN)
    inner = load_i64(job + 8 * INNER)
    delta = load_i64(job + 8 * DELTA)
    qkv = load_i64(job + 8 * QKV)
    mixed = load_i64(job + 8 * MIXED)
    acted = load_i64(job + 8 * ACTED)
    batch = load_i64(job + 8 * BATCH)
    gelu = load_i64(job + 8 * GELU)
    heads = load_i64(batch + 8 * attention_jit.HEADS)
    kv_heads = load_i64(batch + 8 * attention_jit.KV_HEADS)
    dim = load_i64(batch + 8 * attention_jit.DIM)
    block_size = load_i64(batch + 8 * attention_jit.BLOCK_SIZE)
    slots = 2 * kv_heads * block_size  # of a layer in a block
    layer = load_i64(job + 8 * LAYERS)
    post = 0
    for i in range(load_i64(job + 8 * LAYER_COUNT)):
        kv = (
            load_i64(batch + 8 * attention_jit.KV)
            + i * slots * dim * SIZES[load_i64(batch + 8 * attention_jit.KIND)]
        )
        scales = load_i64(batch + 8 * attention_jit.SCALES) + i * slots * 4
        to_qkv = layer
        to_out = layer + 8 * matmul_jit.FIELDS
        to_inner = layer + 16 * matmul_jit.FIELDS
        to_hidden = layer + 24 * matmul_jit.FIELDS
        add_and_norm(me, job, post, load_i64(layer + 8 * ATTN_NORM), to_qkv, 1 if i == 0 else 0)
        multiply(me, job, to_qkv, rows, qkv, (heads + 2 * kv_heads) * dim, 0)
        rotate_and_store(me, job, layer, kv, scales)
        attend(me, batch, kv, scales, load_i64(layer + 8 * WINDOW))
        quantize_rows(me, job, mixed, rows, to_out)
        multiply(me, job, to_out, rows, delta, hidden, 0)
        add_and_norm(
            me, job, load_i64(layer + 8 * POST_ATTN), load_i64(layer + 8 * MLP_NORM), to_inner, 0
        )
        multiply(me, job, to_inner, rows, acted, inner, 1 + gelu)
        quantize_rows(me, job, acted, rows, to_hidden)
        multiply(me, job, to_hidden, rows, delta, hidden, 0)
        post = load_i64(layer + 8 * POST_MLP)
        layer += 8 * LAYER_FIELDS
    last_norm(me, job, post)


@inner
def embed(me: int, job: int) -> None:
    """Rows of a weight as float32, times a factor: value = code * scale + least, each step rounded, as GGUF defines it."""
    weight = load_i64(job + 8 * WEIGHT)
    rows = load_i64(job + 8 * ROWS)
    out = load_i64(job + 8 * Y)
    inputs = load_i64(weight + 8 * matmul_jit.INPUTS)
    group = load_i64(weight + 8 * matmul_jit.GROUP)
    bits = load_i64(weight + 8 * matmul_jit.BITS)
    size = padded(inputs, group)
    least = load_i64(weight + 8 * matmul_jit.LEAST)
    zero = 0 if least != 0 else 1 << (bits - 1)
    factor = load_f32(job + 8 * FACTOR)
    t = thread_barrier.take(me, rows)
    while t >= 0:
        row = load_i64(load_i64(job + 8 * IDS) + 8 * t)
        block = row // LANES
        lane = row % LANES
        codes = load_i64(weight + 8 * matmul_jit.CODES) + block * (size * LANES * bits // 8)
        info = block * (size // group) * LANES + lane
        for k in range(inputs):
            quad = k // 4
            if bits == 8:
                code = load_u8(codes + (quad * LANES + lane) * 4 + k % 4)
            else:
                code = (
                    load_u8(codes + (quad // 2 * LANES + lane) * 4 + k % 4) >> (4 * (quad % 2))
                ) & 15
            at = 2 * (info + k // group * LANES)
            value = FLOAT(code - zero) * load_f16(load_i64(weight + 8 * matmul_jit.SCALE) + at)
            if least != 0:
                value += load_f16(least + at)
            store_f32(out + (t * inputs + k) * 4, value * factor)
        t = thread_barrier.take(me, rows)
    thread_barrier.finish(me, rows)


@inner
def activate(me: int, job: int) -> None:
    """Y [ROWS, INNER]: act(gate) * up of rows X [gates, ups], or act(x) of rows X [INNER] where LAYER_COUNT is 1. Every row is
    cut into vectors alike, so its result does not depend on the other rows."""
    rows = load_i64(job + 8 * ROWS)
    width = load_i64(job + 8 * INNER)
    gelu = load_i64(job + 8 * GELU)
    alone = load_i64(job + 8 * LAYER_COUNT)
    x = load_i64(job + 8 * X)
    own = spare(me, job)  # the last vector of a row: gates, ups, results; then a vector of ones
    ones = own + 3 * LANES * 4
    for i in range(LANES):
        store_f32(ones + 4 * i, 1.0)
    whole = width // LANES * LANES
    r = thread_barrier.take(me, rows)
    while r >= 0:
        gates = x + r * (2 - alone) * width * 4
        out = load_i64(job + 8 * Y) + r * width * 4
        ups = gates + width * 4
        for i in range(0, whole, LANES):
            gate(gates + 4 * i, ones if alone else ups + 4 * i, out + 4 * i, gelu)
        if whole < width:
            rest = width - whole
            move(gates + 4 * whole, own, rest)
            if not alone:
                move(ups + 4 * whole, own + LANES * 4, rest)
            gate(own, ones if alone else own + LANES * 4, own + 2 * LANES * 4, gelu)
            move(own + 2 * LANES * 4, out + 4 * whole, rest)
        r = thread_barrier.take(me, rows)
    thread_barrier.finish(me, rows)


@inner
def choose(me: int, job: int) -> None:
    """Y [rows], which holds each row's likeliest token, becomes the tokens drawn from logits X [rows, INNER], where it is hot."""
    rows = load_i64(job + 8 * ROWS)
    vocabulary = load_i64(job + 8 * INNER)
    r = thread_barrier.take(me, rows)
    while r >= 0:
        at = load_i64(job + 8 * Y) + 8 * r
        heat = load_f32(load_i64(job + 8 * HEAT) + 4 * r)
        key = load_i64(load_i64(job + 8 * IDS) + 8 * r)
        logits = load_i64(job + 8 * X) + 4 * r * vocabulary
        if heat != 0:
            store_i64(at, draw(logits, vocabulary, load_i64(at), key, heat))
        r = thread_barrier.take(me, rows)
    thread_barrier.finish(me, rows)


@inner
def shift(me: int, job: int) -> None:
    """Keys of the blocks IDS [ROWS], in LAYER_COUNT layers, turned by the cosines and sines X."""
    batch = load_i64(job + 8 * BATCH)
    blocks = load_i64(job + 8 * IDS)
    angles = load_i64(job + 8 * X)
    kv = load_i64(batch + 8 * attention_jit.KV)
    stride = load_i64(batch + 8 * attention_jit.BLOCK_STRIDE)
    kind = load_i64(batch + 8 * attention_jit.KIND)
    dim = load_i64(batch + 8 * attention_jit.DIM)
    layers = load_i64(job + 8 * LAYER_COUNT)
    vectors = load_i64(batch + 8 * attention_jit.KV_HEADS) * load_i64(
        batch + 8 * attention_jit.BLOCK_SIZE
    )
    size = dim * SIZES[kind]
    pieces = load_i64(job + 8 * ROWS) * layers
    piece = thread_barrier.take(me, pieces)
    while piece >= 0:
        at = (
            kv
            + load_i64(blocks + 8 * (piece // layers)) * stride
            + piece % layers * (2 * vectors * size)
        )
        for _ in range(vectors):
            if kind == F32:
                turn_f32(at, dim // 2, angles)
            else:
                turn_f16(at, dim // 2, angles)
            at += size
        piece = thread_barrier.take(me, pieces)
    thread_barrier.finish(me, pieces)


@inner
def work(state: int, number: int) -> None:
    """One thread's part of the team's job."""
    me = thread_barrier.member(state, number)
    job = load_i64(state + 8 * thread_barrier.JOB)
    kind = load_i64(job + 8 * KIND)
    weight = load_i64(job + 8 * WEIGHT)
    rows = load_i64(job + 8 * ROWS)
    if kind == PRODUCT:
        quantize_rows(me, job, load_i64(job + 8 * X), rows, weight)
        multiply(
            me,
            job,
            weight,
            rows,
            load_i64(job + 8 * Y),
            load_i64(weight + 8 * matmul_jit.OUTPUTS),
            0,
        )
    elif kind == ATTENTION:
        batch = load_i64(job + 8 * BATCH)
        kv = load_i64(batch + 8 * attention_jit.KV)
        scales = load_i64(batch + 8 * attention_jit.SCALES)
        attend(me, batch, kv, scales, load_i64(job + 8 * WINDOW_OF))
    elif kind == DECODER:
        decode(me, job)
    elif kind == EMBED:
        embed(me, job)
    elif kind == CHOOSE:
        choose(me, job)
    elif kind == SHIFT:
        shift(me, job)
    elif kind == ACTIVATE:
        activate(me, job)


@kernel(NOTHING(INT))
def lead(state: int) -> None:
    """The calling thread's part: call the others and work too. Returns when the job is done and nobody is in it."""
    thread_barrier.open_job(state)
    work(state, 0)
    thread_barrier.close_job(state)


@kernel(NOTHING(INT, INT))
def follow(state: int, number: int) -> None:
    """Another thread's life."""
    seen = 0
    while True:
        seen = thread_barrier.wait_for_call(state, seen)
        if load_i64(state + 8 * thread_barrier.STOP) != 0:
            return
        if thread_barrier.enter(state, seen):
            work(state, number)
        thread_barrier.leave(state)
