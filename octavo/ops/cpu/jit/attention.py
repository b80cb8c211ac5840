"""Causal attention over the paged cache, in place: keys and values are read where they lie, block by block.

One task is some tokens of one sequence and one key head: the rows are those tokens' query heads that share it. LANES keys at
a time: scores for all rows, the softmax so far corrected, values added. Nothing of another row or sequence enters, and the
order of the sums depends on positions alone.
"""

from __future__ import annotations

from numba import types

from octavo.ops.cpu.jit.emit import (
    FLOATS,
    LANES,
    POINTER,
    VOID,
    Emitter,
    Value,
    f32,
    i32,
    i64,
    intrinsic,
    kernel,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
)

INT = types.int64
ROWS = 4  # computed together; scratch is padded to multiples
TASK_ROWS = 48  # rows of a task, about: what a transposed chunk of keys is used for
WIDE = 4  # vectors of a head's dimension that the value product keeps in registers

# The batch to the kernel: a record of int64.
QUERY, OUT, QUERY_STRIDE, KV, BLOCK_STRIDE, HEADS, KV_HEADS, BLOCK_SIZE, DIM = range(9)
SEQUENCES, QUERY_START, SEQ_LENS, ROW, TABLE, TABLE_WIDTH, SCALE, ZEROS, SCRATCH, SCRATCH_SIZE, FIELDS = range(9, 20)


@intrinsic(VOID, POINTER, POINTER, INT)
def transpose_keys(e: Emitter, pointers: Value, out: Value, vectors: Value) -> None:
    """Rows at pointers [LANES] -> out [vectors * LANES, LANES]."""
    rows = [e.load(pointers + 8 * j, i64) for j in range(LANES)]
    with e.loop(vectors) as d:
        block = [e.load(row + d * (4 * LANES), FLOATS) for row in rows]
        bit = 1
        while bit < LANES:  # exchange one bit of the row's number with the same bit of the lane's
            for i in range(LANES):
                if not i & bit:
                    a, b = block[i], block[i | bit]
                    block[i] = e.shuffle(a, b, [j if not j & bit else LANES + (j ^ bit) for j in range(LANES)])
                    block[i | bit] = e.shuffle(a, b, [j | bit if not j & bit else LANES + j for j in range(LANES)])
            bit *= 2
        for j, row in enumerate(block):
            e.store(row, out + d * (4 * LANES * LANES) + j * 4 * LANES)


@intrinsic(VOID, POINTER, INT, POINTER, POINTER)
def scores(e: Emitter, q: Value, dim: Value, keys: Value, out: Value) -> None:
    """q [ROWS, dim] times keys [dim, LANES] -> out [ROWS, LANES]"""
    sums = [e.variable(e.constant(FLOATS, 0.0)) for _ in range(ROWS)]
    with e.loop(dim) as d:
        key = e.load(keys + d * (4 * LANES), FLOATS)
        for r in range(ROWS):
            sums[r].set(e.fma(e.splat(e.load(q + dim * (4 * r) + d * 4, f32)), key, sums[r].get()))
    for r in range(ROWS):
        e.store(sums[r].get(), out + r * 4 * LANES)


@intrinsic(VOID, POINTER, POINTER, INT, INT)
def soften(e: Emitter, row: Value, state: Value, low: Value, high: Value) -> None:
    """Scores [LANES] become weights, zero but in lanes low..high; state: largest so far, sum so far, and what earlier sums
    must be multiplied by."""
    lanes = e.lane_numbers()
    bounds = [e.splat(Value(e, e.b.trunc(x.v, i32))) for x in (low, high)]
    inside = lanes.compare(">=", bounds[0]) & lanes.compare("<", bounds[1])
    found = e.select(inside, e.load(row, FLOATS), e.constant(FLOATS, -1e30))
    before = e.load(state, f32)
    most = e.maximum(before, e.largest(found))
    weights = e.select(inside, e.exp(found - e.splat(most)), e.constant(FLOATS, 0.0))
    factor = Value(e, e.b.extract_element(e.exp(e.splat(before - most)).v, i32(0)))
    e.store(weights, row)
    e.store(most, state)
    e.store(e.fma(e.load(state + 4, f32), factor, e.total(weights)), state + 4)
    e.store(factor, state + 8)


def add_values(vectors: int):  # type: ignore[no-untyped-def]
    @intrinsic(VOID, POINTER, POINTER, POINTER, POINTER, INT, INT)
    def run(e: Emitter, weights: Value, state: Value, pointers: Value, out: Value, stride: Value, offset: Value) -> None:
        """out [ROWS, ...] = out * factor + weights [ROWS, LANES] times the rows at pointers [LANES]: of all these rows the
        `vectors` vectors that begin at a byte offset."""
        sums = []
        out = out + offset
        for r in range(ROWS):
            factor = e.splat(e.load(state + 16 * r + 8, f32))
            at = [out + stride * r + 4 * LANES * v for v in range(vectors)]
            sums.append([e.variable(e.load(a, FLOATS) * factor) for a in at])
        with e.loop(e.constant(i64, LANES)) as j:
            row = e.load(pointers + j * 8, i64) + offset
            value = [e.load(row + 4 * LANES * v, FLOATS) for v in range(vectors)]
            for r in range(ROWS):
                weight = e.splat(e.load(weights + 4 * LANES * r + j * 4, f32))
                for v in range(vectors):
                    sums[r][v].set(e.fma(weight, value[v], sums[r][v].get()))
        for r in range(ROWS):
            for v in range(vectors):
                e.store(sums[r][v].get(), out + stride * r + 4 * LANES * v)

    return run


