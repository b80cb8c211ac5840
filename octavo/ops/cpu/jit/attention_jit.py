"""Causal attention over the paged cache, in place: keys and values are read where they lie, block by block.

One task is some tokens of one sequence and one key head: the rows are those tokens' query heads that share it. CHUNK keys at
a time: scores for all rows, the softmax so far corrected, values added; every SEGMENT keys begin anew and are then joined with
those before. Nothing of another row or sequence enters, and the order of the sums depends on positions alone: where there are few
tasks, each of a token's segments is one, and the last to be done joins them in the same order.
"""

from __future__ import annotations

from typing import Any

from numba import types

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
    atomic_add,
    atomic_store,
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
SEGMENT = 256  # keys that are summed up by themselves

# The batch to the kernel: a record of int64.
QUERY, OUT, QUERY_STRIDE, KV, BLOCK_STRIDE, HEADS, KV_HEADS, BLOCK_SIZE, DIM = range(9)
(
    SEQUENCES,
    QUERY_START,
    SEQ_LENS,
    ROW,
    TABLE,
    TABLE_WIDTH,
    KIND,
    SCALE,
    ZEROS,
    SCRATCH,
    SCRATCH_SIZE,
) = range(9, 20)
# of codes: where the scales of block 0 are, and bytes from block to block
SCALES, SCALES_STRIDE = range(20, 22)
# Of those whose attention is watched: each sequence's number among them or -1 (int32 [sequences]; 0: nobody's is), what each key
# head's rows give each block (float32 [watched, key heads, blocks]), and scores [watched, heads, keys].
WATCHED, MASS, MASS_BLOCKS, SCORES, SCORES_KEYS = range(22, 27)
# Where each sequence has one token: into how many segments it is split (0: it is not), results of segments, and how many are done
# (int64 [sequences, key heads], zeros between two phases).
SEGMENTS, PARTS, PARTS_DONE, FIELDS = range(27, 31)


def transpose(kind: int) -> Any:
    size = SIZES[kind]

    @intrinsic(VOID, POINTER, POINTER, INT, INT)
    def run(e: Emitter, pointers: Value, out: Value, vectors: Value, stride: Value) -> None:
        """Rows at pointers [LANES], vectors * LANES long -> out [vectors * LANES, LANES], whose rows are `stride` bytes apart."""
        rows = [e.load(pointers + 8 * j, i64) for j in range(LANES)]
        with e.loop(vectors) as d:
            block = [e.load_floats(row + d * (size * LANES), kind) for row in rows]
            bit = 1
            # exchange one bit of the row's number with the same bit of the lane's
            while bit < LANES:
                for i in range(LANES):
                    if not i & bit:
                        a = block[i]
                        b = block[i | bit]
                        block[i] = e.shuffle(
                            a, b, [j if not j & bit else LANES + (j ^ bit) for j in range(LANES)]
                        )
                        block[i | bit] = e.shuffle(
                            a, b, [j | bit if not j & bit else LANES + j for j in range(LANES)]
                        )
                bit *= 2
            first = out + d * LANES * stride
            for j, row in enumerate(block):
                e.store(row, first + stride * j)

    return run


transpose_f32, transpose_f16, transpose_i8, transpose_f8 = (
    transpose(kind) for kind in (F32, F16, I8, F8)
)


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


scores_wide = add_scores(WIDE)
scores_narrow = add_scores(1)


@intrinsic(VOID, POINTER, POINTER, INT, INT, INT)
def soften(e: Emitter, row: Value, state: Value, vectors: Value, low: Value, high: Value) -> None:
    """Scores [vectors * LANES] become weights, zero but in low..high; state: largest so far, sum so far, and what earlier
    sums must be multiplied by."""
    bounds = [e.splat(Value(e, e.b.trunc(x.v, i32))) for x in (low, high)]

    def found(v: Value) -> tuple[Value, Value]:
        lanes = e.lane_numbers() + e.splat(Value(e, e.b.trunc((v * LANES).v, i32)))
        return lanes.compare(">=", bounds[0]) & lanes.compare("<", bounds[1]), e.load(
            row + v * (4 * LANES), FLOATS
        )

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
        e: Emitter,
        weights: Value,
        state: Value,
        pointers: Value,
        keys: Value,
        out: Value,
        stride: Value,
        offset: Value,
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


