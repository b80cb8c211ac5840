"""Decode steps as CUDA graphs: all kernels of a step in one launch. Nothing else knows that graphs exist.

A step with one row launches some 250 kernels; from Python that takes 5 ms, replayed from a graph it takes none of the
host's time. A graph has a fixed number of rows: a step takes the next larger one, and the rest of its rows are the padding
row, which reads and writes block 0. Attention lengths, tokens and tables are read from device memory at replay.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch, Span
from octavo.ops.triton.rows import advance
from octavo.runner.kvstore import KVStore
from octavo.runner.rows import Rows
from octavo.types import Plan


def graph_sizes(most: int) -> list[int]:
    """Rows a graph is captured for: at most an eighth of them is padding above 64 rows."""
    sizes, size = [1, 2, 4, 8, 16], 16
    while size < most:
        size += 16 if size < 256 else 32 if size < 512 else size // 8
        sizes.append(size)
    return [s for s in sizes if s < most] + [most]


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [2, size] int32: rows, and the new block of each or 0
    logits: Tensor  # [size, vocab]
    lengths: Tensor  # [size]


class DecodeGraphs:
    def __init__(self, model: CausalLM, kv: KVStore, rows: Rows, max_rows: int, max_len: int):
        self.model, self.kv, self.rows, self.max_len = model, kv, rows, max_len
        self.sizes = graph_sizes(max_rows)
        self.captured: dict[int, Captured] = {}
        self.pool: Any = None  # memory that all graphs share: only one runs at a time

    def fits(self, plan: Plan) -> bool:
        """A step that only decodes: one token a row, nothing new, nothing copied."""
        return bool(plan.items) and not plan.rows and not plan.copies and all(i.num == 1 and i.sample for i in plan.items)

    def run(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Launch the step. (rows, logits, lengths) of its items, valid until the next run."""
        count = len(plan.items)
        size = self.sizes[bisect.bisect_left(self.sizes, count)]
        captured = self.captured.get(size) or self.capture(size)
        fresh = {row: block for row, _, block in plan.appends}
        rows = [item.row for item in plan.items]
        blocks = [fresh.get(row, 0) for row in rows]
        pad = size - count
        host = torch.tensor([rows + [self.rows.padding] * pad, blocks + [0] * pad], dtype=torch.int32).pin_memory()
        captured.inputs.copy_(host, non_blocking=True)
        captured.graph.replay()
        return captured.inputs[0, :count], captured.logits[:count], captured.lengths[:count]

    def capture(self, size: int) -> Captured:
        inputs = torch.zeros(2, size, dtype=torch.int32, device=self.kv.tensor.device)
        inputs[0] = self.rows.padding
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        self._step(inputs)  # once as it is: compiles kernels, lets libraries allocate
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self.pool):
            logits, lengths = self._step(inputs)
        self.captured[size] = Captured(graph, inputs, logits, lengths)
        return self.captured[size]

    def _step(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        rows, fresh = inputs
        state, size = self.rows, inputs.shape[1]
        ids, positions, slots, seq_lens = advance(
            rows, fresh, state.tokens, state.table, state.computed, state.padding, self.kv.block_size
        )
        batch = ForwardBatch(
            ids=ids,
            positions=positions,
            kv_slots=slots,
            query_start=seq_lens,  # nobody asks: every item is one token
            seq_lens=seq_lens,
            block_table=state.table,
            rows=rows,
            logit_rows=rows,  # likewise: all
            spans=[Span(i, 1, self.max_len) for i in range(size)],
        )
        return self.model.logits(self.model(batch, self.kv.tensor)), seq_lens
