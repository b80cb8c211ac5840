"""A whole step that decodes, as one job: from the tokens in the batch slots to new tokens in them.

A row is one token of a sequence. A sequence with drafts has several rows, at consecutive positions
(octavo/runner/verification.py). Attention computes the rows of a sequence together, so that they
share its keys. No Python runs within the step, which would take a fifth of the time of a small
model.
"""

from __future__ import annotations

from octavo.ops.cpu.jit import attention_jit, matmul_jit, thread_barrier
from octavo.ops.cpu.jit.decoder_jit import (
    BATCH,
    HIDDEN_SIZE,
    INPUT,
    KV_INDICES,
    NUM_ROWS,
    OUTPUT,
    PHASES_PER_LAYER,
    POSITIONS,
    STEP_RECORD,
    decode,
    dequantize_row,
    multiply,
    quantize_rows,
    scratch_of,
)
from octavo.ops.cpu.jit.filtered_sampling_jit import sample
from octavo.ops.cpu.jit.llvm_intrinsics import (
    field,
    float_field,
    inner,
    load_f32,
    load_i32,
    set_field,
    store_i32,
    store_i64,
)
from octavo.ops.cpu.jit.sampling_jit import likeliest_token, noise_key_of

# The record of a step: int64.
(
    ROW_SLOTS,  # int32 [rows]: the slot of each row
    ROW_LENGTHS,  # int32 [rows]: positions including the row's token, written by the step
    OFFSETS,  # int32 [rows]: the index of a row among those of its sequence
    EMBEDDING,  # the record of the embedding
    EMBEDDING_SCALE,  # float32
    HEAD,  # the record of the output head
    IDS,  # int64 [rows]: the tokens that are read, written by the step
    LOGITS,  # float32 [rows, vocabulary]
    SAMPLED,  # int32 [rows]: the sampled tokens
    DIFFERS,  # int32 [rows]: whether the sampled token differs from the draft at its position
    KEPT,  # int32 [rows]: whether all drafts up to the row's token were accepted
    SLOT_STRIDE,  # of the following, in entries: they are columns of one table, with a row per slot
    TOKENS,  # int32: the first token of each slot
    COMPUTED,  # int32: positions whose KV is computed
    DROPPED,  # int32: positions in the text that are not in the cache
    TEMPERATURE,  # float32
    TOP_P,  # float32
    TOP_K,  # int32
    MAX_DISTANCE,  # int32
    SEED_LOW,  # int32
    SEED_HIGH,  # int32
    NUM_STEP_FIELDS,
) = range(22)


@inner
def slot_of(step: int, row: int) -> int:
    return load_i32(field(step, ROW_SLOTS) + 4 * row)


@inner
def column(step: int, name: int, slot: int) -> int:
    """Return the address of a slot's entry."""
    return field(step, name) + 4 * slot * field(step, SLOT_STRIDE)


@inner
def group_rows(batch: int, step: int, num_rows: int) -> None:
    """Make the rows of each slot one sequence of the attention."""
    query_start = field(batch, attention_jit.QUERY_START)
    sequence = -1
    for row in range(num_rows):
        slot = slot_of(step, row)
        offset = load_i32(field(step, OFFSETS) + 4 * row)
        if offset == 0:
            sequence += 1
            store_i32(query_start + 4 * sequence, row)
            store_i32(field(batch, attention_jit.TABLE_ROWS) + 4 * sequence, slot)
        length = load_i32(column(step, COMPUTED, slot)) + offset + 1
        store_i32(field(batch, attention_jit.SEQ_LENS) + 4 * sequence, length)
    store_i32(query_start + 4 * sequence + 4, num_rows)
    set_field(batch, attention_jit.NUM_SEQUENCES, sequence + 1)


