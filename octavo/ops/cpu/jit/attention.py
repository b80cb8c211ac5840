"""Causal attention over the paged cache, in place: keys and values are read where they lie, block by block.

One task is some tokens of one sequence and one key head: the rows are those tokens' query heads that share it. CHUNK keys at
a time: scores for all rows, the softmax so far corrected, values added. Nothing of another row or sequence enters, and the
order of the sums depends on positions alone.
"""

from __future__ import annotations

from typing import Any

from numba import types

from octavo.ops.cpu.jit.emit import (
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
    i32,
    i64,
    inner,
    intrinsic,
    load_f32,
    load_i32,
    load_i64,
    prefetch,
    store_f32,
    store_i64,
)

INT = types.int64
ROWS = 4  # computed together; scratch is padded to multiples
TASK_ROWS = 48  # rows of a task, about: what a transposed chunk of keys is used for
WIDE = 4  # vectors that products keep in registers for each row: of keys, or of a head's dimension
CHUNK = WIDE * LANES  # keys between two corrections of the softmax

# The batch to the kernel: a record of int64.
QUERY, OUT, QUERY_STRIDE, KV, BLOCK_STRIDE, HEADS, KV_HEADS, BLOCK_SIZE, DIM = range(9)
SEQUENCES, QUERY_START, SEQ_LENS, ROW, TABLE, TABLE_WIDTH, KIND, SCALE, ZEROS, SCRATCH, SCRATCH_SIZE = range(9, 20)
SCALES, SCALES_STRIDE, FIELDS = range(20, 23)  # of codes: where the scales of block 0 are, and bytes from block to block


def transpose(kind: int) -> Any:
    size = SIZES[kind]

    @intrinsic(VOID, POINTER, POINTER, INT, INT)
    def run(e: Emitter, pointers: Value, out: Value, vectors: Value, stride: Value) -> None:
        """Rows at pointers [LANES], vectors * LANES long -> out [vectors * LANES, LANES], whose rows are `stride` bytes apart."""
        rows = [e.load(pointers + 8 * j, i64) for j in range(LANES)]
        with e.loop(vectors) as d:
            block = [e.load_floats(row + d * (size * LANES), kind) for row in rows]
            bit = 1
            while bit < LANES:  # exchange one bit of the row's number with the same bit of the lane's
                for i in range(LANES):
                    if not i & bit:
                        a, b = block[i], block[i | bit]
                        block[i] = e.shuffle(a, b, [j if not j & bit else LANES + (j ^ bit) for j in range(LANES)])
                        block[i | bit] = e.shuffle(a, b, [j | bit if not j & bit else LANES + j for j in range(LANES)])
                bit *= 2
            first = out + d * LANES * stride
            for j, row in enumerate(block):
                e.store(row, first + stride * j)

    return run


transpose_f32, transpose_f16, transpose_i8, transpose_f8 = (transpose(kind) for kind in (F32, F16, I8, F8))


@inner
def transpose_rows(kind: int, pointers: int, out: int, vectors: int, stride: int) -> None:
    if kind == F32:
        transpose_f32(pointers, out, vectors, stride)
    elif kind == F16:
        transpose_f16(pointers, out, vectors, stride)
    elif kind == I8:
        transpose_i8(pointers, out, vectors, stride)
    else:
        transpose_f8(pointers, out, vectors, stride)


def add_scores(vectors: int) -> Any:
    @intrinsic(VOID, POINTER, INT, POINTER, POINTER)
    def run(e: Emitter, q: Value, dim: Value, keys: Value, out: Value) -> None:
        """q [ROWS, dim] times keys [dim, CHUNK] -> out [ROWS, CHUNK], of which `vectors` vectors are computed."""
        sums = [[e.variable(e.constant(FLOATS, 0.0)) for _ in range(vectors)] for _ in range(ROWS)]
        with e.loop(dim) as d:
            key = [e.load(keys + d * (4 * CHUNK) + 4 * LANES * v, FLOATS) for v in range(vectors)]
            for r in range(ROWS):
                factor = e.splat(e.load(q + dim * (4 * r) + d * 4, f32))
                for v in range(vectors):
                    sums[r][v].set(e.fma(factor, key[v], sums[r][v].get()))
        for r in range(ROWS):
            for v in range(vectors):
                e.store(sums[r][v].get(), out + r * 4 * CHUNK + 4 * LANES * v)

    return run


scores_wide, scores_narrow = add_scores(WIDE), add_scores(1)