add_wide, add_narrow = add_values(WIDE), add_values(1)


@intrinsic(VOID, POINTER, POINTER, types.float32, INT)
def scaled_copy(e: Emitter, source: Value, target: Value, factor: Value, vectors: Value) -> None:
    with e.loop(vectors) as i:
        e.store(e.load(source + i * (4 * LANES), FLOATS) * e.splat(factor), target + i * (4 * LANES))


@kernel(INT(INT, INT))
def task_tokens(heads: int, kv_heads: int) -> int:
    return max(1, TASK_ROWS * kv_heads // heads)


@kernel(INT(INT, INT, INT))
def scratch_size(heads: int, kv_heads: int, dim: int) -> int:
    """Bytes that one thread needs."""
    rows = task_tokens(heads, kv_heads) * (heads // kv_heads) + ROWS
    return 4 * (2 * rows * dim + dim * LANES + rows * LANES + 4 * rows) + 8 * 2 * LANES + 64


@kernel(INT(INT))
def count_tasks(batch: int) -> int:
    starts, tokens = load_i64(batch + 8 * QUERY_START), task_tokens(load_i64(batch + 8 * HEADS), load_i64(batch + 8 * KV_HEADS))
    total = 0
    for s in range(load_i64(batch + 8 * SEQUENCES)):
        total += (load_i32(starts + 4 * s + 4) - load_i32(starts + 4 * s) + tokens - 1) // tokens
    return total * load_i64(batch + 8 * KV_HEADS)


@kernel(types.void(INT, INT, INT, INT, INT))
def run_task(batch: int, task: int, thread: int, kv: int, window: int) -> None:
    heads, kv_heads, dim = load_i64(batch + 8 * HEADS), load_i64(batch + 8 * KV_HEADS), load_i64(batch + 8 * DIM)
    share, tokens, block_size = heads // kv_heads, task_tokens(heads, kv_heads), load_i64(batch + 8 * BLOCK_SIZE)
    starts = load_i64(batch + 8 * QUERY_START)
    piece, head, s = task // kv_heads, task % kv_heads, 0
    while True:  # which sequence, and which of its pieces
        num = load_i32(starts + 4 * s + 4) - load_i32(starts + 4 * s)
        pieces = (num + tokens - 1) // tokens
        if piece < pieces:
            break
        piece -= pieces
        s += 1
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
    weights = keys + 4 * dim * LANES
    states = weights + 4 * most * LANES
    key_rows = states + 16 * most
    value_rows = key_rows + 8 * LANES

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

    table = load_i64(batch + 8 * TABLE)
    table += 4 * load_i32(load_i64(batch + 8 * ROW) + 4 * s) * load_i64(batch + 8 * TABLE_WIDTH)
    kv, block_stride = kv + head * block_size * dim * 4, load_i64(batch + 8 * BLOCK_STRIDE)
    values = kv_heads * block_size * dim * 4  # from a key to its value
    end = first_position + count  # keys that any row sees
    chunk = 0 if window == 0 else max(0, first_position - window + 1) // LANES * LANES
    while chunk < end:
        for j in range(LANES):
            p = chunk + j
            if p < end:
                block = load_i32(table + 4 * (p // block_size))
                at = kv + block * block_stride + (p % block_size) * dim * 4
                store_i64(key_rows + 8 * j, at)
                store_i64(value_rows + 8 * j, at + values)
            else:  # what another sequence left there may be NaN
                store_i64(key_rows + 8 * j, zeros)
                store_i64(value_rows + 8 * j, zeros)
        transpose_keys(key_rows, keys, vectors)
        for r in range(0, padded, ROWS):
            scores(q + r * dim * 4, dim, keys, weights + r * 4 * LANES)
        for r in range(rows):
            p = first_position + r // share
            low = 0 if window == 0 else p - window + 1 - chunk
            soften(weights + r * 4 * LANES, states + 16 * r, low, p + 1 - chunk)
        for r in range(rows, padded):
            soften(weights + r * 4 * LANES, states + 16 * r, 0, 0)
        for r in range(0, padded, ROWS):
            v = 0
            while v + WIDE <= vectors:
                add_wide(weights + r * 4 * LANES, states + 16 * r, value_rows, sums + r * dim * 4, dim * 4, v * 4 * LANES)
                v += WIDE
            while v < vectors:
                add_narrow(weights + r * 4 * LANES, states + 16 * r, value_rows, sums + r * dim * 4, dim * 4, v * 4 * LANES)
                v += 1
        chunk += LANES

    target = load_i64(batch + 8 * OUT) + (first_token * heads + head * share) * dim * 4
    for r in range(rows):
        at = target + ((r // share) * heads + r % share) * dim * 4
        scaled_copy(sums + r * dim * 4, at, types.float32(1.0) / load_f32(states + 16 * r + 4), vectors)