@inner
def read_tokens(worker: int, job: int, step: int) -> None:
    """Write the token, the position, the KV index and the embedding of each row."""
    batch = field(job, BATCH)
    num_rows = field(job, NUM_ROWS)
    hidden_size = field(job, HIDDEN_SIZE)
    block_size = field(batch, attention_jit.BLOCK_SIZE)
    scale = float_field(step, EMBEDDING_SCALE)
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        if row == 0:
            group_rows(batch, step, num_rows)
        slot = slot_of(step, row)
        offset = load_i32(field(step, OFFSETS) + 4 * row)
        position = load_i32(column(step, COMPUTED, slot)) + offset
        # A slot whose logits held no finite number has token -1; its sequence ends soon.
        token = max(load_i32(column(step, TOKENS, slot) + 4 * position), 0)
        table_index = slot * field(batch, attention_jit.TABLE_WIDTH) + position // block_size
        block = load_i32(field(batch, attention_jit.BLOCK_TABLE) + 4 * table_index)
        store_i64(field(step, IDS) + 8 * row, token)
        store_i64(field(job, POSITIONS) + 8 * row, position)
        store_i64(field(job, KV_INDICES) + 8 * row, block * block_size + position % block_size)
        store_i32(field(step, ROW_LENGTHS) + 4 * row, position + 1)
        hidden = field(job, INPUT) + row * hidden_size * 4
        dequantize_row(field(step, EMBEDDING), token, hidden, scale)
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


@inner
def sample_rows(worker: int, job: int, step: int) -> None:
    """Sample a token behind each row, and write it to the row's slot."""
    num_rows = field(job, NUM_ROWS)
    vocabulary = field(field(step, HEAD), matmul_jit.NUM_OUTPUTS)
    keys = scratch_of(worker, job)
    row = thread_barrier.take_piece(worker, num_rows)
    while row >= 0:
        slot = slot_of(step, row)
        length = load_i32(field(step, ROW_LENGTHS) + 4 * row)
        logits = field(step, LOGITS) + row * vocabulary * 4
        temperature = load_f32(column(step, TEMPERATURE, slot))
        token = likeliest_token(logits, vocabulary)
        if temperature != 0 and token >= 0:
            noise_key = noise_key_of(
                load_i32(column(step, SEED_LOW, slot)),
                load_i32(column(step, SEED_HIGH, slot)),
                length + load_i32(column(step, DROPPED, slot)),
            )
            token = sample(
                logits,
                vocabulary,
                token,
                noise_key,
                temperature,
                load_i32(column(step, TOP_K, slot)),
                load_f32(column(step, TOP_P, slot)),
                load_i32(column(step, MAX_DISTANCE, slot)),
                keys,
            )
        token_address = column(step, TOKENS, slot) + 4 * length
        store_i32(field(step, DIFFERS) + 4 * row, 1 if load_i32(token_address) != token else 0)
        store_i32(token_address, token)
        store_i32(field(step, SAMPLED) + 4 * row, token)
        row = thread_barrier.take_piece(worker, num_rows)
    thread_barrier.finish_phase(worker, num_rows)


@inner
def keep_rows(worker: int, job: int, step: int) -> None:
    """Advance each slot over its rows up to the first one that sampled another token than its
    draft."""
    if thread_barrier.take_piece(worker, 1) == 0:
        is_kept = 1
        for row in range(field(job, NUM_ROWS)):
            if load_i32(field(step, OFFSETS) + 4 * row) == 0:
                is_kept = 1
            store_i32(field(step, KEPT) + 4 * row, is_kept)
            if is_kept:
                length = load_i32(field(step, ROW_LENGTHS) + 4 * row)
                store_i32(column(step, COMPUTED, slot_of(step, row)), length)
            if load_i32(field(step, DIFFERS) + 4 * row):
                is_kept = 0
    thread_barrier.finish_phase(worker, 1)


@inner
def run_step(worker: int, job: int) -> None:
    step = field(job, STEP_RECORD)
    num_rows = field(job, NUM_ROWS)
    head = field(step, HEAD)
    read_tokens(worker, job, step)
    decode(worker, job)
    quantize_rows(worker, job, field(job, OUTPUT), num_rows, head)
    num_outputs = field(head, matmul_jit.NUM_OUTPUTS)
    multiply(worker, job, head, num_rows, field(step, LOGITS), num_outputs, 0)
    sample_rows(worker, job, step)
    keep_rows(worker, job, step)


def num_phases(num_layers: int) -> int:
    """Return the phases of run_step()."""
    return 1 + (PHASES_PER_LAYER * num_layers + 1) + 2 + 1 + 1