add_wide_f32, add_wide_f16, add_wide_i8, add_wide_f8 = (
    add_values(WIDE, kind) for kind in (F32, F16, I8, F8)
)
add_narrow_f32, add_narrow_f16, add_narrow_i8, add_narrow_f8 = (
    add_values(1, kind) for kind in (F32, F16, I8, F8)
)


@inner
def add_wide(
    kind: int,
    weights: int,
    state: int,
    pointers: int,
    keys: int,
    out: int,
    stride: int,
    offset: int,
) -> None:
    if kind == F32:
        add_wide_f32(weights, state, pointers, keys, out, stride, offset)
    elif kind == F16:
        add_wide_f16(weights, state, pointers, keys, out, stride, offset)
    elif kind == I8:
        add_wide_i8(weights, state, pointers, keys, out, stride, offset)
    else:
        add_wide_f8(weights, state, pointers, keys, out, stride, offset)


@inner
def add_narrow(
    kind: int,
    weights: int,
    state: int,
    pointers: int,
    keys: int,
    out: int,
    stride: int,
    offset: int,
) -> None:
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
        e.store(
            e.load(source + i * (4 * LANES), FLOATS) * e.splat(factor), target + i * (4 * LANES)
        )


@inner
def gather_scales(
    table: int,
    block: int,
    offset: int,
    count: int,
    block_size: int,
    scales: int,
    stride: int,
    out: int,
    factor: float,
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


@intrinsic(VOID, POINTER, POINTER, INT, types.float32)
def settle(e: Emitter, row: Value, state: Value, vectors: Value, factor: Value) -> None:
    """Scores [vectors * LANES] become weights times a factor, now that the largest score and the sum are known."""
    peak = e.splat(e.load(state, f32))
    factor = e.splat(factor / e.load(state + 4, f32))
    with e.loop(vectors) as v:
        at = row + v * (4 * LANES)
        e.store(e.exp(e.load(at, FLOATS) - peak) * factor, at)


@inner
def add_mass(
    scores: int,
    stride: int,
    rows: int,
    states: int,
    low: int,
    end: int,
    block_size: int,
    factor: float,
    out: int,
) -> None:
    """Scores [rows, ...] of one token's heads, of keys low..end -> each block's part of the attention, added to out [blocks]."""
    first = low // LANES * LANES
    for r in range(rows):
        row = scores + r * stride
        j = low
        settle(row + 4 * first, states + 16 * r, (end - first + LANES - 1) // LANES, factor)
        while j < end:
            at = out + 4 * (j // block_size)
            stop = min(end, (j // block_size + 1) * block_size)
            total = types.float32(0.0)
            while j < stop:
                total += load_f32(row + 4 * j)
                j += 1
            store_f32(at, load_f32(at) + total)


@intrinsic(VOID, POINTER, POINTER, POINTER, POINTER, INT)
def join(
    e: Emitter, state: Value, sums: Value, more_state: Value, more_sums: Value, vectors: Value
) -> None:
    """A row's state and sums, and those of keys that come after them -> of all of them."""
    peaks = e.load(state, f32), e.load(more_state, f32)
    peak = e.maximum(*peaks)
    one, two = (e.exp(e.splat(p - peak)) for p in peaks)
    first = [Value(e, e.b.extract_element(factor.v, i32(0))) for factor in (one, two)]
    e.store(peak, state)
    e.store(
        e.fma(e.load(state + 4, f32), first[0], e.load(more_state + 4, f32) * first[1]), state + 4
    )
    with e.loop(vectors) as v:
        at = sums + v * (4 * LANES)
        e.store(
            e.fma(e.load(at, FLOATS), one, e.load(more_sums + v * (4 * LANES), FLOATS) * two), at
        )


@inner
def clear(states: int, sums: int, rows: int, dim: int, zeros: int) -> None:
    for r in range(rows):
        scaled_copy(zeros, sums + r * dim * 4, types.float32(1.0), dim // LANES)
        store_f32(states + 16 * r, -1e30)
        store_f32(states + 16 * r + 4, 0.0)


@inner
def part_size(share: int, dim: int) -> int:
    """Bytes of a segment's result: states, then sums."""
    return 4 * share * (4 + dim)


@inner
def task_tokens(heads: int, kv_heads: int) -> int:
    return max(1, TASK_ROWS * kv_heads // heads)


@inner
def scratch_size(heads: int, kv_heads: int, dim: int) -> int:
    """Bytes that one thread needs."""
    rows = max(1, TASK_ROWS * kv_heads // heads) * (heads // kv_heads) + ROWS
    return (
        4 * (3 * rows * dim + dim * CHUNK + rows * CHUNK + 8 * rows) + 8 * 2 * CHUNK + 4 * 2 * CHUNK
    )


@inner
def count_tasks(batch: int) -> int:
    starts = load_i64(batch + 8 * QUERY_START)
    tokens = task_tokens(load_i64(batch + 8 * HEADS), load_i64(batch + 8 * KV_HEADS))
    if load_i64(batch + 8 * SEGMENTS) != 0:
        return (
            load_i64(batch + 8 * SEQUENCES)
            * load_i64(batch + 8 * KV_HEADS)
            * load_i64(batch + 8 * SEGMENTS)
        )
    total = 0
    for s in range(load_i64(batch + 8 * SEQUENCES)):
        total += (load_i32(starts + 4 * s + 4) - load_i32(starts + 4 * s) + tokens - 1) // tokens
    return total * load_i64(batch + 8 * KV_HEADS)


@inner
def run_task(batch: int, task: int, thread: int, kv: int, scales: int, window: int) -> None:
    heads = load_i64(batch + 8 * HEADS)
    kv_heads = load_i64(batch + 8 * KV_HEADS)
    dim = load_i64(batch + 8 * DIM)
    share = heads // kv_heads
    tokens = task_tokens(heads, kv_heads)
    block_size = load_i64(batch + 8 * BLOCK_SIZE)
    starts = load_i64(batch + 8 * QUERY_START)
    segments = load_i64(batch + 8 * SEGMENTS)
    segment = 0
    if segments != 0:
        segment = task % segments
        task //= segments
    piece = task // kv_heads
    head = task % kv_heads
    s = 0
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
    first_token = load_i32(starts + 4 * s) + begin
    first_position = length - num + begin
    rows = count * share
    padded = (rows + ROWS - 1) // ROWS * ROWS

    most = tokens * share + ROWS
    q = load_i64(batch + 8 * SCRATCH) + thread * load_i64(batch + 8 * SCRATCH_SIZE)
    sums = q + 4 * most * dim
    keys = sums + 4 * most * dim
    weights = keys + 4 * dim * CHUNK
    states = weights + 4 * most * CHUNK
    all_sums = states + 16 * most
    all_states = all_sums + 4 * most * dim
    key_rows = all_states + 16 * most
    value_rows = key_rows + 8 * CHUNK
    key_scales = value_rows + 8 * CHUNK
    value_scales = key_scales + 4 * CHUNK
    watched = load_i64(batch + 8 * WATCHED)
    scores_stride = 4 * load_i64(batch + 8 * SCORES_KEYS)
    look = load_i32(watched + 4 * s) if watched != 0 else -1
    scores = load_i64(batch + 8 * SCORES) + (look * heads + head * share) * scores_stride

    stride = load_i64(batch + 8 * QUERY_STRIDE)
    vectors = dim // LANES
    scale = load_f32(batch + 8 * SCALE)
    source = load_i64(batch + 8 * QUERY) + first_token * stride + head * share * dim * 4
    zeros = load_i64(batch + 8 * ZEROS)
    for r in range(padded):
        if r < rows:
            scaled_copy(
                source + (r // share) * stride + (r % share) * dim * 4,
                q + r * dim * 4,
                scale,
                vectors,
            )
        else:
            scaled_copy(zeros, q + r * dim * 4, scale, vectors)
    clear(states, sums, padded, dim, zeros)
    clear(all_states, all_sums, rows, dim, zeros)

    table = load_i64(batch + 8 * TABLE)
    table += 4 * load_i32(load_i64(batch + 8 * ROW) + 4 * s) * load_i64(batch + 8 * TABLE_WIDTH)
    kind = load_i64(batch + 8 * KIND)
    row_size = dim * SIZES[kind]
    coded = kind in (I8, F8)
    bias = types.float32(256.0 if kind == F8 else 1.0)  # see load_floats
    scales = scales + 4 * head * block_size
    scales_stride = load_i64(batch + 8 * SCALES_STRIDE)
    kv = kv + head * block_size * row_size
    block_stride = load_i64(batch + 8 * BLOCK_STRIDE)
    values = kv_heads * block_size * row_size  # from a key to its value
    end = first_position + count  # keys that any row sees
    # where a row stands in it is fixed
    chunk = 0 if window == 0 else max(0, first_position - window + 1) // CHUNK * CHUNK
    stop = end
    if segments != 0:
        chunk = max(chunk, segment * SEGMENT)
        stop = min(end, (segment + 1) * SEGMENT)
    block = chunk // block_size
    offset = chunk % block_size
    while chunk < stop:
        width = (min(CHUNK, end - chunk) + LANES - 1) // LANES  # vectors of keys
        if coded:
            gather_scales(
                table,
                block,
                offset,
                min(CHUNK, end - chunk),
                block_size,
                scales,
                scales_stride,
                key_scales,
                bias,
            )
            of_values = scales + 4 * kv_heads * block_size
            gather_scales(
                table,
                block,
                offset,
                min(CHUNK, end - chunk),
                block_size,
                of_values,
                scales_stride,
                value_scales,
                bias,
            )
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
        for r in range(0, padded, ROWS):
            if width == WIDE:
                scores_wide(q + r * dim * 4, dim, keys, weights + r * 4 * CHUNK)
            else:
                for v in range(width):
                    scores_narrow(
                        q + r * dim * 4,
                        dim,
                        keys + 4 * v * LANES,
                        weights + (r * CHUNK + v * LANES) * 4,
                    )
        if coded:
            for r in range(padded):
                multiply_by(weights + r * 4 * CHUNK, key_scales, width)
        if look >= 0:
            for r in range(rows):
                scaled_copy(
                    weights + r * 4 * CHUNK,
                    scores + r * scores_stride + 4 * chunk,
                    types.float32(1.0),
                    width,
                )
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
            part = weights + r * 4 * CHUNK
            state = states + 16 * r
            sum_rows = sums + r * dim * 4
            v = 0
            while v + WIDE <= vectors:
                add_wide(kind, part, state, value_rows, some, sum_rows, dim * 4, v * LANES)
                v += WIDE
            while v < vectors:
                add_narrow(kind, part, state, value_rows, some, sum_rows, dim * 4, v * LANES)
                v += 1
        chunk += CHUNK
        if segments == 0 and (chunk % SEGMENT == 0 or chunk >= end):
            for r in range(rows):
                join(
                    all_states + 16 * r,
                    all_sums + r * dim * 4,
                    states + 16 * r,
                    sums + r * dim * 4,
                    vectors,
                )
            clear(states, sums, padded, dim, zeros)

    if segments != 0:
        size = part_size(share, dim)
        token = s * kv_heads + head
        parts = load_i64(batch + 8 * PARTS) + token * segments * size
        for r in range(rows):
            row = parts + segment * size + 16 * r
            for i in range(2):
                store_f32(row + 4 * i, load_f32(states + 16 * r + 4 * i))
            scaled_copy(
                sums + r * dim * 4,
                parts + segment * size + 16 * share + r * dim * 4,
                types.float32(1.0),
                vectors,
            )
        done = load_i64(batch + 8 * PARTS_DONE) + 8 * token
        if atomic_add(done, 1) != segments - 1:
            return
        atomic_store(done, 0)
        for i in range(segments):
            part = parts + i * size
            for r in range(rows):
                join(
                    all_states + 16 * r,
                    all_sums + r * dim * 4,
                    part + 16 * r,
                    part + 16 * share + r * dim * 4,
                    vectors,
                )

    target = load_i64(batch + 8 * OUT) + (first_token * heads + head * share) * dim * 4
    for r in range(rows):
        at = target + ((r // share) * heads + r % share) * dim * 4
        scaled_copy(
            all_sums + r * dim * 4,
            at,
            types.float32(1.0) / load_f32(all_states + 16 * r + 4),
            vectors,
        )
    if look >= 0:
        blocks = load_i64(batch + 8 * MASS_BLOCKS)
        out = load_i64(batch + 8 * MASS) + 4 * (look * kv_heads + head) * blocks
        low = 0 if window == 0 else max(0, end - window)
        add_mass(
            scores,
            scores_stride,
            rows,
            all_states,
            low,
            end,
            block_size,
            types.float32(1.0) / types.float32(heads),
            out,
        )
