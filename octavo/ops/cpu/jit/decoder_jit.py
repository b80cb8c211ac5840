"""The jobs of the thread pool: a product, attention, an activation, or all layers of a decoder.

No Python runs between the layers. Phases that compute rows split the tokens, products split the
outputs, and attention splits sequences and heads. This module works on addresses and sizes;
cpu_decoder.py fills the records.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.cpu.jit import attention_jit, matmul_jit, thread_barrier
from octavo.ops.cpu.jit.filtered_sampling_jit import sample
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
    field,
    float_field,
    inner,
    intrinsic,
    load_f16,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    prefetch_column,
    store_f32,
    store_i64,
)
from octavo.ops.cpu.jit.matmul_jit import (
    STRIP,
    TILE,
    block_layout,
    block_product,
    padded,
    quantize_strips,
    row_bytes,
)

INT = types.int64
FLOAT = types.float32
NOTHING = types.void

# ---- rows ----------------------------------------------------------------------------------------


@intrinsic(FLOAT, POINTER, INT)
def sum_of_squares(emitter: Emitter, values: Value, vectors: Value) -> Value:
    total = emitter.variable(emitter.constant(FLOATS, 0.0))
    with emitter.loop(vectors) as index:
        vector = emitter.load(values + index * (4 * LANES), FLOATS)
        total.set(emitter.fma(vector, vector, total.get()))
    return emitter.total(total.get())


@intrinsic(VOID, POINTER, FLOAT, POINTER, POINTER, INT)
def scale_by(
    emitter: Emitter, values: Value, factor: Value, weight: Value, output: Value, vectors: Value
) -> None:
    """output = values * factor * weight"""
    with emitter.loop(vectors) as index:
        offset = index * (4 * LANES)
        emitter.store(
            emitter.load(values + offset, FLOATS)
            * emitter.splat(factor)
            * emitter.load(weight + offset, FLOATS),
            output + offset,
        )


@intrinsic(VOID, POINTER, POINTER, INT)
def add_to(emitter: Emitter, values: Value, addend: Value, vectors: Value) -> None:
    with emitter.loop(vectors) as index:
        address = values + index * (4 * LANES)
        emitter.store(
            emitter.load(address, FLOATS) + emitter.load(addend + index * (4 * LANES), FLOATS),
            address,
        )


def rotation(llvm_type: ir.Type) -> Any:
    @intrinsic(VOID, POINTER, POINTER, POINTER, POINTER)
    def run(emitter: Emitter, low: Value, high: Value, cos: Value, sin: Value) -> None:
        """Rotate pairs (low, high), one pair or a vector of pairs, by their angles."""
        first, second, cosine, sine = (
            emitter.load(address, llvm_type) for address in (low, high, cos, sin)
        )
        emitter.store(first * cosine - second * sine, low)
        emitter.store(second * cosine + first * sine, high)

    return run


rotate_pair = rotation(f32)
rotate_vector = rotation(FLOATS)


def rotate_stored(storage: int) -> Any:
    item_size = SIZES[storage]

    @intrinsic(VOID, POINTER, INT, POINTER)
    def run(emitter: Emitter, values: Value, half: Value, angles: Value) -> None:
        """Rotate a stored vector [2 * half] by cosines and sines [2, half]."""
        with emitter.loop(half / LANES) as index:
            low = values + index * (item_size * LANES)
            angle_address = angles + index * (4 * LANES)
            high = low + half * item_size
            first = emitter.load_floats(low, storage)
            second = emitter.load_floats(high, storage)
            cosine = emitter.load(angle_address, FLOATS)
            sine = emitter.load(angle_address + half * 4, FLOATS)
            emitter.store_floats(first * cosine - second * sine, low, storage)
            emitter.store_floats(second * cosine + first * sine, high, storage)

    return run


rotate_f32 = rotate_stored(F32)
rotate_f16 = rotate_stored(F16)


def copy_vectors(storage: int) -> Any:
    @intrinsic(VOID, POINTER, POINTER, INT)
    def run(emitter: Emitter, source: Value, target: Value, vectors: Value) -> None:
        with emitter.loop(vectors) as index:
            emitter.store_floats(
                emitter.load(source + index * (4 * LANES), FLOATS),
                target + index * (SIZES[storage] * LANES),
                storage,
            )

    return run


copy_f32 = copy_vectors(F32)
copy_f16 = copy_vectors(F16)


@intrinsic(FLOAT, POINTER, INT)
def largest_magnitude(emitter: Emitter, values: Value, vectors: Value) -> Value:
    """Return the largest magnitude, or NaN if a value is not finite."""
    largest = emitter.variable(emitter.constant(FLOATS, 0.0))
    not_finite = emitter.variable(emitter.constant(FLOATS, 0.0))
    with emitter.loop(vectors) as index:
        vector = emitter.load(values + index * (4 * LANES), FLOATS)
        largest.set(emitter.maximum(largest.get(), emitter.absolute(vector)))
        not_finite.set(not_finite.get() + vector * 0.0)
    return emitter.largest(largest.get()) + emitter.total(not_finite.get())


def encode_vectors(storage: int, largest: float) -> Any:
    @intrinsic(VOID, POINTER, POINTER, INT, FLOAT)
    def run(emitter: Emitter, source: Value, target: Value, vectors: Value, inverse: Value) -> None:
        """Store the codes of source * inverse."""
        with emitter.loop(vectors) as index:
            scaled = emitter.load(source + index * (4 * LANES), FLOATS) * emitter.splat(inverse)
            # This clamps NaN too.
            scaled = emitter.maximum(
                emitter.minimum(scaled, emitter.constant(FLOATS, largest)),
                emitter.constant(FLOATS, -largest),
            )
            emitter.store_floats(scaled, target + index * LANES, storage)

    return run


encode_i8 = encode_vectors(I8, 127.0)
encode_f8 = encode_vectors(F8, 448.0)


@inner
def store_vector(source: int, target: int, scale: int, storage: int, head_dim: int) -> None:
    """Store the key or value of one head to the cache. octavo.ops.kv defines the codes."""
    if storage == F32:
        copy_f32(source, target, head_dim // LANES)
    elif storage == F16:
        copy_f16(source, target, head_dim // LANES)
    else:
        magnitude = largest_magnitude(source, head_dim // LANES)
        largest = FLOAT(127.0 if storage == I8 else 448.0)
        zero = magnitude < FLOAT(1e-30)
        store_f32(scale, FLOAT(0.0) if zero else magnitude / largest)
        inverse = FLOAT(0.0) if zero else largest / magnitude
        if storage == I8:
            encode_i8(source, target, head_dim // LANES, inverse)
        else:
            encode_f8(source, target, head_dim // LANES, inverse)


@intrinsic(VOID, POINTER, POINTER, POINTER, INT)
def gated_activation(
    emitter: Emitter, gates: Value, ups: Value, output: Value, gelu: Value
) -> None:
    """Compute act(gate) * up of one vector. GELU is g * sigmoid(2 z), SiLU is g * sigmoid(g)."""
    gates_vector = emitter.load(gates, FLOATS)
    argument = (gates_vector + gates_vector * gates_vector * gates_vector * 0.044715) * (
        2 * math.sqrt(2 / math.pi)
    )
    argument = emitter.select(emitter.splat(gelu.compare("!=", 0)), argument, gates_vector)
    decay = emitter.exp(emitter.constant(FLOATS, 0.0) - argument)
    emitter.store(gates_vector / (decay + 1.0) * emitter.load(ups, FLOATS), output)


@inner
def norm(values: int, weight: int, output: int, epsilon: float, size: int) -> None:
    mean = sum_of_squares(values, size // LANES) / FLOAT(size)
    scale_by(values, FLOAT(1.0) / FLOAT(math.sqrt(mean + epsilon)), weight, output, size // LANES)


@inner
def rotate(values: int, angles: int, half: int) -> None:
    """Rotate one head [2 * half] by the row of cosines and sines at `angles`."""
    index = 0
    while index + LANES <= half:
        rotate_vector(
            values + 4 * index,
            values + 4 * (index + half),
            angles + 4 * index,
            angles + 4 * (index + half),
        )
        index += LANES
    while index < half:
        rotate_pair(
            values + 4 * index,
            values + 4 * (index + half),
            angles + 4 * index,
            angles + 4 * (index + half),
        )
        index += 1


@inner
def copy_floats(source: int, target: int, size: int) -> None:
    for index in range(size):
        store_f32(target + 4 * index, load_f32(source + 4 * index))


@inner
def quantize_row(values: int, inputs: int, group_size: int, output: int, scratch: int) -> None:
    """Quantise a row float32 [inputs]. It is padded in scratch memory if it is not whole groups."""
    size = padded(inputs, group_size)
    if size > inputs:
        copy_floats(values, scratch, inputs)
        for position in range(inputs, size):
            store_f32(scratch + 4 * position, 0.0)
        values = scratch
    quantize_strips(values, output, size // STRIP)


# ---- phases --------------------------------------------------------------------------------------


# The record of a job. A product has these fields.
JOB_KIND, NUM_ROWS, WEIGHT, INPUT, QUANTIZED, SCRATCH, SCRATCH_SIZE, OUTPUT = range(8)
# The fields of a decoder and of other jobs. INDICES are token ids, block numbers or noise keys.
LAYERS, NUM_LAYERS, HIDDEN_SIZE, WIDTH, EPSILON, GELU, BATCH, LAST_NORM = range(8, 16)
(
    DELTA,
    QKV,
    ATTENDED,
    ACTIVATED,
    POSITIONS,
    KV_INDICES,
    INDICES,
    FACTOR,
    ATTENTION_WINDOW,
    TEMPERATURE,
    TOP_P,
    TOP_K,
    MAX_DISTANCE,
    LAST_ROWS,
    NUM_LAST_ROWS,
    DRAFT_HEAD,
    STEP_RECORD,
    NUM_FIELDS,
) = range(16, 34)
PRODUCT, ATTENTION, DECODER, EMBED, CHOOSE, SHIFT, ACTIVATE, DRAFT_EXTEND, DRAFT, STEP = range(10)
ACTIVATE_BYTES = 4 * 4 * LANES  # the scratch memory of a thread for ACTIVATE

# The record of a layer: the records of four weights, then these fields.
WEIGHT_FIELDS = 4 * matmul_jit.NUM_FIELDS
ATTN_NORM, MLP_NORM, QUERY_NORM, KEY_NORM, POST_ATTN_NORM, POST_MLP_NORM, WINDOW, ANGLES = range(
    WEIGHT_FIELDS, WEIGHT_FIELDS + 8
)
NUM_LAYER_FIELDS = WEIGHT_FIELDS + 8
PHASES_PER_LAYER = 10  # the phases in decode(); one more follows the last layer


@inner
def scratch_of(worker: int, job: int) -> int:
    """Return the scratch memory of this thread."""
    return field(job, SCRATCH) + field(worker, thread_barrier.NUMBER) * field(job, SCRATCH_SIZE)


@inner
def quantize_rows(worker: int, job: int, values: int, num_rows: int, weight: int) -> None:
    """Quantise float32 [rows, inputs] to the job's quantised rows, in the groups of this weight."""
    inputs = field(weight, matmul_jit.NUM_INPUTS)
    group_size = field(weight, matmul_jit.GROUP_SIZE)
    row_size = row_bytes(inputs, group_size)
    output = field(job, QUANTIZED)
    scratch_row = scratch_of(worker, job)
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        quantize_row(
            values + row * inputs * 4, inputs, group_size, output + row * row_size, scratch_row
        )
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


