"""A draft head as jobs of the CPU kernels (jit/draft_jit.py): one job for each step of the target,
and one for all drafts of a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.ops import ForwardBatch, Span
from octavo.ops.cpu.cpu_decoder import FusedDecoder, Record, attention_record
from octavo.ops.fused_spec import DraftChains, DraftHeadSpec
from octavo.ops.kv import KV


class CpuDraftHead:
    def __init__(self, spec: DraftHeadSpec, decoder: FusedDecoder):
        self.spec = spec
        self.decoder = decoder
        self.pool = decoder.pool
        self.token_ids = spec.token_ids.int()
        self.hidden = decoder.hidden
        self.vocab_size = spec.decoder.head.shape[0]
        head_row = self.pool.kernels.row_bytes.py_func(
            spec.decoder.head.shape[1], spec.decoder.head.group_size
        )
        decoder.row_bytes = max(decoder.row_bytes, head_row)

    def compute(self, hidden: Tensor, batch: ForwardBatch, kv_cache: KV) -> Tensor:
        """Compute the layer for the rows of the target's step, as DraftHead.compute does."""
        hidden = hidden.contiguous()
        output = torch.empty(
            len(hidden) if batch.last is None else len(batch.logit_indices), self.hidden
        )
        kernels = self.pool.kernels
        fields = self.pool.entry_points.draft_jit
        with self.pool.lock:
            job, head = self._job(hidden, batch, kv_cache, output)
            job[kernels.JOB_KIND] = kernels.FOLLOW
            head[fields.IDS] = batch.ids.data_ptr()
            self.pool.run(job, fields.num_phases(0))
        return hidden if batch.last is None else hidden[batch.logit_indices]

    def draft(self, hidden: Tensor, chains: DraftChains, kv_cache: KV) -> None:
        """Draft, as FusedDraftHead.draft."""
        num_rows = len(hidden)
        num_passes = max(chains.counts)
        kernels = self.pool.kernels
        fields = self.pool.entry_points.draft_jit
        counts = np.array(chains.counts, dtype=np.int64)
        lengths = chains.lengths.long()
        rows = chains.slots.long()
        temperatures = chains.sampling.temperature[rows]
        seeds_low = chains.sampling.seed_low[rows]
        seeds_high = chains.sampling.seed_high[rows]
        output = torch.empty(num_rows, self.hidden)
        # The kernel writes the positions, the places in the cache and the lengths of each pass.
        places = torch.empty(2, num_rows, dtype=torch.int64)
        batch = ForwardBatch(
            ids=places[0],
            positions=places[0],
            kv_indices=places[1],
            query_start=torch.arange(num_rows + 1, dtype=torch.int32),
            seq_lens=torch.empty(num_rows, dtype=torch.int32),
            block_table=chains.block_table,
            slots=chains.slots,
            logit_indices=places[0],
            spans=[Span(index, 1, chains.max_len) for index in range(num_rows)],
        )
        with self.pool.lock:
            job, head = self._job(hidden, batch, kv_cache, output)
            job[kernels.JOB_KIND] = kernels.DRAFT
            head[fields.LOGITS] = self.pool.memory("draft logits", num_rows * self.vocab_size * 4)
            head[fields.NUM_PASSES] = num_passes
            head[fields.COUNTS] = counts.ctypes.data
            head[fields.LENGTHS] = lengths.data_ptr()
            head[fields.TOKENS] = chains.tokens.data_ptr()
            head[fields.TOKENS_STRIDE] = chains.tokens.stride(0)
            head[fields.TEMPERATURES] = temperatures.data_ptr()
            head[fields.SEEDS_LOW] = seeds_low.data_ptr()
            head[fields.SEEDS_HIGH] = seeds_high.data_ptr()
            self.pool.run(job, fields.num_phases(num_passes))

    def _job(
        self, hidden: Tensor, batch: ForwardBatch, kv_cache: KV, output: Tensor
    ) -> tuple[Record, Record]:
        """Return a job for these rows, and the record of the head that it refers to."""
        spec = self.spec
        decoder = spec.decoder
        kernels = self.pool.kernels
        fields = self.pool.entry_points.draft_jit
        attention = attention_record(
            self.pool, batch, decoder.num_heads, kv_cache[:, None], decoder.scale
        )
        job = self.decoder.fill_job(hidden, batch, attention, output)
        head: Record = np.zeros(fields.NUM_HEAD_FIELDS, dtype=np.int64)
        head[fields.EMBEDDING] = spec.embedding.record.ctypes.data
        head[fields.HEAD] = decoder.head.record.ctypes.data
        head[fields.TOKEN_NORM] = decoder.layers[0].attn_norm.data_ptr()
        head[fields.HIDDEN_NORM] = spec.hidden_norm.data_ptr()
        head[fields.NORMS_RESIDUAL] = int(spec.norms_residual)
        head[fields.JOINED] = self.pool.memory("joined", len(hidden) * 2 * self.hidden * 4)
        head[fields.TOKEN_IDS] = self.token_ids.data_ptr()
        job[kernels.DRAFT_HEAD] = head.ctypes.data
        self._alive = (attention, head)  # the job refers to their memory
        return job, head