@intrinsic(VOID, POINTER, POINTER, INT, INT, INT)
def soften(e: Emitter, row: Value, state: Value, vectors: Value, low: Value, high: Value) -> None:
    """Scores [vectors * LANES] become weights, zero but in low..high; state: largest so far, sum so far, and what earlier
    sums must be multiplied by."""
    bounds = [e.splat(Value(e, e.b.trunc(x.v, i32))) for x in (low, high)]

    def found(v: Value) -> tuple[Value, Value]:
        lanes = e.lane_numbers() + e.splat(Value(e, e.b.trunc((v * LANES).v, i32)))
        return lanes.compare(">=", bounds[0]) & lanes.compare("<", bounds[1]), e.load(row + v * (4 * LANES), FLOATS)

    before = e.load(state, f32)
    most = e.variable(e.constant(FLOATS, -1e30))
    with e.loop(vectors) as v:
        inside, values = found(v)
        most.set(e.maximum(most.get(), e.select(inside, values, e.constant(FLOATS, -1e30))))
    peak = e.maximum(before, e.largest(most.get()))
    total = e.variable(e.constant(FLOATS, 0.0))
    with e.loop(vectors) as v:
        inside, values = found(v)
        weights = e.select(inside, e.exp(values - e.splat(peak)), e.constant(FLOATS, 0.0))
        total.set(total.get() + weights)
        e.store(weights, row + v * (4 * LANES))
    factor = Value(e, e.b.extract_element(e.exp(e.splat(before - peak)).v, i32(0)))
    e.store(peak, state)
    e.store(e.fma(e.load(state + 4, f32), factor, e.total(total.get())), state + 4)
    e.store(factor, state + 8)


@intrinsic(VOID, POINTER, POINTER, INT)
def multiply_by(e: Emitter, row: Value, factors: Value, vectors: Value) -> None:
    with e.loop(vectors) as v:
        at = row + v * (4 * LANES)
        e.store(e.load(at, FLOATS) * e.load(factors + v * (4 * LANES), FLOATS), at)


def add_values(vectors: int, kind: int) -> Any:
    size = SIZES[kind]

    @intrinsic(VOID, POINTER, POINTER, POINTER, INT, POINTER, INT, INT)
    def run(
        e: Emitter, weights: Value, state: Value, pointers: Value, keys: Value, out: Value, stride: Value, offset: Value
    ) -> None:
        """out [ROWS, ...] = out * factor + weights [ROWS, keys] times the rows at pointers [keys]: of all these rows the
        `vectors` vectors that begin at an offset."""
        sums = []
        out = out + offset * 4
        for r in range(ROWS):
            factor = e.splat(e.load(state + 16 * r + 8, f32))
            at = [out + stride * r + 4 * LANES * v for v in range(vectors)]
            sums.append([e.variable(e.load(a, FLOATS) * factor) for a in at])
        with e.loop(keys) as j:
            row = e.load(pointers + j * 8, i64) + offset * size
            value = [e.load_floats(row + size * LANES * v, kind) for v in range(vectors)]
            for r in range(ROWS):
                weight = e.splat(e.load(weights + 4 * CHUNK * r + j * 4, f32))
                for v in range(vectors):
                    sums[r][v].set(e.fma(weight, value[v], sums[r][v].get()))
        for r in range(ROWS):
            for v in range(vectors):
                e.store(sums[r][v].get(), out + stride * r + 4 * LANES * v)

    return run


add_wide_f32, add_wide_f16, add_wide_i8, add_wide_f8 = (add_values(WIDE, kind) for kind in (F32, F16, I8, F8))
add_narrow_f32, add_narrow_f16, add_narrow_i8, add_narrow_f8 = (add_values(1, kind) for kind in (F32, F16, I8, F8))


@inner
def add_wide(kind: int, weights: int, state: int, pointers: int, keys: int, out: int, stride: int, offset: int) -> None:
    if kind == F32:
        add_wide_f32(weights, state, pointers, keys, out, stride, offset)
    elif kind == F16:
        add_wide_f16(weights, state, pointers, keys, out, stride, offset)
    elif kind == I8:
        add_wide_i8(weights, state, pointers, keys, out, stride, offset)
    else:
        add_wide_f8(weights, state, pointers, keys, out, stride, offset)


@inner
def add_narrow(kind: int, weights: int, state: int, pointers: int, keys: int, out: int, stride: int, offset: int) -> None:
    if kind == F32:
        add_narrow_f32(weights, state, pointers, keys, out, stride, offset)
    elif kind == F16:
        add_narrow_f16(weights, state, pointers, keys, out, stride, offset)
    elif kind == I8:
        add_narrow_i8(weights, state, pointers, keys, out, stride, offset)
    else:
        add_narrow_f8(weights, state, pointers, keys, out, stride, offset)


@intrinsic(VOID, POINTER, POINTER, types.float32, INT)
def scaled_copy(e: Emitter, source: Value, target: Value, factor: Value, vectors: Value) -> None:
    with e.loop(vectors) as i:
        e.store(e.load(source + i * (4 * LANES), FLOATS) * e.splat(factor), target + i * (4 * LANES))


