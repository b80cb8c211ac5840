"""A draft head (octavo/model/draft_head.py) on a CPU: the draft extend, and whole chains of drafts,
as one job each.

A chain has one row for each sequence. Pass 0 turns the head's last output into logits and a draft.
Each further pass computes the layer for the draft before it:

    token | hidden  ->  norms, side by side  ->  layer  ->  norm  ->  logits  ->  draft

No Python runs between the passes, which are so short that it would take most of the time.
"""

from __future__ import annotations

import math

from numba import types

from octavo.ops.cpu.jit import attention_jit, matmul_jit, thread_barrier
from octavo.ops.cpu.jit.decoder_jit import (
    BATCH,
    DRAFT_HEAD,
    EPSILON,
    HIDDEN_SIZE,
    INPUT,
    KV_INDICES,
    LAST_NORM,
    LAYERS,
    NUM_ROWS,
    OUTPUT,
    PHASES_PER_LAYER,
    POSITIONS,
    attend_and_mlp,
    copy_floats,
    dequantize_row,
    last_norm,
    multiply,
    norm,
    quantize_rows,
)
from octavo.ops.cpu.jit.llvm_intrinsics import (
    INTS,
    LANES,
    POINTER,
    Emitter,
    Value,
    field,
    float_field,
    inner,
    intrinsic,
    load_f32,
    load_i32,
    load_i64,
    store_i32,
    store_i64,
)
from octavo.ops.cpu.jit.sampling_jit import mask_of_candidates, noise_key_of, score

INT = types.int64
FLOAT = types.float32

# The record of a draft head: int64. The slot of each row is in the record of the attention.
(
    EMBEDDING,  # the record of the target's embedding
    HEAD,  # the record of the draft head's output head
    TOKEN_NORM,
    HIDDEN_NORM,
    NORMS_RESIDUAL,  # 1: the residual is the hidden state after its norm
    JOINED,  # [rows, 2 * hidden] token and hidden state side by side, float32
    TOKEN_IDS,  # the target's id of each draft token, int32
    LOGITS,  # [rows, draft vocabulary] float32
    NUM_PASSES,
    COUNTS,  # int64 [rows]: the drafts wanted
    IDS,  # int64 [rows]: the token behind each row; 0: it is in the slot of the row
    OUTPUTS,  # [slots, hidden] the head's output behind the last token of each slot
    SLOT_STRIDE,  # of the following, in entries: they are columns of one table, with a row per slot
    TOKENS,  # int32: the first token of each slot
    COMPUTED,  # int32: positions whose KV is computed
    TEMPERATURE,  # float32
    SEED_LOW,  # int32
    SEED_HIGH,  # int32
    NUM_HEAD_FIELDS,
) = range(19)

LAYER_PHASES = PHASES_PER_LAYER + 2  # those of join_rows() and of the norm behind the layer
CHOICE_PHASES = 3  # those of choose_drafts()


@inner
def slot_of(job: int, row: int) -> int:
    return load_i32(field(field(job, BATCH), attention_jit.TABLE_ROWS) + 4 * row)


@inner
def column(head: int, name: int, slot: int) -> int:
    """Return the address of a slot's entry."""
    return field(head, name) + 4 * slot * field(head, SLOT_STRIDE)


@inner
def join_rows(worker: int, job: int, head: int, step: int) -> None:
    """Write the norms of the token and of the hidden state of each row side by side.

    Step 0 reads the rows of the target's step. A later step reads the draft of the pass before, and
    writes its position and KV index.
    """
    num_rows = field(job, NUM_ROWS)
    hidden_size = field(job, HIDDEN_SIZE)
    epsilon = float_field(job, EPSILON)
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        hidden = field(job, INPUT) + row * hidden_size * 4
        joined = field(head, JOINED) + row * hidden_size * 8
        token = following_token(job, head, row) if step == 0 else place_draft(job, head, row, step)
        dequantize_row(field(head, EMBEDDING), token, joined, FLOAT(1.0))
        norm(joined, field(head, TOKEN_NORM), joined, epsilon, hidden_size)
        normed = joined + hidden_size * 4
        norm(hidden, field(head, HIDDEN_NORM), normed, epsilon, hidden_size)
        if field(head, NORMS_RESIDUAL):
            norm(hidden, field(head, HIDDEN_NORM), hidden, epsilon, hidden_size)
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


