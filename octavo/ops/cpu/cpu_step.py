"""A step that decodes as one job of the CPU kernels (jit/step_jit.py).

The host prepares a job for each number of rows once. Later steps only change what differs: which
slots the rows belong to, and how long the longest sequence is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.ops import ForwardBatch, Span
from octavo.ops.cpu.cpu_decoder import (
    FusedDecoder,
    Record,
    attention_record,
    split_context,
    write_float,
)
from octavo.ops.fused_spec import StepResults, StepRows, StepSpec
from octavo.ops.kv import KV


class StepRecords(NamedTuple):
    """The records of a step with some number of rows."""

    batch: ForwardBatch
    attention: Record
    step: Record
    job: Record


class StepBuffers:
    """Memory for the rows of a step. The next step overwrites it."""

    def __init__(self, num_rows: int, hidden_size: int, vocab_size: int):
        self.num_rows = num_rows
        self.ids = torch.empty(num_rows, dtype=torch.int64)
        self.positions = torch.empty(num_rows, dtype=torch.int64)
        self.kv_indices = torch.empty(num_rows, dtype=torch.int64)
        self.row_lengths = torch.empty(num_rows, dtype=torch.int32)
        self.differs = torch.empty(num_rows, dtype=torch.int32)
        self.query_start = torch.arange(num_rows + 1, dtype=torch.int32)
        # The rows of a slot are one sequence of the attention. The step writes these.
        self.sequence_start = torch.empty(num_rows + 1, dtype=torch.int32)
        self.sequence_length = torch.empty(num_rows, dtype=torch.int32)
        self.sequence_slot = torch.empty(num_rows, dtype=torch.int32)
        self.hidden = torch.empty(num_rows, hidden_size)
        self.output = torch.empty(num_rows, hidden_size)
        self.logits = torch.empty(num_rows, vocab_size)


class CpuStep:
    def __init__(self, spec: StepSpec, decoder: FusedDecoder):
        self.spec = spec
        self.decoder = decoder
        self.pool = decoder.pool
        self.head = spec.decoder.head
        row_bytes = self.pool.kernels.row_bytes.py_func(self.head.shape[1], self.head.group_size)
        decoder.row_bytes = max(decoder.row_bytes, row_bytes)
        decoder.scratch_size = max(decoder.scratch_size, 8 * self.head.shape[0])  # keys to sort
        self.buffers = StepBuffers(0, decoder.hidden, self.head.shape[0])
        self._prepared: dict[int, StepRecords] = {}
        self._generation = 0  # generation of the pool memory that the records use

    def __call__(self, rows: StepRows, kv_cache: KV) -> StepResults:
        """Compute the step, as octavo.ops.fused_spec.FusedStep."""
        num_rows = len(rows.slots)
        results = torch.empty(2, num_rows, dtype=torch.int32)
        tokens, kept = results.unbind()
        fields = self.pool.entry_points.step_jit
        with self.pool.lock:
            batch, attention, step, job = self._prepare(rows, kv_cache)
            attention_fields = self.pool.kernels.attention_jit
            attention[attention_fields.NUM_SEQUENCES] = rows.num_sequences
            if rows.num_sequences == num_rows:
                split_context(self.pool, attention, rows.max_len)
            else:
                attention[attention_fields.NUM_SEGMENTS] = 0
            step[fields.ROW_SLOTS] = rows.slots.data_ptr()
            step[fields.OFFSETS] = rows.offsets.data_ptr()
            step[fields.SAMPLED] = tokens.data_ptr()
            step[fields.KEPT] = kept.data_ptr()
            self.pool.run(job, fields.num_phases(len(self.spec.decoder.layers)))
        batch.slots = rows.slots
        batch.scratch.clear()
        output = self.buffers.output[:num_rows]
        return StepResults(batch, output, self.buffers.logits[:num_rows], tokens, kept)

    def _prepare(self, rows: StepRows, kv_cache: KV) -> StepRecords:
        """Return the records for this number of rows. All rows of an engine have the same slots and
        the same cache."""
        num_rows = len(rows.slots)
        buffers = self.buffers
        if num_rows > buffers.num_rows:
            self.buffers = StepBuffers(num_rows, self.decoder.hidden, self.head.shape[0])
            self._prepared.clear()
        if self._generation != self.pool.generation:
            self._prepared.clear()
        if num_rows not in self._prepared:
            self._prepared[num_rows] = self._records(rows, kv_cache)
            # Preparing may have moved the memory of other records.
            if self._generation != self.pool.generation:
                self._generation = self.pool.generation
                self._prepared = {num_rows: self._records(rows, kv_cache)}
        return self._prepared[num_rows]

    def _records(self, rows: StepRows, kv_cache: KV) -> StepRecords:
        num_rows = len(rows.slots)
        decoder = self.spec.decoder
        kernels = self.pool.kernels
        buffers = self.buffers
        batch = ForwardBatch(
            ids=buffers.ids[:num_rows],
            positions=buffers.positions[:num_rows],
            kv_indices=buffers.kv_indices[:num_rows],
            query_start=buffers.query_start[: num_rows + 1],
            seq_lens=buffers.row_lengths[:num_rows],
            block_table=rows.memory.block_table,
            slots=rows.slots,
            logit_indices=buffers.ids[:num_rows],  # unused: every token has logits
            spans=[Span(index, 1, rows.max_len) for index in range(num_rows)],
        )
        attention = attention_record(self.pool, batch, decoder.num_heads, kv_cache, decoder.scale)
        attention[kernels.attention_jit.QUERY_START] = buffers.sequence_start.data_ptr()
        attention[kernels.attention_jit.SEQ_LENS] = buffers.sequence_length.data_ptr()
        attention[kernels.attention_jit.TABLE_ROWS] = buffers.sequence_slot.data_ptr()
        hidden = buffers.hidden[:num_rows]
        job = self.decoder.fill_job(hidden, batch, attention, buffers.output[:num_rows])
        step = self._step_record(rows)
        job[kernels.JOB_KIND] = kernels.STEP
        job[kernels.STEP_RECORD] = step.ctypes.data
        return StepRecords(batch, attention, step, job)

    def _step_record(self, rows: StepRows) -> Record:
        fields = self.pool.entry_points.step_jit
        step: Record = np.zeros(fields.NUM_STEP_FIELDS, dtype=np.int64)
        step[fields.EMBEDDING] = self.spec.embedding.record.ctypes.data
        write_float(step, fields.EMBEDDING_SCALE, self.spec.embedding_scale)
        step[fields.HEAD] = self.head.record.ctypes.data
        memory = rows.memory
        sampling = memory.sampling
        step[fields.SLOT_STRIDE] = memory.tokens.stride(0)
        addresses: dict[int, Tensor] = {
            fields.ROW_LENGTHS: self.buffers.row_lengths,
            fields.IDS: self.buffers.ids,
            fields.LOGITS: self.buffers.logits,
            fields.DIFFERS: self.buffers.differs,
            fields.TOKENS: memory.tokens,
            fields.COMPUTED: memory.computed,
            fields.DROPPED: memory.dropped,
            fields.TEMPERATURE: sampling.temperature,
            fields.TOP_P: sampling.top_p,
            fields.TOP_K: sampling.top_k,
            fields.MAX_DISTANCE: sampling.max_distance,
            fields.SEED_LOW: sampling.seed_low,
            fields.SEED_HIGH: sampling.seed_high,
        }
        for field, tensor in addresses.items():
            step[field] = tensor.data_ptr()
        return step