@inner
def gather_scales(
    table: int, block: int, offset: int, count: int, block_size: int, scales: int, stride: int, out: int, factor: float
) -> None:
    """Scales of `count` positions from a block and offset on, times a factor -> out; zeros up to a whole vector."""
    j = 0
    while j < count:
        at = scales + load_i32(table + 4 * block) * stride + 4 * offset
        stop = min(count, j + block_size - offset)
        while j < stop:
            store_f32(out + 4 * j, load_f32(at) * factor)
            at += 4
            j += 1
        block += 1
        offset = 0
    while j % LANES != 0:
        store_f32(out + 4 * j, 0.0)
        j += 1


@inner
def task_tokens(heads: int, kv_heads: int) -> int:
    return max(1, TASK_ROWS * kv_heads // heads)


@inner
def scratch_size(heads: int, kv_heads: int, dim: int) -> int:
    """Bytes that one thread needs."""
    rows = max(1, TASK_ROWS * kv_heads // heads) * (heads // kv_heads) + ROWS
    return 4 * (2 * rows * dim + dim * CHUNK + rows * CHUNK + 4 * rows) + 8 * 2 * CHUNK + 4 * 2 * CHUNK


@inner
def count_tasks(batch: int) -> int:
    starts, tokens = load_i64(batch + 8 * QUERY_START), task_tokens(load_i64(batch + 8 * HEADS), load_i64(batch + 8 * KV_HEADS))
    total = 0
    for s in range(load_i64(batch + 8 * SEQUENCES)):
        total += (load_i32(starts + 4 * s + 4) - load_i32(starts + 4 * s) + tokens - 1) // tokens
    return total * load_i64(batch + 8 * KV_HEADS)


@inner
def place(batch: int, task: int, tokens: int) -> tuple[int, int, int]:
    """Of a task: its sequence, how many tokens that has in this step, and which piece of them is meant."""
    starts, piece, s = load_i64(batch + 8 * QUERY_START), task // load_i64(batch + 8 * KV_HEADS), 0
    while True:
        num = load_i32(starts + 4 * s + 4) - load_i32(starts + 4 * s)
        pieces = (num + tokens - 1) // tokens
        if piece < pieces:
            return s, num, piece
        piece -= pieces
        s += 1


@inner
def table_of(batch: int, s: int) -> int:
    row = load_i32(load_i64(batch + 8 * ROW) + 4 * s)
    return load_i64(batch + 8 * TABLE) + 4 * row * load_i64(batch + 8 * TABLE_WIDTH)


@inner
def run_task(batch: int, task: int, after: int, thread: int, kv: int, scales: int, window: int) -> None:
    """`after`: the task that this thread is likely to get next, or -1. A single token's is short, and KV comes from far: while
    one is computed, the next one's is asked for, block by block."""
    heads, kv_heads, dim = load_i64(batch + 8 * HEADS), load_i64(batch + 8 * KV_HEADS), load_i64(batch + 8 * DIM)
    share, tokens, block_size = heads // kv_heads, task_tokens(heads, kv_heads), load_i64(batch + 8 * BLOCK_SIZE)
    starts = load_i64(batch + 8 * QUERY_START)
    head = task % kv_heads
    s, num, piece = place(batch, task, tokens)
    length = load_i32(load_i64(batch + 8 * SEQ_LENS) + 4 * s)
    begin = piece * tokens
    count = min(tokens, num - begin)
    first_token, first_position = load_i32(starts + 4 * s) + begin, length - num + begin
    rows = count * share
    padded = (rows + ROWS - 1) // ROWS * ROWS

    most = tokens * share + ROWS
    q = load_i64(batch + 8 * SCRATCH) + thread * load_i64(batch + 8 * SCRATCH_SIZE)
    sums = q + 4 * most * dim
    keys = sums + 4 * most * dim
    weights = keys + 4 * dim * CHUNK
    states = weights + 4 * most * CHUNK
    key_rows = states + 16 * most
    value_rows = key_rows + 8 * CHUNK
    key_scales = value_rows + 8 * CHUNK
    value_scales = key_scales + 4 * CHUNK

    stride, vectors = load_i64(batch + 8 * QUERY_STRIDE), dim // LANES
    scale = load_f32(batch + 8 * SCALE)
    source = load_i64(batch + 8 * QUERY) + first_token * stride + head * share * dim * 4
    zeros = load_i64(batch + 8 * ZEROS)
    for r in range(padded):
        if r < rows:
            scaled_copy(source + (r // share) * stride + (r % share) * dim * 4, q + r * dim * 4, scale, vectors)
        else:
            scaled_copy(zeros, q + r * dim * 4, scale, vectors)
        scaled_copy(zeros, sums + r * dim * 4, scale, vectors)
        store_f32(states + 16 * r, -1e30)
        store_f32(states + 16 * r + 4, 0.0)

    table = table_of(batch, s)
    kind = load_i64(batch + 8 * KIND)
    row_size, coded = dim * SIZES[kind], kind in (I8, F8)
    bias = types.float32(256.0 if kind == F8 else 1.0)  # see load_floats
    scales, scales_stride = scales + 4 * head * block_size, load_i64(batch + 8 * SCALES_STRIDE)
    next_kv, next_table, next_end = kv + after % kv_heads * block_size * row_size, table, 0
    if after >= 0 and num == 1:
        next_s = place(batch, after, tokens)[0]
        next_table, next_end = table_of(batch, next_s), load_i32(load_i64(batch + 8 * SEQ_LENS) + 4 * next_s)
    kv, block_stride = kv + head * block_size * row_size, load_i64(batch + 8 * BLOCK_STRIDE)
    values = kv_heads * block_size * row_size  # from a key to its value
    end = first_position + count  # keys that any row sees
    chunk = 0 if window == 0 else max(0, first_position - window + 1) // CHUNK * CHUNK  # where a row stands in it is fixed
    block, offset = chunk // block_size, chunk % block_size
    while chunk < end:
        width = (min(CHUNK, end - chunk) + LANES - 1) // LANES  # vectors of keys
        if coded:
            gather_scales(table, block, offset, min(CHUNK, end - chunk), block_size, scales, scales_stride, key_scales, bias)
            of_values = scales + 4 * kv_heads * block_size
            gather_scales(table, block, offset, min(CHUNK, end - chunk), block_size, of_values, scales_stride, value_scales, bias)
        at = kv + load_i32(table + 4 * block) * block_stride + offset * row_size
        for j in range(width * LANES):
            if chunk + j < end:
                store_i64(key_rows + 8 * j, at)
                store_i64(value_rows + 8 * j, at + values)
                for line in range(0, row_size, 64):
                    prefetch(at + line)
                    prefetch(at + values + line)
                at += row_size
                offset += 1
                if offset == block_size:
                    offset = 0
                    block += 1
                    if chunk + j + 1 < end:
                        at = kv + load_i32(table + 4 * block) * block_stride
            else:  # what another sequence left there may be NaN
                store_i64(key_rows + 8 * j, zeros)
                store_i64(value_rows + 8 * j, zeros)
        for v in range(width):
            transpose_rows(kind, key_rows + 8 * v * LANES, keys + 4 * v * LANES, vectors, 4 * CHUNK)
            position = chunk + v * LANES
            if position < next_end:
                later = next_kv + load_i32(next_table + 4 * (position // block_size)) * block_stride
                later += position % block_size * row_size
                for line in range(0, LANES * row_size, 64):
                    prefetch(later + line)
                    prefetch(later + values + line)
        for r in range(0, padded, ROWS):
            if width == WIDE:
                scores_wide(q + r * dim * 4, dim, keys, weights + r * 4 * CHUNK)
            else:
                for v in range(width):
                    scores_narrow(q + r * dim * 4, dim, keys + 4 * v * LANES, weights + (r * CHUNK + v * LANES) * 4)
        if coded:
            for r in range(padded):
                multiply_by(weights + r * 4 * CHUNK, key_scales, width)
        for r in range(rows):
            p = first_position + r // share
            low = 0 if window == 0 else p - window + 1 - chunk
            soften(weights + r * 4 * CHUNK, states + 16 * r, width, low, p + 1 - chunk)
        for r in range(rows, padded):
            soften(weights + r * 4 * CHUNK, states + 16 * r, width, 0, 0)
        if coded:  # a value's scale goes into its weight
            for r in range(padded):
                multiply_by(weights + r * 4 * CHUNK, value_scales, width)
        some = min(width * LANES, end - chunk)
        for r in range(0, padded, ROWS):
            part, state, sum_rows = weights + r * 4 * CHUNK, states + 16 * r, sums + r * dim * 4
            v = 0
            while v + WIDE <= vectors:
                add_wide(kind, part, state, value_rows, some, sum_rows, dim * 4, v * LANES)
                v += WIDE
            while v < vectors:
                add_narrow(kind, part, state, value_rows, some, sum_rows, dim * 4, v * LANES)
                v += 1
        chunk += CHUNK

    target = load_i64(batch + 8 * OUT) + (first_token * heads + head * share) * dim * 4
    for r in range(rows):
        at = target + ((r // share) * heads + r % share) * dim * 4
        scaled_copy(sums + r * dim * 4, at, types.float32(1.0) / load_f32(states + 16 * r + 4), vectors)