@inner
def following_token(job: int, head: int, row: int) -> int:
    """Return the token behind a row of the target's step."""
    ids = field(head, IDS)
    if ids != 0:
        return load_i64(ids + 8 * row)
    position = load_i64(field(job, POSITIONS) + 8 * row)
    return max(load_i32(column(head, TOKENS, slot_of(job, row)) + 4 * (position + 1)), 0)


@inner
def place_draft(job: int, head: int, row: int, step: int) -> int:
    """Write the position and the KV index of a row's last draft, and return the draft. A row that
    has all its drafts computes position 0 of block 0, which nothing reads."""
    batch = field(job, BATCH)
    seq_len = field(batch, attention_jit.SEQ_LENS) + 4 * row
    if step >= load_i64(field(head, COUNTS) + 8 * row):
        store_i64(field(job, POSITIONS) + 8 * row, 0)
        store_i64(field(job, KV_INDICES) + 8 * row, 0)
        store_i32(seq_len, 1)
        return 0
    slot = slot_of(job, row)
    length = load_i32(column(head, COMPUTED, slot)) + step
    position = length - 1
    block_size = field(batch, attention_jit.BLOCK_SIZE)
    table_index = slot * field(batch, attention_jit.TABLE_WIDTH) + position // block_size
    block = load_i32(field(batch, attention_jit.BLOCK_TABLE) + 4 * table_index)
    store_i64(field(job, POSITIONS) + 8 * row, position)
    store_i64(field(job, KV_INDICES) + 8 * row, block * block_size + position % block_size)
    store_i32(seq_len, length)
    return load_i32(column(head, TOKENS, slot) + 4 * length)


@inner
def run_layer(worker: int, job: int, head: int, step: int) -> None:
    """Compute the layer. The hidden states are updated in place, and OUTPUT gets their norms."""
    layer = field(job, LAYERS)
    batch = field(job, BATCH)
    join_rows(worker, job, head, step)
    quantize_rows(worker, job, field(head, JOINED), field(job, NUM_ROWS), layer)
    attend_and_mlp(
        worker,
        job,
        layer,
        field(batch, attention_jit.KV_CACHE),
        field(batch, attention_jit.SCALES),
    )
    last_norm(worker, job, 0)


@inner
def load_outputs(worker: int, job: int, head: int) -> None:
    """Copy the outputs of the rows' slots to the hidden states, and their norms to OUTPUT."""
    num_rows = field(job, NUM_ROWS)
    hidden_size = field(job, HIDDEN_SIZE)
    epsilon = float_field(job, EPSILON)
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        offset = row * hidden_size * 4
        hidden = field(job, INPUT) + offset
        output = field(head, OUTPUTS) + slot_of(job, row) * hidden_size * 4
        copy_floats(output, hidden, hidden_size)
        norm(hidden, field(job, LAST_NORM), field(job, OUTPUT) + offset, epsilon, hidden_size)
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


@inner
def store_outputs(worker: int, job: int, head: int) -> None:
    """Copy the hidden state of each slot's last kept row to its output."""
    num_rows = field(job, NUM_ROWS)
    hidden_size = field(job, HIDDEN_SIZE)
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        slot = slot_of(job, row)
        seq_len = load_i32(field(field(job, BATCH), attention_jit.SEQ_LENS) + 4 * row)
        if seq_len == load_i32(column(head, COMPUTED, slot)):
            output = field(head, OUTPUTS) + slot * hidden_size * 4
            copy_floats(field(job, INPUT) + row * hidden_size * 4, output, hidden_size)
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


