"""Causal attention over the paged KV cache, which is read in place, block by block.

A task is some tokens of one sequence and one key head; its rows are the query heads of these tokens
that share the key head. For each CHUNK of keys it computes the scores of all rows, updates the
online softmax and adds the values. Each SEGMENT of keys has its own accumulators, which are then
merged with those before. A row does not depend on other rows or sequences, and the order of its
sums depends on positions alone. If there are few tasks, each segment of a token is a task, and the
task that finishes last merges them in the same order.
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
    field,
    float_field,
    i32,
    i64,
    inner,
    intrinsic,
    load_f32,
    load_i32,
    prefetch,
    store_f32,
    store_i64,
)

INT = types.int64
ROW_TILE = 4  # rows that are computed together; scratch memory is padded to multiples of it
TASK_ROWS = 48  # the approximate number of rows of a task, which share a transposed chunk of keys
WIDE_VECTORS = 4  # vectors of keys or dimensions that products keep in registers for each row
CHUNK = WIDE_VECTORS * LANES  # keys between two updates of the softmax
SEGMENT = 256  # keys that have their own accumulators

# The record of a batch, which attention_record() fills.
(
    QUERY,
    OUTPUT,
    QUERY_STRIDE,
    KV_CACHE,
    BLOCK_STRIDE,
    NUM_HEADS,
    NUM_KV_HEADS,
    BLOCK_SIZE,
    HEAD_DIM,
) = range(9)
(
    NUM_SEQUENCES,
    QUERY_START,
    SEQ_LENS,
    TABLE_ROWS,
    BLOCK_TABLE,
    TABLE_WIDTH,
    STORAGE,
    SCALE,
    ZEROS,
    SCRATCH,
    SCRATCH_SIZE,
) = range(9, 20)
# For codes: the address of the scales of block 0, and the bytes from block to block.
SCALES, SCALES_STRIDE = range(20, 22)
# For sequences whose attention mass is measured: the index of each sequence among them or -1 (int32
# [sequences]; 0 if there are none), the mass of each block (float32 [watched, key heads, blocks]),
# and scores [watched, heads, keys].
WATCHED, MASS, MASS_BLOCKS, SCORES, SCORES_KEYS = range(22, 27)
# If each sequence has one token: the number of segments (0 means that it is not split), the results
# of segments, and counters of finished segments (int64 [sequences, key heads], 0 between phases).
NUM_SEGMENTS, PARTS, PARTS_DONE, NUM_FIELDS = range(27, 31)


def transpose(storage: int) -> Any:
    size = SIZES[storage]

    @intrinsic(VOID, POINTER, POINTER, INT, INT)
    def run(
        emitter: Emitter, pointers: Value, output: Value, vectors: Value, stride: Value
    ) -> None:
        """Transpose rows at pointers [LANES], of vectors * LANES numbers each.

        The rows of output [vectors * LANES, LANES] are `stride` bytes apart.
        """
        row_pointers = [emitter.load(pointers + 8 * lane, i64) for lane in range(LANES)]
        with emitter.loop(vectors) as dimension:
            block = [
                emitter.load_floats(row_vector + dimension * (size * LANES), storage)
                for row_vector in row_pointers
            ]
            bit = 1
            # Each round exchanges one bit of the row number with the same bit of the lane number.
            while bit < LANES:
                for row in range(LANES):
                    if not row & bit:
                        low_row = block[row]
                        high_row = block[row | bit]
                        block[row] = emitter.shuffle(
                            low_row,
                            high_row,
                            [
                                lane if not lane & bit else LANES + (lane ^ bit)
                                for lane in range(LANES)
                            ],
                        )
                        block[row | bit] = emitter.shuffle(
                            low_row,
                            high_row,
                            [
                                lane | bit if not lane & bit else LANES + lane
                                for lane in range(LANES)
                            ],
                        )
                bit *= 2
            first_output = output + dimension * LANES * stride
            for lane, row_vector in enumerate(block):
                emitter.store(row_vector, first_output + stride * lane)

    return run


transpose_f32, transpose_f16, transpose_i8, transpose_f8 = (
    transpose(kind) for kind in (F32, F16, I8, F8)
)


@inner
def transpose_rows(storage: int, pointers: int, output: int, vectors: int, stride: int) -> None:
    if storage == F32:
        transpose_f32(pointers, output, vectors, stride)
    elif storage == F16:
        transpose_f16(pointers, output, vectors, stride)
    elif storage == I8:
        transpose_i8(pointers, output, vectors, stride)
    else:
        transpose_f8(pointers, output, vectors, stride)


def add_scores(vectors: int) -> Any:
    @intrinsic(VOID, POINTER, INT, POINTER, POINTER)
    def run(emitter: Emitter, queries: Value, head_dim: Value, keys: Value, output: Value) -> None:
        """queries [ROW_TILE, head_dim] times keys [head_dim, CHUNK] -> output [ROW_TILE, CHUNK]

        Only `vectors` vectors of the output are computed.
        """
        sums = [
            [emitter.variable(emitter.constant(FLOATS, 0.0)) for _ in range(vectors)]
            for _ in range(ROW_TILE)
        ]
        with emitter.loop(head_dim) as dimension:
            key_vectors = [
                emitter.load(keys + dimension * (4 * CHUNK) + 4 * LANES * vector, FLOATS)
                for vector in range(vectors)
            ]
            for row in range(ROW_TILE):
                factor = emitter.splat(
                    emitter.load(queries + head_dim * (4 * row) + dimension * 4, f32)
                )
                for vector in range(vectors):
                    sums[row][vector].set(
                        emitter.fma(factor, key_vectors[vector], sums[row][vector].get())
                    )
        for row in range(ROW_TILE):
            for vector in range(vectors):
                emitter.store(
                    sums[row][vector].get(), output + row * 4 * CHUNK + 4 * LANES * vector
                )

    return run


scores_wide = add_scores(WIDE_VECTORS)
scores_narrow = add_scores(1)


@intrinsic(VOID, POINTER, POINTER, INT, INT, INT)
def online_softmax(
    emitter: Emitter, scores: Value, state: Value, vectors: Value, first_key: Value, end_key: Value
) -> None:
    """Replace scores [vectors * LANES] by probabilities, which are 0 outside first_key..end_key.

    The state holds the running maximum, the running sum, and the factor for earlier sums.
    """
    key_bounds = [
        emitter.splat(Value(emitter, emitter.builder.trunc(bound.llvm, i32)))
        for bound in (first_key, end_key)
    ]

    def load_masked(vector: Value) -> tuple[Value, Value]:
        lanes = emitter.lane_numbers() + emitter.splat(
            Value(emitter, emitter.builder.trunc((vector * LANES).llvm, i32))
        )
        return lanes.compare(">=", key_bounds[0]) & lanes.compare("<", key_bounds[1]), emitter.load(
            scores + vector * (4 * LANES), FLOATS
        )

    previous_max = emitter.load(state, f32)
    largest = emitter.variable(emitter.constant(FLOATS, -1e30))
    with emitter.loop(vectors) as vector:
        in_range, values = load_masked(vector)
        largest.set(
            emitter.maximum(
                largest.get(), emitter.select(in_range, values, emitter.constant(FLOATS, -1e30))
            )
        )
    new_max = emitter.maximum(previous_max, emitter.largest(largest.get()))
    total = emitter.variable(emitter.constant(FLOATS, 0.0))
    with emitter.loop(vectors) as vector:
        in_range, values = load_masked(vector)
        weights = emitter.select(
            in_range, emitter.exp(values - emitter.splat(new_max)), emitter.constant(FLOATS, 0.0)
        )
        total.set(total.get() + weights)
        emitter.store(weights, scores + vector * (4 * LANES))
    factor = Value(
        emitter,
        emitter.builder.extract_element(
            emitter.exp(emitter.splat(previous_max - new_max)).llvm, i32(0)
        ),
    )
    emitter.store(new_max, state)
    emitter.store(
        emitter.fma(emitter.load(state + 4, f32), factor, emitter.total(total.get())), state + 4
    )
    emitter.store(factor, state + 8)


@intrinsic(VOID, POINTER, POINTER, INT)
def multiply_by(emitter: Emitter, values: Value, factors: Value, vectors: Value) -> None:
    with emitter.loop(vectors) as vector:
        address = values + vector * (4 * LANES)
        emitter.store(
            emitter.load(address, FLOATS) * emitter.load(factors + vector * (4 * LANES), FLOATS),
            address,
        )


def add_values(vectors: int, storage: int) -> Any:
    item_size = SIZES[storage]

    @intrinsic(VOID, POINTER, POINTER, POINTER, INT, POINTER, INT, INT)
    def run(
        emitter: Emitter,
        probabilities: Value,
        state: Value,
        pointers: Value,
        keys: Value,
        output: Value,
        stride: Value,
        offset: Value,
    ) -> None:
        """output [ROW_TILE, ...] = output * factor + probabilities [ROW_TILE, keys] times values

        The values are at pointers [keys]. Only `vectors` vectors from an offset on are computed.
        """
        sums = []
        output = output + offset * 4
        for row in range(ROW_TILE):
            factor = emitter.splat(emitter.load(state + 16 * row + 8, f32))
            addresses = [output + stride * row + 4 * LANES * vector for vector in range(vectors)]
            sums.append(
                [emitter.variable(emitter.load(address, FLOATS) * factor) for address in addresses]
            )
        with emitter.loop(keys) as key_index:
            value_row = emitter.load(pointers + key_index * 8, i64) + offset * item_size
            value_vectors = [
                emitter.load_floats(value_row + item_size * LANES * vector, storage)
                for vector in range(vectors)
            ]
            for row in range(ROW_TILE):
                probability = emitter.splat(
                    emitter.load(probabilities + 4 * CHUNK * row + key_index * 4, f32)
                )
                for vector in range(vectors):
                    sums[row][vector].set(
                        emitter.fma(probability, value_vectors[vector], sums[row][vector].get())
                    )
        for row in range(ROW_TILE):
            for vector in range(vectors):
                emitter.store(sums[row][vector].get(), output + stride * row + 4 * LANES * vector)

    return run


add_wide_f32, add_wide_f16, add_wide_i8, add_wide_f8 = (
    add_values(WIDE_VECTORS, kind) for kind in (F32, F16, I8, F8)
)
add_narrow_f32, add_narrow_f16, add_narrow_i8, add_narrow_f8 = (
    add_values(1, kind) for kind in (F32, F16, I8, F8)
)


@inner
def add_wide(
    storage: int,
    probabilities: int,
    state: int,
    pointers: int,
    keys: int,
    output: int,
    stride: int,
    offset: int,
) -> None:
    if storage == F32:
        add_wide_f32(probabilities, state, pointers, keys, output, stride, offset)
    elif storage == F16:
        add_wide_f16(probabilities, state, pointers, keys, output, stride, offset)
    elif storage == I8:
        add_wide_i8(probabilities, state, pointers, keys, output, stride, offset)
    else:
        add_wide_f8(probabilities, state, pointers, keys, output, stride, offset)


@inner
def add_narrow(
    storage: int,
    probabilities: int,
    state: int,
    pointers: int,
    keys: int,
    output: int,
    stride: int,
    offset: int,
) -> None:
    if storage == F32:
        add_narrow_f32(probabilities, state, pointers, keys, output, stride, offset)
    elif storage == F16:
        add_narrow_f16(probabilities, state, pointers, keys, output, stride, offset)
    elif storage == I8:
        add_narrow_i8(probabilities, state, pointers, keys, output, stride, offset)
    else:
        add_narrow_f8(probabilities, state, pointers, keys, output, stride, offset)


@intrinsic(VOID, POINTER, POINTER, types.float32, INT)
def scaled_copy(
    emitter: Emitter, source: Value, target: Value, factor: Value, vectors: Value
) -> None:
    with emitter.loop(vectors) as index:
        emitter.store(
            emitter.load(source + index * (4 * LANES), FLOATS) * emitter.splat(factor),
            target + index * (4 * LANES),
        )


@inner
def gather_scales(
    block_table: int,
    block: int,
    offset: int,
    count: int,
    block_size: int,
    scales: int,
    stride: int,
    output: int,
    factor: float,
) -> None:
    """Copy the scales of `count` positions from a block and offset on, times a factor.

    The output is padded with zeros to a whole vector.
    """
    position = 0
    while position < count:
        address = scales + load_i32(block_table + 4 * block) * stride + 4 * offset
        block_end = min(count, position + block_size - offset)
        while position < block_end:
            store_f32(output + 4 * position, load_f32(address) * factor)
            address += 4
            position += 1
        block += 1
        offset = 0
    while position % LANES != 0:
        store_f32(output + 4 * position, 0.0)
        position += 1


@intrinsic(VOID, POINTER, POINTER, INT, types.float32)
def normalize_scores(
    emitter: Emitter, scores: Value, state: Value, vectors: Value, factor: Value
) -> None:
    """Replace scores [vectors * LANES] by probabilities times a factor, with the final state."""
    row_max = emitter.splat(emitter.load(state, f32))
    factor = emitter.splat(factor / emitter.load(state + 4, f32))
    with emitter.loop(vectors) as vector:
        address = scores + vector * (4 * LANES)
        emitter.store(emitter.exp(emitter.load(address, FLOATS) - row_max) * factor, address)


@inner
def add_mass(
    scores: int,
    stride: int,
    num_rows: int,
    row_states: int,
    first_key: int,
    end_key: int,
    block_size: int,
    factor: float,
    output: int,
) -> None:
    """Add the attention mass of each block to output [blocks].

    scores [rows, ...] are those of one token's heads for the keys first_key..end_key.
    """
    first_aligned = first_key // LANES * LANES
    for row in range(num_rows):
        row_scores = scores + row * stride
        key = first_key
        normalize_scores(
            row_scores + 4 * first_aligned,
            row_states + 16 * row,
            (end_key - first_aligned + LANES - 1) // LANES,
            factor,
        )
        while key < end_key:
            address = output + 4 * (key // block_size)
            block_end = min(end_key, (key // block_size + 1) * block_size)
            total = types.float32(0.0)
            while key < block_end:
                total += load_f32(row_scores + 4 * key)
                key += 1
            store_f32(address, load_f32(address) + total)


@intrinsic(VOID, POINTER, POINTER, POINTER, POINTER, INT)
def merge_softmax(
    emitter: Emitter, state: Value, sums: Value, next_state: Value, next_sums: Value, vectors: Value
) -> None:
    """Merge the state and sums of later keys into those of a row."""
    maxima = emitter.load(state, f32), emitter.load(next_state, f32)
    new_max = emitter.maximum(*maxima)
    factor, next_factor = (emitter.exp(emitter.splat(maximum - new_max)) for maximum in maxima)
    scalar_factors = [
        Value(emitter, emitter.builder.extract_element(vector_factor.llvm, i32(0)))
        for vector_factor in (factor, next_factor)
    ]
    emitter.store(new_max, state)
    emitter.store(
        emitter.fma(
            emitter.load(state + 4, f32),
            scalar_factors[0],
            emitter.load(next_state + 4, f32) * scalar_factors[1],
        ),
        state + 4,
    )
    with emitter.loop(vectors) as vector:
        address = sums + vector * (4 * LANES)
        emitter.store(
            emitter.fma(
                emitter.load(address, FLOATS),
                factor,
                emitter.load(next_sums + vector * (4 * LANES), FLOATS) * next_factor,
            ),
            address,
        )


@inner
def reset_accumulators(states: int, sums: int, num_rows: int, head_dim: int, zeros: int) -> None:
    for row in range(num_rows):
        scaled_copy(zeros, sums + row * head_dim * 4, types.float32(1.0), head_dim // LANES)
        store_f32(states + 16 * row, -1e30)
        store_f32(states + 16 * row + 4, 0.0)


@inner
def segment_bytes(group_size: int, head_dim: int) -> int:
    """Return the size of a segment's result: states, then sums."""
    return 4 * group_size * (4 + head_dim)


