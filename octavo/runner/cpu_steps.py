"""Runs each decode step on a CPU as one job, like a CUDA graph on a GPU (octavo/runner/graphs.py).

A step may verify drafts: several rows then belong to one sequence. A drafter on the device drafts
before the step and computes its own KV of the step's tokens afterwards.
"""

from __future__ import annotations

import torch

from octavo.ops.fused_spec import FusedStep, StepRows
from octavo.runner.batch import ForwardResult
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.drafter import Drafter, Observed
from octavo.runner.kvstore import KVStore
from octavo.runner.verification import changes_slots, slots_to_draft
from octavo.types import Plan


class CpuSteps:
    def __init__(
        self, step: FusedStep, kv: KVStore, batch_slots: BatchSlots, drafter: Drafter | None
    ):
        self.step = step
        self.kv = kv
        self.batch_slots = batch_slots
        self.drafter = drafter
        self.flat = batch_slots.flat.numpy()  # The memory of all slots.

    def is_decode(self, plan: Plan) -> bool:
        """Return whether a step only decodes and verifies drafts.

        It may have stores, because they run before it.
        """
        if changes_slots(plan):
            return False
        return all(item.start is None and item.sample for item in plan.items)

    def replay_decode(self, plan: Plan) -> ForwardResult:
        """Run a step. Returns one row for each token that it computes."""
        for slot, logical_block, block in plan.table_updates:
            self.flat[self.batch_slots.table_index(slot, logical_block)] = block
        max_len = max(item.max_kv_len for item in plan.items)
        slots = [item.slot for item in plan.items]
        offsets = [0] * len(slots)
        if plan.num_drafts:
            self._prepare_drafts(plan, max_len)
            slots = [item.slot for item in plan.items for _ in range(item.num_tokens)]
            offsets = [offset for item in plan.items for offset in range(item.num_tokens)]
        rows = StepRows(
            slots=torch.tensor(slots, dtype=torch.int32),
            offsets=torch.tensor(offsets, dtype=torch.int32),
            num_sequences=len(plan.items),
            memory=self.batch_slots.memory,
            max_len=max_len,
        )
        results = self.step(rows, self.kv.view)
        lengths = results.batch.seq_lens
        if self.drafter is not None and plan.draft_extend:
            self.drafter.observe(Observed(results.batch, results.hidden), self.batch_slots)
        return ForwardResult(rows.slots, results.logits, lengths, results.tokens, results.kept)

    def _prepare_drafts(self, plan: Plan, max_len: int) -> None:
        """Write the plan's drafts to the slots, and let the device draft for the other items."""
        for index, drafts in plan.drafts.items():
            item = plan.items[index]
            first_index = self.batch_slots.token_index(item.slot, item.max_kv_len - len(drafts))
            self.flat[first_index : first_index + len(drafts)] = drafts
        passes = slots_to_draft(plan)
        if passes:
            assert self.drafter is not None
            tensors = [torch.tensor(slots, dtype=torch.int32) for slots in passes]
            self.drafter.draft(tensors, max_len, self.batch_slots)