# ---- the choice ----------------------------------------------------------------------------------


@intrinsic(INT, POINTER, POINTER, INT, types.float32, types.float32)
def candidates_among(
    emitter: Emitter,
    logits: Value,
    token_ids: Value,
    noise_key: Value,
    temperature: Value,
    best: Value,
) -> Value:
    """Return a bit for each of LANES draft tokens: whether it may beat `best`."""
    tokens = emitter.load(token_ids, INTS)
    return mask_of_candidates(emitter, logits, tokens, noise_key, temperature, best)


@inner
def sample_draft(
    logits: int, token_ids: int, vocabulary: int, noise_key: int, temperature: float
) -> int:
    """Sample one of the draft tokens with the noise of the target's tokens. Returns its id."""
    best = FLOAT(-math.inf)
    chosen = 0
    first = 0
    while first < vocabulary:
        mask = (1 << min(LANES, vocabulary - first)) - 1
        if temperature != 0 and first + LANES <= vocabulary:
            ids = token_ids + 4 * first
            mask = candidates_among(logits + 4 * first, ids, noise_key, temperature, best)
        index = first
        while mask != 0:
            if mask & 1:
                token = load_i32(token_ids + 4 * index)
                token_score = load_f32(logits + 4 * index)
                if temperature != 0:
                    token_score = score(token_score, token, noise_key, temperature)
                if token_score > best:
                    best = token_score
                    chosen = token
            mask >>= 1
            index += 1
        first += LANES
    return chosen


@inner
def choose_drafts(worker: int, job: int, head: int, step: int) -> None:
    """Turn the norms in OUTPUT into logits, and write a draft for each row that wants one."""
    num_rows = field(job, NUM_ROWS)
    weight = field(head, HEAD)
    vocabulary = field(weight, matmul_jit.NUM_OUTPUTS)
    logits = field(head, LOGITS)
    quantize_rows(worker, job, field(job, OUTPUT), num_rows, weight)
    multiply(worker, job, weight, num_rows, logits, vocabulary, 0)
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        if step < load_i64(field(head, COUNTS) + 8 * row):
            slot = slot_of(job, row)
            position = load_i32(column(head, COMPUTED, slot)) + 1 + step
            noise_key = noise_key_of(
                load_i32(column(head, SEED_LOW, slot)),
                load_i32(column(head, SEED_HIGH, slot)),
                position,
            )
            token = sample_draft(
                logits + row * vocabulary * 4,
                field(head, TOKEN_IDS),
                vocabulary,
                noise_key,
                load_f32(column(head, TEMPERATURE, slot)),
            )
            store_i32(column(head, TOKENS, slot) + 4 * position, token)
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


# ---- jobs ----------------------------------------------------------------------------------------


@inner
def draft_extend(worker: int, job: int) -> None:
    """Compute the layer for the rows of the target's step, and store the results in OUTPUTS if it
    is set."""
    head = field(job, DRAFT_HEAD)
    run_layer(worker, job, head, 0)
    if field(head, OUTPUTS) != 0:
        store_outputs(worker, job, head)


@inner
def draft(worker: int, job: int) -> None:
    """Draft NUM_PASSES tokens for each row, or as many as it wants."""
    head = field(job, DRAFT_HEAD)
    for step in range(field(head, NUM_PASSES)):
        if step == 0:
            load_outputs(worker, job, head)
        else:
            run_layer(worker, job, head, step)
        choose_drafts(worker, job, head, step)


def num_phases(num_passes: int) -> int:
    """Return the phases of draft(), or the most phases of draft_extend() for 0 passes."""
    if num_passes == 0:
        return LAYER_PHASES + 1
    return 1 + (num_passes - 1) * LAYER_PHASES + num_passes * CHOICE_PHASES
