"""Decode steps of a CPU as one job each: what StepGraphs is for a GPU (octavo/runner/graphs.py).

decode   every item is one token
verify   several rows may belong to one sequence, because they verify its drafts
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.fused_spec import FusedStep, StepRows
from octavo.runner.batch import ForwardResult
from octavo.runner.batch_slots import BatchSlots, IntColumn
from octavo.runner.drafter import Drafter, Observed
from octavo.runner.kvstore import KVStore
from octavo.runner.shapes import GraphShape
from octavo.runner.transfer import copy_async
from octavo.runner.verification import is_plain_decode, lay_out_drafts
from octavo.types import Item, Plan


class CpuSteps:
    copy_to_host = staticmethod(copy_async)

    def __init__(
        self, step: FusedStep, kv: KVStore, batch_slots: BatchSlots, drafter: Drafter | None
    ):
        self.step = step
        self.kv = kv
        self.batch_slots = batch_slots
        self.drafter = drafter
        self.flat = batch_slots.flat.numpy()  # the memory of all slots

    def capture_all(self) -> None:
        """There is nothing to prepare."""

    def is_decode(self, plan: Plan) -> bool:
        return is_plain_decode(plan)

    def replay_decode(self, plan: Plan) -> ForwardResult:
        """Run a decode step."""
        for slot, logical_block, block in plan.block_appends:
            self.flat[self.batch_slots.table_index(slot, logical_block)] = block
        slots = torch.tensor([item.slot for item in plan.items], dtype=torch.int32)
        max_len = max(item.max_kv_len for item in plan.items)
        return self._run(slots, torch.zeros_like(slots), max_len)

    def find_mixed_shape(self, items: list[Item]) -> GraphShape | None:
        """Return None: a step with prompts has a few long calls already."""
        return None

    def find_verify_shape(self, plan: Plan) -> GraphShape | None:
        num_passes = 0 if plan.drafts else max(item.num_drafts for item in plan.items)
        return GraphShape(plan.num_tokens, plan.num_tokens, verifies=True, num_passes=num_passes)

    def lay_out(self, items: list[Item], shape: GraphShape) -> NDArray[np.int32]:
        """Lay out a step that verifies drafts, as in verification.py, after its largest length."""
        layout = lay_out_drafts(
            items=items,
            num_passes=shape.num_passes,
            num_drafting=len(items),
            num_rows=shape.tokens,
            padding_slot=self.batch_slots.padding_slot,
        )
        max_len = max(item.max_kv_len for item in items)
        return np.concatenate([[max_len], layout]).astype(np.int32)

    def replay(self, shape: GraphShape, layout: Tensor, num_rows: int) -> ForwardResult:
        """Run a step that verifies drafts, with the array of lay_out()."""
        max_len = int(layout[0])
        num_drafting = len(layout) - 1 - 2 * shape.tokens
        drafting, slots, offsets = layout[1:].split([num_drafting, shape.tokens, shape.tokens])
        if shape.num_passes:
            assert self.drafter is not None
            passes = drafting.view(shape.num_passes, -1).unbind()
            self.drafter.draft(passes, max_len, self.batch_slots)
        return self._run(slots, offsets, max_len)

    def _run(self, slots: Tensor, offsets: Tensor, max_len: int) -> ForwardResult:
        batch_slots = self.batch_slots
        rows = StepRows(
            slots=slots,
            offsets=offsets,
            tokens=batch_slots.tokens,
            computed=batch_slots.computed,
            dropped=batch_slots.ints[:, IntColumn.DROPPED_TOKENS],
            block_table=batch_slots.block_table,
            sampling=batch_slots.sampling,
            max_len=max_len,
        )
        results = self.step(rows, self.kv.view)
        if self.drafter is not None:
            self.drafter.observe(Observed(results.batch, results.hidden), batch_slots)
        return ForwardResult(
            slots, results.logits, results.batch.seq_lens, results.tokens, results.kept
        )