@inner
def task_tokens(num_heads: int, num_kv_heads: int) -> int:
    return max(1, TASK_ROWS * num_kv_heads // num_heads)


@inner
def scratch_bytes(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the number of bytes of scratch memory that one thread needs."""
    rows = max(1, TASK_ROWS * num_kv_heads // num_heads) * (num_heads // num_kv_heads) + ROW_TILE
    return (
        4 * (3 * rows * head_dim + head_dim * CHUNK + rows * CHUNK + 8 * rows)
        + 8 * 2 * CHUNK
        + 4 * 2 * CHUNK
    )


@inner
def count_tasks(batch: int) -> int:
    query_start = field(batch, QUERY_START)
    tokens_per_task = task_tokens(field(batch, NUM_HEADS), field(batch, NUM_KV_HEADS))
    if field(batch, NUM_SEGMENTS) != 0:
        return field(batch, NUM_SEQUENCES) * field(batch, NUM_KV_HEADS) * field(batch, NUM_SEGMENTS)
    num_tasks = 0
    for sequence in range(field(batch, NUM_SEQUENCES)):
        num_tasks += (
            load_i32(query_start + 4 * sequence + 4)
            - load_i32(query_start + 4 * sequence)
            + tokens_per_task
            - 1
        ) // tokens_per_task
    return num_tasks * field(batch, NUM_KV_HEADS)


@inner
def run_task(batch: int, task: int, thread: int, kv: int, scales: int, window: int) -> None:
    num_heads = field(batch, NUM_HEADS)
    num_kv_heads = field(batch, NUM_KV_HEADS)
    head_dim = field(batch, HEAD_DIM)
    group_size = num_heads // num_kv_heads
    tokens_per_task = task_tokens(num_heads, num_kv_heads)
    block_size = field(batch, BLOCK_SIZE)
    query_start = field(batch, QUERY_START)
    num_segments = field(batch, NUM_SEGMENTS)
    segment = 0
    if num_segments != 0:
        segment = task % num_segments
        task //= num_segments
    piece = task // num_kv_heads
    head = task % num_kv_heads
    sequence = 0
    while True:  # find the sequence and the piece of it
        num_tokens = load_i32(query_start + 4 * sequence + 4) - load_i32(query_start + 4 * sequence)
        pieces = (num_tokens + tokens_per_task - 1) // tokens_per_task
        if piece < pieces:
            break
        piece -= pieces
        sequence += 1
    sequence_length = load_i32(field(batch, SEQ_LENS) + 4 * sequence)
    first_task_token = piece * tokens_per_task
    task_tokens_count = min(tokens_per_task, num_tokens - first_task_token)
    first_token = load_i32(query_start + 4 * sequence) + first_task_token
    first_position = sequence_length - num_tokens + first_task_token
    num_rows = task_tokens_count * group_size
    padded_rows = (num_rows + ROW_TILE - 1) // ROW_TILE * ROW_TILE

    max_rows = tokens_per_task * group_size + ROW_TILE
    queries = field(batch, SCRATCH) + thread * field(batch, SCRATCH_SIZE)
    sums = queries + 4 * max_rows * head_dim
    keys = sums + 4 * max_rows * head_dim
    probabilities = keys + 4 * head_dim * CHUNK
    states = probabilities + 4 * max_rows * CHUNK
    all_sums = states + 16 * max_rows
    all_states = all_sums + 4 * max_rows * head_dim
    key_rows = all_states + 16 * max_rows
    value_rows = key_rows + 8 * CHUNK
    key_scales = value_rows + 8 * CHUNK
    value_scales = key_scales + 4 * CHUNK
    watched = field(batch, WATCHED)
    scores_stride = 4 * field(batch, SCORES_KEYS)
    watched_index = load_i32(watched + 4 * sequence) if watched != 0 else -1
    scores = field(batch, SCORES) + (watched_index * num_heads + head * group_size) * scores_stride

    stride = field(batch, QUERY_STRIDE)
    head_vectors = head_dim // LANES
    scale = float_field(batch, SCALE)
    source = field(batch, QUERY) + first_token * stride + head * group_size * head_dim * 4
    zeros = field(batch, ZEROS)
    for row in range(padded_rows):
        if row < num_rows:
            scaled_copy(
                source + (row // group_size) * stride + (row % group_size) * head_dim * 4,
                queries + row * head_dim * 4,
                scale,
                head_vectors,
            )
        else:
            scaled_copy(zeros, queries + row * head_dim * 4, scale, head_vectors)
    reset_accumulators(states, sums, padded_rows, head_dim, zeros)
    reset_accumulators(all_states, all_sums, num_rows, head_dim, zeros)

    block_table = field(batch, BLOCK_TABLE)
    block_table += 4 * load_i32(field(batch, TABLE_ROWS) + 4 * sequence) * field(batch, TABLE_WIDTH)
    storage = field(batch, STORAGE)
    row_size = head_dim * SIZES[storage]
    is_coded = storage in (I8, F8)
    code_factor = types.float32(
        256.0 if storage == F8 else 1.0
    )  # load_floats() returns float8 times 2^-8
    scales = scales + 4 * head * block_size
    scales_stride = field(batch, SCALES_STRIDE)
    kv = kv + head * block_size * row_size
    block_stride = field(batch, BLOCK_STRIDE)
    value_offset = num_kv_heads * block_size * row_size  # the distance from a key to its value
    end_key = first_position + task_tokens_count  # the keys that the last row sees
    # Chunks start at multiples of CHUNK, so that the order of a row's sums is fixed.
    chunk = 0 if window == 0 else max(0, first_position - window + 1) // CHUNK * CHUNK
    segment_end = end_key
    if num_segments != 0:
        chunk = max(chunk, segment * SEGMENT)
        segment_end = min(end_key, (segment + 1) * SEGMENT)
    block = chunk // block_size
    offset = chunk % block_size
    while chunk < segment_end:
        key_vectors = (min(CHUNK, end_key - chunk) + LANES - 1) // LANES
        if is_coded:
            gather_scales(
                block_table,
                block,
                offset,
                min(CHUNK, end_key - chunk),
                block_size,
                scales,
                scales_stride,
                key_scales,
                code_factor,
            )
            of_values = scales + 4 * num_kv_heads * block_size
            gather_scales(
                block_table,
                block,
                offset,
                min(CHUNK, end_key - chunk),
                block_size,
                of_values,
                scales_stride,
                value_scales,
                code_factor,
            )
        address = kv + load_i32(block_table + 4 * block) * block_stride + offset * row_size
        for key_index in range(key_vectors * LANES):
            if chunk + key_index < end_key:
                store_i64(key_rows + 8 * key_index, address)
                store_i64(value_rows + 8 * key_index, address + value_offset)
                for line_offset in range(0, row_size, 64):
                    prefetch(address + line_offset)
                    prefetch(address + value_offset + line_offset)
                address += row_size
                offset += 1
                if offset == block_size:
                    offset = 0
                    block += 1
                    if chunk + key_index + 1 < end_key:
                        address = kv + load_i32(block_table + 4 * block) * block_stride
            else:  # another sequence may have left NaN there
                store_i64(key_rows + 8 * key_index, zeros)
                store_i64(value_rows + 8 * key_index, zeros)
        for vector in range(key_vectors):
            transpose_rows(
                storage,
                key_rows + 8 * vector * LANES,
                keys + 4 * vector * LANES,
                head_vectors,
                4 * CHUNK,
            )
        for row in range(0, padded_rows, ROW_TILE):
            if key_vectors == WIDE_VECTORS:
                scores_wide(
                    queries + row * head_dim * 4, head_dim, keys, probabilities + row * 4 * CHUNK
                )
            else:
                for vector in range(key_vectors):
                    scores_narrow(
                        queries + row * head_dim * 4,
                        head_dim,
                        keys + 4 * vector * LANES,
                        probabilities + (row * CHUNK + vector * LANES) * 4,
                    )
        if is_coded:
            for row in range(padded_rows):
                multiply_by(probabilities + row * 4 * CHUNK, key_scales, key_vectors)
        if watched_index >= 0:
            for row in range(num_rows):
                scaled_copy(
                    probabilities + row * 4 * CHUNK,
                    scores + row * scores_stride + 4 * chunk,
                    types.float32(1.0),
                    key_vectors,
                )
        for row in range(num_rows):
            position = first_position + row // group_size
            first_key = 0 if window == 0 else position - window + 1 - chunk
            online_softmax(
                probabilities + row * 4 * CHUNK,
                states + 16 * row,
                key_vectors,
                first_key,
                position + 1 - chunk,
            )
        for row in range(num_rows, padded_rows):
            online_softmax(probabilities + row * 4 * CHUNK, states + 16 * row, key_vectors, 0, 0)
        if is_coded:  # the scale of a value goes into its probability
            for row in range(padded_rows):
                multiply_by(probabilities + row * 4 * CHUNK, value_scales, key_vectors)
        num_keys = min(key_vectors * LANES, end_key - chunk)
        for row in range(0, padded_rows, ROW_TILE):
            part_address = probabilities + row * 4 * CHUNK
            state = states + 16 * row
            sum_rows = sums + row * head_dim * 4
            vector = 0
            while vector + WIDE_VECTORS <= head_vectors:
                add_wide(
                    storage,
                    part_address,
                    state,
                    value_rows,
                    num_keys,
                    sum_rows,
                    head_dim * 4,
                    vector * LANES,
                )
                vector += WIDE_VECTORS
            while vector < head_vectors:
                add_narrow(
                    storage,
                    part_address,
                    state,
                    value_rows,
                    num_keys,
                    sum_rows,
                    head_dim * 4,
                    vector * LANES,
                )
                vector += 1
        chunk += CHUNK
        if num_segments == 0 and (chunk % SEGMENT == 0 or chunk >= end_key):
            for row in range(num_rows):
                merge_softmax(
                    all_states + 16 * row,
                    all_sums + row * head_dim * 4,
                    states + 16 * row,
                    sums + row * head_dim * 4,
                    head_vectors,
                )
            reset_accumulators(states, sums, padded_rows, head_dim, zeros)

    if num_segments != 0:
        size = segment_bytes(group_size, head_dim)
        token = sequence * num_kv_heads + head
        parts = field(batch, PARTS) + token * num_segments * size
        for row in range(num_rows):
            segment_row = parts + segment * size + 16 * row
            for index in range(2):
                store_f32(segment_row + 4 * index, load_f32(states + 16 * row + 4 * index))
            scaled_copy(
                sums + row * head_dim * 4,
                parts + segment * size + 16 * group_size + row * head_dim * 4,
                types.float32(1.0),
                head_vectors,
            )
        done = field(batch, PARTS_DONE) + 8 * token
        if atomic_add(done, 1) != num_segments - 1:
            return
        atomic_store(done, 0)
        for index in range(num_segments):
            part_address = parts + index * size
            for row in range(num_rows):
                merge_softmax(
                    all_states + 16 * row,
                    all_sums + row * head_dim * 4,
                    part_address + 16 * row,
                    part_address + 16 * group_size + row * head_dim * 4,
                    head_vectors,
                )

    target = field(batch, OUTPUT) + (first_token * num_heads + head * group_size) * head_dim * 4
    for row in range(num_rows):
        address = target + ((row // group_size) * num_heads + row % group_size) * head_dim * 4
        scaled_copy(
            all_sums + row * head_dim * 4,
            address,
            types.float32(1.0) / load_f32(all_states + 16 * row + 4),
            head_vectors,
        )
    if watched_index >= 0:
        mass_blocks = field(batch, MASS_BLOCKS)
        mass_address = field(batch, MASS) + 4 * (watched_index * num_kv_heads + head) * mass_blocks
        first_key = 0 if window == 0 else max(0, end_key - window)
        add_mass(
            scores,
            scores_stride,
            num_rows,
            all_states,
            first_key,
            end_key,
            block_size,
            types.float32(1.0) / types.float32(num_heads),
            mass_address,
        )