@inner
def add_bias(output: int, stride: int, num_rows: int, bias: int) -> None:
    for row in range(num_rows):
        add_to(output + row * stride, bias, 1)


@inner
def rows_at_once(num_rows: int, row_size: int) -> int:
    """Return the number of quantised rows that stay in a core's cache during a product."""
    return min(num_rows, max(TILE, (160_000 // row_size) // TILE * TILE))


@inner
def multiply(
    worker: int, job: int, weight: int, num_rows: int, output: int, num_outputs: int, gated: int
) -> None:
    """Multiply the quantised rows with a weight -> output [rows, outputs] float32.

    If `gated` is not 0, the first half of the weight is the gate and the second half the up
    projection; 1 is SiLU and 2 is GELU.
    """
    inputs = field(weight, matmul_jit.NUM_INPUTS)
    group_size = field(weight, matmul_jit.GROUP_SIZE)
    quantized = field(job, QUANTIZED)
    row_size = row_bytes(inputs, group_size)
    bias = field(weight, matmul_jit.BIAS)
    layout = block_layout(weight)
    tile_values = scratch_of(worker, job)  # two tiles of [TILE, LANES]
    second_tile = tile_values + TILE * LANES * 4
    num_blocks = (num_outputs + LANES - 1) // LANES
    piece_blocks = max(1, num_blocks // (thread_barrier.num_threads(worker) * 6))
    num_pieces = (num_blocks + piece_blocks - 1) // piece_blocks
    rows_per_pass = rows_at_once(num_rows, row_size)
    piece = thread_barrier.take_piece(worker, num_pieces)
    while piece >= 0:
        for first_row in range(0, num_rows, rows_per_pass):
            end_row = min(first_row + rows_per_pass, num_rows)
            for block in range(
                piece * piece_blocks, min(piece * piece_blocks + piece_blocks, num_blocks)
            ):
                # The next block of this piece, or the first block of the next piece.
                ahead = (
                    1
                    if block % piece_blocks < piece_blocks - 1
                    else (thread_barrier.num_threads(worker) - 1) * piece_blocks + 1
                )
                direct = gated == 0 and (block + 1) * LANES <= num_outputs
                row = first_row
                while row < end_row:
                    source = quantized + row * row_size
                    target = output + (row * num_outputs + block * LANES) * 4
                    prefetch_column(target + LANES * 4, num_outputs * 4, min(TILE, end_row - row))
                    if direct:
                        rows_done = block_product(
                            layout,
                            block,
                            source,
                            row_size,
                            end_row - row,
                            target,
                            num_outputs * 4,
                            ahead,
                        )
                        if bias != 0:
                            add_bias(target, num_outputs * 4, rows_done, bias + block * LANES * 4)
                    else:
                        rows_done = block_product(
                            layout,
                            block,
                            source,
                            row_size,
                            end_row - row,
                            tile_values,
                            LANES * 4,
                            ahead,
                        )
                        if bias != 0:
                            add_bias(tile_values, LANES * 4, rows_done, bias + block * LANES * 4)
                        if gated == 0:
                            for index in range(rows_done):
                                copy_floats(
                                    tile_values + index * LANES * 4,
                                    target + index * num_outputs * 4,
                                    num_outputs - block * LANES,
                                )
                        else:
                            block_product(
                                layout,
                                block + num_blocks,
                                source,
                                row_size,
                                end_row - row,
                                second_tile,
                                LANES * 4,
                                ahead,
                            )
                            if bias != 0:
                                add_bias(
                                    second_tile,
                                    LANES * 4,
                                    rows_done,
                                    bias + (block + num_blocks) * LANES * 4,
                                )
                            for index in range(rows_done):
                                gated_activation(
                                    tile_values + index * LANES * 4,
                                    second_tile + index * LANES * 4,
                                    target + index * num_outputs * 4,
                                    gated - 1,
                                )
                    row += rows_done
        piece = thread_barrier.take_piece(worker, num_pieces)
    thread_barrier.finish_phase(worker, num_pieces)


@inner
def add_and_norm(
    worker: int, job: int, post_norm: int, weight: int, next_weight: int, is_first: int
) -> None:
    """Add the result of the last product to the hidden states, normalise and quantise them.

    If is_first is set, there is no product yet. If post_norm is set, the product is normalised
    before it is added. The rows are quantised for next_weight.
    """
    num_rows = field(job, NUM_ROWS)
    hidden_size = field(job, HIDDEN_SIZE)
    epsilon = float_field(job, EPSILON)
    hidden = field(job, INPUT)
    delta = field(job, DELTA)
    scratch_row = scratch_of(worker, job)
    group_size = field(next_weight, matmul_jit.GROUP_SIZE)
    quantized = field(job, QUANTIZED)
    row_stride = row_bytes(hidden_size, group_size)
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        address = hidden + row * hidden_size * 4
        addend = delta + row * hidden_size * 4
        if is_first == 0:
            if post_norm != 0:
                norm(addend, post_norm, addend, epsilon, hidden_size)
            add_to(address, addend, hidden_size // LANES)
        norm(address, weight, scratch_row, epsilon, hidden_size)
        quantize_row(
            scratch_row,
            hidden_size,
            group_size,
            quantized + row * row_stride,
            scratch_row + hidden_size * 4,
        )
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


@inner
def last_norm(worker: int, job: int, post_norm: int) -> None:
    """Add the result of the last product, and write the normalised hidden states to OUTPUT.

    The rows are LAST_ROWS [NUM_LAST_ROWS], or the first NUM_LAST_ROWS if LAST_ROWS is 0.
    """
    hidden_size = field(job, HIDDEN_SIZE)
    epsilon = float_field(job, EPSILON)
    weight = field(job, LAST_NORM)
    hidden = field(job, INPUT)
    delta = field(job, DELTA)
    num_rows = field(job, NUM_LAST_ROWS)
    last_rows = field(job, LAST_ROWS)
    output_row = thread_barrier.take_piece(worker, num_rows)
    while output_row >= 0:
        hidden_row = output_row if last_rows == 0 else load_i64(last_rows + 8 * output_row)
        address = hidden + hidden_row * hidden_size * 4
        addend = delta + hidden_row * hidden_size * 4
        if post_norm != 0:
            norm(addend, post_norm, addend, epsilon, hidden_size)
        add_to(address, addend, hidden_size // LANES)
        norm(
            address, weight, field(job, OUTPUT) + output_row * hidden_size * 4, epsilon, hidden_size
        )
        output_row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


@inner
def rotate_and_store(worker: int, job: int, layer: int, kv_cache: int, scales: int) -> None:
    """Normalise and rotate the queries and keys of each token, and store keys and values."""
    batch = field(job, BATCH)
    epsilon = float_field(job, EPSILON)
    num_heads = field(batch, attention_jit.NUM_HEADS)
    num_kv_heads = field(batch, attention_jit.NUM_KV_HEADS)
    head_dim = field(batch, attention_jit.HEAD_DIM)
    block_size = field(batch, attention_jit.BLOCK_SIZE)
    token_stride = field(batch, attention_jit.QUERY_STRIDE)
    qkv = field(job, QKV)
    query_norm = field(layer, QUERY_NORM)
    key_norm = field(layer, KEY_NORM)
    angles = field(layer, ANGLES)
    positions = field(job, POSITIONS)
    kv_indices = field(job, KV_INDICES)
    num_tokens = field(job, NUM_ROWS)
    storage = field(batch, attention_jit.STORAGE)
    item_size = SIZES[storage]
    token = thread_barrier.take_piece(worker, num_tokens)
    while token >= 0:
        token_row = qkv + token * token_stride
        token_angles = angles + load_i64(positions + 8 * token) * head_dim * 4
        kv_index = load_i64(kv_indices + 8 * token)
        block = kv_index // block_size
        offset = kv_index % block_size
        address = (
            kv_cache
            + block * field(batch, attention_jit.BLOCK_STRIDE)
            + offset * head_dim * item_size
        )
        scale_address = scales + block * field(batch, attention_jit.SCALES_STRIDE) + offset * 4
        for head_index in range(num_heads + num_kv_heads):
            head_address = token_row + head_index * head_dim * 4
            norm_weight = query_norm if head_index < num_heads else key_norm
            if norm_weight != 0:
                norm(head_address, norm_weight, head_address, epsilon, head_dim)
            rotate(head_address, token_angles, head_dim // 2)
        for head_index in range(2 * num_kv_heads):
            head_offset = head_index * block_size
            store_vector(
                token_row + (num_heads + head_index) * head_dim * 4,
                address + head_offset * head_dim * item_size,
                scale_address + head_offset * 4,
                storage,
                head_dim,
            )
        token = thread_barrier.take_piece(worker, num_tokens)
    thread_barrier.finish_phase(worker, num_tokens)


@inner
def attend(worker: int, batch: int, kv_cache: int, scales: int, window: int) -> None:
    num_pieces = attention_jit.count_tasks(batch)
    piece = thread_barrier.take_piece(worker, num_pieces)
    while piece >= 0:
        attention_jit.run_task(
            batch, piece, field(worker, thread_barrier.NUMBER), kv_cache, scales, window
        )
        piece = thread_barrier.take_piece(worker, num_pieces)
    thread_barrier.finish_phase(worker, num_pieces)


# ---- jobs ----------------------------------------------------------------------------------------


@inner
def decode(worker: int, job: int) -> None:
    """Compute all layers of a decoder, and the norm behind them."""
    batch = field(job, BATCH)
    # The keys and values of a layer in a block.
    vectors_per_layer = (
        2 * field(batch, attention_jit.NUM_KV_HEADS) * field(batch, attention_jit.BLOCK_SIZE)
    )
    vector_bytes = field(batch, attention_jit.HEAD_DIM) * SIZES[field(batch, attention_jit.STORAGE)]
    layer = field(job, LAYERS)
    post_norm = 0
    for layer_index in range(field(job, NUM_LAYERS)):
        kv_cache = (
            field(batch, attention_jit.KV_CACHE) + layer_index * vectors_per_layer * vector_bytes
        )
        scales = field(batch, attention_jit.SCALES) + layer_index * vectors_per_layer * 4
        is_first = 1 if layer_index == 0 else 0
        add_and_norm(worker, job, post_norm, field(layer, ATTN_NORM), layer, is_first)
        attend_and_mlp(worker, job, layer, kv_cache, scales)
        post_norm = field(layer, POST_MLP_NORM)
        layer += 8 * NUM_LAYER_FIELDS
    last_norm(worker, job, post_norm)


@inner
def attend_and_mlp(worker: int, job: int, layer: int, kv_cache: int, scales: int) -> None:
    """Compute a layer after the input of its attention was quantised. DELTA then holds the result
    of the MLP, which is not added to the hidden states yet."""
    num_rows = field(job, NUM_ROWS)
    hidden_size = field(job, HIDDEN_SIZE)
    delta = field(job, DELTA)
    attended = field(job, ATTENDED)
    activated = field(job, ACTIVATED)
    batch = field(job, BATCH)
    qkv_weight = layer
    out_weight = layer + 8 * matmul_jit.NUM_FIELDS
    gate_up_weight = layer + 16 * matmul_jit.NUM_FIELDS
    down_weight = layer + 24 * matmul_jit.NUM_FIELDS
    num_all_heads = field(batch, attention_jit.NUM_HEADS) + 2 * field(
        batch, attention_jit.NUM_KV_HEADS
    )
    qkv_size = num_all_heads * field(batch, attention_jit.HEAD_DIM)
    multiply(worker, job, qkv_weight, num_rows, field(job, QKV), qkv_size, 0)
    rotate_and_store(worker, job, layer, kv_cache, scales)
    attend(worker, batch, kv_cache, scales, field(layer, WINDOW))
    quantize_rows(worker, job, attended, num_rows, out_weight)
    multiply(worker, job, out_weight, num_rows, delta, hidden_size, 0)
    add_and_norm(
        worker, job, field(layer, POST_ATTN_NORM), field(layer, MLP_NORM), gate_up_weight, 0
    )
    gated = 1 + field(job, GELU)
    multiply(worker, job, gate_up_weight, num_rows, activated, field(job, WIDTH), gated)
    quantize_rows(worker, job, activated, num_rows, down_weight)
    multiply(worker, job, down_weight, num_rows, delta, hidden_size, 0)


@inner
def dequantize_row(weight: int, weight_row: int, output: int, factor: float) -> None:
    """Write a row of a weight as float32, times a factor.

    The value is code * scale + least. Each step is rounded, as GGUF defines it.
    """
    inputs = field(weight, matmul_jit.NUM_INPUTS)
    group_size = field(weight, matmul_jit.GROUP_SIZE)
    bits = field(weight, matmul_jit.BITS)
    padded_inputs = padded(inputs, group_size)
    least = field(weight, matmul_jit.LEAST)
    zero_point = 0 if least != 0 else 1 << (bits - 1)
    block = weight_row // LANES
    lane = weight_row % LANES
    codes = field(weight, matmul_jit.CODES) + block * (padded_inputs * LANES * bits // 8)
    info_index = block * (padded_inputs // group_size) * LANES + lane
    for column in range(inputs):
        quad = column // 4
        if bits == 8:
            code = load_u8(codes + (quad * LANES + lane) * 4 + column % 4)
        else:
            code = (
                load_u8(codes + (quad // 2 * LANES + lane) * 4 + column % 4) >> (4 * (quad % 2))
            ) & 15
        info_offset = 2 * (info_index + column // group_size * LANES)
        value = FLOAT(code - zero_point) * load_f16(field(weight, matmul_jit.SCALE) + info_offset)
        if least != 0:
            value += load_f16(least + info_offset)
        store_f32(output + column * 4, value * factor)


@inner
def embed(worker: int, job: int) -> None:
    """Dequantise the rows INDICES [NUM_ROWS] of a weight to OUTPUT, times FACTOR."""
    weight = field(job, WEIGHT)
    num_tokens = field(job, NUM_ROWS)
    inputs = field(weight, matmul_jit.NUM_INPUTS)
    factor = float_field(job, FACTOR)
    token = thread_barrier.take_piece(worker, num_tokens)
    while token >= 0:
        weight_row = load_i64(field(job, INDICES) + 8 * token)
        output = field(job, OUTPUT) + token * inputs * 4
        dequantize_row(weight, weight_row, output, factor)
        token = thread_barrier.take_piece(worker, num_tokens)
    thread_barrier.finish_phase(worker, num_tokens)


@inner
def activate(worker: int, job: int) -> None:
    """Compute OUTPUT [NUM_ROWS, WIDTH] = act(gate) * up of the rows INPUT [gates, ups].

    If NUM_LAYERS is 1, compute act(INPUT [NUM_ROWS, WIDTH]) instead. Every row is divided into
    vectors in the same way, so its result does not depend on the other rows.
    """
    num_rows = field(job, NUM_ROWS)
    width = field(job, WIDTH)
    gelu = field(job, GELU)
    ungated = field(job, NUM_LAYERS)
    inputs = field(job, INPUT)
    scratch_vectors = scratch_of(
        worker, job
    )  # gates, ups and results of a row's last vector; then a vector of ones
    ones = scratch_vectors + 3 * LANES * 4
    for index in range(LANES):
        store_f32(ones + 4 * index, 1.0)
    vector_end = width // LANES * LANES
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        gates = inputs + row * (2 - ungated) * width * 4
        output = field(job, OUTPUT) + row * width * 4
        ups = gates + width * 4
        for index in range(0, vector_end, LANES):
            gated_activation(
                gates + 4 * index, ones if ungated else ups + 4 * index, output + 4 * index, gelu
            )
        if vector_end < width:
            remainder = width - vector_end
            copy_floats(gates + 4 * vector_end, scratch_vectors, remainder)
            if not ungated:
                copy_floats(ups + 4 * vector_end, scratch_vectors + LANES * 4, remainder)
            gated_activation(
                scratch_vectors,
                ones if ungated else scratch_vectors + LANES * 4,
                scratch_vectors + 2 * LANES * 4,
                gelu,
            )
            copy_floats(scratch_vectors + 2 * LANES * 4, output + 4 * vector_end, remainder)
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


@inner
def choose(worker: int, job: int) -> None:
    """Sample tokens from logits INPUT [rows, WIDTH] for rows with a temperature.

    OUTPUT [rows] holds the most likely token of each row, and is overwritten.
    """
    num_rows = field(job, NUM_ROWS)
    vocab_size = field(job, WIDTH)
    keys = scratch_of(worker, job)
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        token_address = field(job, OUTPUT) + 8 * row
        temperature = load_f32(field(job, TEMPERATURE) + 4 * row)
        if temperature != 0:
            token = sample(
                field(job, INPUT) + 4 * row * vocab_size,
                vocab_size,
                load_i64(token_address),
                load_i64(field(job, INDICES) + 8 * row),
                temperature,
                load_i32(field(job, TOP_K) + 4 * row),
                load_f32(field(job, TOP_P) + 4 * row),
                load_i32(field(job, MAX_DISTANCE) + 4 * row),
                keys,
            )
            store_i64(token_address, token)
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


@inner
def shift(worker: int, job: int) -> None:
    """Rotate the keys of the blocks INDICES [NUM_ROWS] in NUM_LAYERS layers by the angles INPUT."""
    batch = field(job, BATCH)
    blocks = field(job, INDICES)
    angles = field(job, INPUT)
    kv_cache = field(batch, attention_jit.KV_CACHE)
    block_stride = field(batch, attention_jit.BLOCK_STRIDE)
    storage = field(batch, attention_jit.STORAGE)
    head_dim = field(batch, attention_jit.HEAD_DIM)
    num_layers = field(job, NUM_LAYERS)
    vectors_per_layer = field(batch, attention_jit.NUM_KV_HEADS) * field(
        batch, attention_jit.BLOCK_SIZE
    )
    vector_size = head_dim * SIZES[storage]
    num_pieces = field(job, NUM_ROWS) * num_layers
    piece = thread_barrier.take_piece(worker, num_pieces)
    while piece >= 0:
        address = (
            kv_cache
            + load_i64(blocks + 8 * (piece // num_layers)) * block_stride
            + piece % num_layers * (2 * vectors_per_layer * vector_size)
        )
        for _ in range(vectors_per_layer):
            if storage == F32:
                rotate_f32(address, head_dim // 2, angles)
            else:
                rotate_f16(address, head_dim // 2, angles)
            address += vector_size
        piece = thread_barrier.take_piece(worker, num_pieces)
    thread_barrier.finish_phase(worker, num_pieces)
