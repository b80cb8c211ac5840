"""A draft head as jobs of the CPU kernels (jit/draft_jit.py): one job for each step of the target,
and one for all drafts of a step. Records are prepared once for each number of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.ops import ForwardBatch, Span
from octavo.ops.cpu.cpu_decoder import (
    FusedDecoder,
    Record,
    address,
    attention_record,
    split_context,
)
from octavo.ops.fused_spec import DraftHeadSpec, SlotMemory
from octavo.ops.kv import KV


class Chains(NamedTuple):
    """The data that all chains with the same number of rows share."""

    hidden: Tensor  # [rows, hidden]
    output: Tensor  # [rows, hidden]
    batch: ForwardBatch  # the kernel writes its positions, KV indices and lengths
    attention: Record
    head: Record
    job: Record


class CpuDraftHead:
    def __init__(self, spec: DraftHeadSpec, decoder: FusedDecoder):
        self.spec = spec
        self.decoder = decoder
        self.pool = decoder.pool
        self.token_ids = spec.token_ids.int()
        self.hidden = decoder.hidden
        head = spec.decoder.head
        self.vocab_size = head.shape[0]
        row_bytes = self.pool.kernels.row_bytes.py_func(head.shape[1], head.group_size)
        decoder.row_bytes = max(decoder.row_bytes, row_bytes)
        self._chains: dict[int, Chains] = {}
        self._generation = -1  # generation of the pool memory that the records use

    def compute(self, hidden: Tensor, batch: ForwardBatch, kv_cache: KV) -> Tensor:
        """Compute the layer, as DraftHead.compute does."""
        hidden = hidden.contiguous()
        with self.pool.lock:
            self._extend(hidden, batch, kv_cache, self._head_record(len(hidden), batch.ids))
        return hidden if batch.last is None else hidden[batch.logit_indices]

    def extend(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        memory: SlotMemory,
        outputs: Tensor,
        kv_cache: KV,
    ) -> None:
        """Extend the head's KV by a step that decodes, as FusedDraftHead.extend."""
        with self.pool.lock:
            head = self._head_record(len(hidden))
            self._add_slots(head, memory, outputs)
            self._extend(hidden, batch, kv_cache, head)

    def _extend(self, hidden: Tensor, batch: ForwardBatch, kv_cache: KV, head: Record) -> None:
        kernels = self.pool.kernels
        num_rows = len(hidden) if batch.last is None else len(batch.logit_indices)
        output = torch.empty(num_rows, self.hidden)
        attention = self._attention(batch, kv_cache)
        job = self.decoder.fill_job(hidden, batch, attention, output)
        job[kernels.JOB_KIND] = kernels.DRAFT_EXTEND
        job[kernels.DRAFT_HEAD] = head.ctypes.data
        self.pool.run(job, self.pool.entry_points.draft_jit.num_phases(0))

    def draft(
        self,
        slots: Tensor,
        counts: list[int],
        memory: SlotMemory,
        outputs: Tensor,
        kv_cache: KV,
        max_len: int,
    ) -> None:
        """Draft, as FusedDraftHead.draft."""
        num_passes = max(counts)
        draft_counts = np.array(counts, dtype=np.int64)
        fields = self.pool.entry_points.draft_jit
        with self.pool.lock:
            chains = self._prepare(slots, memory, outputs, kv_cache)
            chains.attention[self.pool.kernels.attention_jit.TABLE_ROWS] = slots.data_ptr()
            split_context(self.pool, chains.attention, max_len)
            chains.head[fields.NUM_PASSES] = num_passes
            chains.head[fields.COUNTS] = draft_counts.ctypes.data
            self.pool.run(chains.job, fields.num_phases(num_passes))

    # ---- records ---------------------------------------------------------------------------------

    def _prepare(self, slots: Tensor, memory: SlotMemory, outputs: Tensor, kv_cache: KV) -> Chains:
        """Return the records of chains with this number of rows. All chains of an engine have the
        same slots and the same cache."""
        num_rows = len(slots)
        if self._generation != self.pool.generation:
            self._chains.clear()
        if num_rows not in self._chains:
            self._chains[num_rows] = self._new_chains(slots, memory, outputs, kv_cache)
            # Preparing may have moved the memory of other records.
            if self._generation != self.pool.generation:
                self._generation = self.pool.generation
                self._chains = {num_rows: self._new_chains(slots, memory, outputs, kv_cache)}
        return self._chains[num_rows]

    def _new_chains(
        self, slots: Tensor, memory: SlotMemory, outputs: Tensor, kv_cache: KV
    ) -> Chains:
        num_rows = len(slots)
        kernels = self.pool.kernels
        hidden = torch.empty(num_rows, self.hidden)
        output = torch.empty(num_rows, self.hidden)
        positions, kv_indices = torch.empty(2, num_rows, dtype=torch.int64).unbind()
        batch = ForwardBatch(
            ids=positions,  # unused
            positions=positions,
            kv_indices=kv_indices,
            query_start=torch.arange(num_rows + 1, dtype=torch.int32),
            seq_lens=torch.empty(num_rows, dtype=torch.int32),
            block_table=memory.block_table,
            slots=slots,
            logit_indices=positions,  # unused
            spans=[Span(index, 1, 1) for index in range(num_rows)],
        )
        attention = self._attention(batch, kv_cache)
        job = self.decoder.fill_job(hidden, batch, attention, output)
        head = self._head_record(num_rows)
        self._add_slots(head, memory, outputs)
        logits = self.pool.memory("draft logits", num_rows * self.vocab_size * 4)
        head[self.pool.entry_points.draft_jit.LOGITS] = logits
        job[kernels.JOB_KIND] = kernels.DRAFT
        job[kernels.DRAFT_HEAD] = head.ctypes.data
        return Chains(hidden, output, batch, attention, head, job)

    def _attention(self, batch: ForwardBatch, kv_cache: KV) -> Record:
        decoder = self.spec.decoder
        return attention_record(
            self.pool, batch, decoder.num_heads, kv_cache[:, None], decoder.scale
        )

    def _head_record(self, num_rows: int, ids: Tensor | None = None) -> Record:
        """Return the record of the head. `ids` are the tokens behind the rows; without them, the
        tokens are in the slots of the rows."""
        spec = self.spec
        fields = self.pool.entry_points.draft_jit
        head: Record = np.zeros(fields.NUM_HEAD_FIELDS, dtype=np.int64)
        head[fields.EMBEDDING] = spec.embedding.record.ctypes.data
        head[fields.HEAD] = spec.decoder.head.record.ctypes.data
        head[fields.TOKEN_NORM] = spec.decoder.layers[0].attn_norm.data_ptr()
        head[fields.HIDDEN_NORM] = spec.hidden_norm.data_ptr()
        head[fields.NORMS_RESIDUAL] = int(spec.norms_residual)
        head[fields.JOINED] = self.pool.memory("joined", num_rows * 2 * self.hidden * 4)
        head[fields.TOKEN_IDS] = self.token_ids.data_ptr()
        head[fields.IDS] = address(ids)
        return head

    def _add_slots(self, head: Record, memory: SlotMemory, outputs: Tensor) -> None:
        fields = self.pool.entry_points.draft_jit
        head[fields.OUTPUTS] = outputs.data_ptr()
        head[fields.SLOT_STRIDE] = memory.tokens.stride(0)
        head[fields.TOKENS] = memory.tokens.data_ptr()
        head[fields.COMPUTED] = memory.computed.data_ptr()
        head[fields.TEMPERATURE] = memory.sampling.temperature.data_ptr()
        head[fields.SEED_LOW] = memory.sampling.seed_low.data_ptr()
        head[fields.SEED_HIGH] = memory.sampling.seed_high.data_ptr()
