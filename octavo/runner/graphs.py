"""Captures steps as CUDA graphs, which launch all kernels of a step with one call.

A step has about 250 kernels. Launching them from Python takes longer than computing a small step:
17 ms for Qwen3-0.6B, whose decode step takes 1 ms. A graph has a fixed size. There are graphs of
several sizes, and a step uses the next larger one:

    decode     Every item is one token, which is sampled in the graph. Unused rows are padded with
               the padding slot, at position 0 of block 0.
    mixed      Up to 512 tokens of any items. Their next tokens are sampled in the graph too. One
               more item of the padding slot fills the unused rows.
    piggyback  Like mixed, with up to 640 tokens. The first items have one token each, and attention
               treats them as decoding. Further decoding sequences are ordinary items.
    verify     Like decode, but several rows may belong to one sequence, because they verify its
               drafts (octavo/runner/verification.py). A drafter on the device runs first.

A graph reads attention lengths, tokens and block tables from device memory when it runs.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch, Span
from octavo.ops.triton.step_inputs import advance, copy_to_host
from octavo.runner.batch import ForwardResult, gather, last_tokens, lay_out_padded
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.drafter import Drafter, Observed
from octavo.runner.graph_shapes import (
    GraphShape,
    RunnerLimits,
    decode_sizes,
    mixed_shapes,
    verify_shapes,
)
from octavo.runner.kvstore import KVStore
from octavo.runner.sampler import choose
from octavo.runner.verification import (
    changes_slots,
    compute_rows,
    keep_rows,
    lay_out_drafts,
    slots_to_draft,
)
from octavo.types import Item, Plan


@dataclass(slots=True)
class StepGraph:
    """A captured graph and its buffers."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # The buffer that the host fills (int32).
    result: ForwardResult  # The result for all items of the graph.
    # The contents of `inputs`. Small decode steps mostly need the same inputs as the step before.
    sent_inputs: list[int] = field(default_factory=list)

    def replay(self, num_items: int) -> ForwardResult:
        """Launch the graph. The result is valid until the next launch."""
        self.graph.replay()
        outputs = [None if output is None else output[:num_items] for output in self.result]
        return ForwardResult._make(outputs)


class StepGraphs:
    copy_to_host = staticmethod(copy_to_host)  # This function copies sampled tokens to the host.

    def __init__(
        self,
        model: CausalLM,
        kv: KVStore,
        batch_slots: BatchSlots,
        limits: RunnerLimits,
        drafter: Drafter | None = None,
    ):
        self.model = model
        self.kv = kv
        self.batch_slots = batch_slots
        self.drafter = drafter
        self.max_len = limits.max_len
        self.decode_sizes = decode_sizes(limits.max_slots)
        self.verify_shapes = verify_shapes(limits)
        # The padding of a graph is one item, and it must fit a slot like any other.
        self.mixed_shapes = [
            shape
            for shape in mixed_shapes(limits.max_slots, limits.max_tokens)
            if shape.tokens - shape.decoding <= limits.max_len
        ]
        self.graphs: dict[GraphShape, StepGraph] = {}
        self.pool: Any = None  # The memory that all graphs share, because one runs at a time.

    def shapes(self) -> list[GraphShape]:
        """Return the shapes of all graphs, the largest of each kind first.

        With a drafter on the device, each shape without drafts has two graphs: with and without a
        draft extend.
        """
        decode_shapes = [GraphShape(size, size) for size in self.decode_sizes]
        plain_shapes = decode_shapes[::-1] + self.mixed_shapes[::-1]
        if self.drafter is None:
            return plain_shapes + self.verify_shapes[::-1]
        return [
            *(
                shape._replace(draft_extend=draft_extend)
                for shape in plain_shapes
                for draft_extend in (True, False)
            ),
            *(shape._replace(draft_extend=True) for shape in self.verify_shapes[::-1]),
        ]

    @torch.inference_mode()
    def compile_part(self, part: int, num_parts: int) -> None:
        """Run every num_parts-th step that has a graph, so that its kernels are compiled."""
        for shape in self.shapes()[part::num_parts]:
            self._run(self.padding_inputs(shape), shape)

    def capture_all(self) -> None:
        """Capture all graphs, the largest first, so that the others fit into its memory."""
        for shape in self.shapes():
            self._graph_for(shape)
        host = torch.empty(1, dtype=torch.int32, pin_memory=True)
        self.copy_to_host(host, self.batch_slots.ints[0, :1])

    def with_draft_extend(self, shape: GraphShape, plan: Plan) -> GraphShape:
        """Return the shape with a draft extend if the plan asks for one."""
        return shape._replace(draft_extend=self.drafter is not None and plan.draft_extend)

    # ---- decode ----------------------------------------------------------------------------------

    def is_decode(self, plan: Plan) -> bool:
        """Return whether a step only decodes.

        Such a step has one token per item, and no new slots, copies or loads. It may have stores,
        because they run before it.
        """
        if changes_slots(plan):
            return False
        return all(item.num_tokens == 1 and item.sample for item in plan.items)

    def replay_decode(self, plan: Plan) -> ForwardResult:
        """Launch a decode step."""
        num_items = len(plan.items)
        size = self.decode_sizes[bisect.bisect_left(self.decode_sizes, num_items)]
        captured = self._graph_for(self.with_draft_extend(GraphShape(size, size), plan))
        slots = [item.slot for item in plan.items]
        blocks = [0] * num_items
        if plan.table_updates:
            new_blocks = {slot: block for slot, _, block in plan.table_updates}
            blocks = [new_blocks.get(slot, 0) for slot in slots]
        num_padding = size - num_items
        padding = [self.batch_slots.padding_slot] * num_padding
        inputs = slots + padding + blocks + [0] * num_padding
        if inputs != captured.sent_inputs:
            pinned = torch.tensor(inputs, dtype=torch.int32, pin_memory=True)
            captured.inputs.copy_(pinned, non_blocking=True)
            captured.sent_inputs = inputs
        return captured.replay(num_items)

    def run_decode(self, inputs: Tensor, shape: GraphShape) -> ForwardResult:
        """Compute a decode step. inputs [2 * size] has slots, then the new block of each, or 0."""
        slots, new_blocks = inputs.view(2, -1)
        batch_slots = self.batch_slots
        ids, positions, kv_indices, seq_lens = advance(
            slots,
            new_blocks,
            batch_slots.tokens,
            batch_slots.block_table,
            batch_slots.computed,
            batch_slots.padding_slot,
            self.kv.block_size,
        )
        batch = ForwardBatch(
            ids=ids,
            positions=positions,
            kv_indices=kv_indices,
            query_start=torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
            seq_lens=seq_lens,
            block_table=batch_slots.block_table,
            slots=slots,
            logit_indices=slots,  # This is unused, because every token has logits.
            spans=[Span(index, 1, self.max_len) for index in range(len(slots))],
        )
        hidden, logits = self.model.forward_with_logits(batch, self.kv.view)
        forward = ForwardResult(slots, logits, seq_lens)
        forward = forward._replace(tokens=choose(forward, batch_slots, self.model.ops))
        self._observe(batch, hidden, shape)
        return forward

    def _observe(self, batch: ForwardBatch, hidden: Tensor, shape: GraphShape) -> None:
        """Let the drafter on the device compute its KV, if the step has a draft extend."""
        if self.drafter is not None and shape.draft_extend:
            self.drafter.observe(Observed(batch, hidden), self.batch_slots)

    def replay(self, shape: GraphShape, layout: Tensor, num_rows: int) -> ForwardResult:
        """Launch a step with the array of lay_out().

        Returns the results of the first `num_rows` items, or of the first rows of a step with
        drafts. The token of an item that is not sampled is undefined.
        """
        captured = self._graph_for(shape)
        captured.inputs.copy_(layout)
        return captured.replay(num_rows)

    # ---- mixed -----------------------------------------------------------------------------------

    def find_mixed_shape(self, items: list[Item]) -> GraphShape | None:
        """Return the smallest graph that these items fit in, or None.

        Of graphs with the same size, this is the one with the most decoding items.
        """
        if any(item.prompt_logprobs is not None for item in items):
            return None
        num_tokens = sum(item.num_tokens for item in items)
        num_items = len(items)
        num_single = next(
            (index for index, item in enumerate(items) if item.num_tokens != 1), num_items
        )
        for shape in self.mixed_shapes:
            fits = shape.tokens >= num_tokens and shape.items > num_items
            if fits and shape.decoding <= num_single:
                return shape
        return None

    def lay_out(self, items: list[Item], shape: GraphShape) -> NDArray[np.int32]:
        """Lay out items as in batch.py, followed by a flag for each item that is sampled.

        For a step that verifies drafts, lay out rows as in verification.py.
        """
        if shape.verifies:
            return lay_out_drafts(
                items=items,
                num_passes=shape.num_passes,
                num_drafting=shape.drafting,
                num_rows=shape.tokens,
                padding_slot=self.batch_slots.padding_slot,
            )
        is_sampled = np.zeros(shape.items, np.int32)
        is_sampled[: len(items)] = [item.sample for item in items]
        layout = lay_out_padded(
            items=items,
            padding_slot=self.batch_slots.padding_slot,
            num_items=shape.items,
            num_tokens=shape.tokens,
            num_decoding=shape.decoding,
        )
        return np.concatenate([layout, is_sampled])

    def run_mixed(self, inputs: Tensor, shape: GraphShape) -> ForwardResult:
        """Compute a mixed step, and sample after the last token of every item.

        `inputs` come from lay_out().
        """
        num_items = shape.items
        layout = inputs[:-num_items]
        is_sampled = inputs[-num_items:]
        spans = [Span(index, 1, self.max_len) for index in range(shape.decoding)]
        # One span covers all other tokens, so that attention treats none of them as decoding.
        spans.append(Span(shape.decoding, shape.tokens - shape.decoding, self.max_len))
        spans += [Span(shape.tokens, 0, self.max_len)] * (num_items - len(spans))
        batch_slots = self.batch_slots
        batch = gather(layout, num_items, batch_slots, self.kv.block_size, spans)
        if shape.draft_extend and self.drafter is not None and self.drafter.needs_hidden:
            hidden = self.model(batch, self.kv.view)
            logits = self.model.logits(hidden[batch.logit_indices])
        else:
            all_items = torch.arange(num_items, device=layout.device)
            batch.last = last_tokens(batch, all_items, spans)
            hidden, logits = self.model.forward_with_logits(batch, self.kv.view)
        batch_slots.computed[batch.slots.long()] = batch.seq_lens
        batch_slots.computed[batch_slots.padding_slot :].zero_()
        forward = ForwardResult(batch.slots, logits, batch.seq_lens)
        tokens = choose(forward, batch_slots, self.model.ops, is_sampled)
        self._observe(batch, hidden, shape)
        return forward._replace(tokens=tokens)

    # ---- verify ----------------------------------------------------------------------------------

    def find_verify_shape(self, plan: Plan) -> GraphShape | None:
        """Return the smallest graph that verifies the drafts of a plan, or None."""
        num_passes = len(slots_to_draft(plan))
        if plan.drafts and num_passes:
            return None  # The host drafts for some sequences, and the device for others.
        for shape in self.verify_shapes:
            fits = shape.tokens >= plan.num_tokens and shape.drafting >= len(plan.items)
            if fits and shape.num_passes == num_passes:
                return shape
        return None

    def run_verify(self, inputs: Tensor, shape: GraphShape) -> ForwardResult:
        """Compute a step that verifies drafts. `inputs` come from lay_out()."""
        batch_slots = self.batch_slots
        drafting, layout = inputs.split([shape.num_passes * shape.drafting, 2 * shape.tokens])
        if shape.num_passes:
            assert self.drafter is not None
            passes = drafting.view(shape.num_passes, shape.drafting).unbind()
            self.drafter.draft(passes, self.max_len, batch_slots)
        rows = compute_rows(self.model, self.kv, batch_slots, layout, self.max_len)
        tokens = choose(rows.forward, batch_slots, self.model.ops)
        kept_rows = keep_rows(rows, batch_slots)
        self._observe(rows.batch, rows.hidden, shape)
        return rows.forward._replace(tokens=tokens, kept_rows=kept_rows)

    # ---- capture ---------------------------------------------------------------------------------

    def _graph_for(self, shape: GraphShape) -> StepGraph:
        if shape not in self.graphs:
            self.graphs[shape] = self._capture(shape)
        return self.graphs[shape]

    def _run(self, inputs: Tensor, shape: GraphShape) -> ForwardResult:
        if shape.verifies:
            return self.run_verify(inputs, shape)
        if shape.decoding == shape.tokens:
            return self.run_decode(inputs, shape)
        return self.run_mixed(inputs, shape)

    def padding_inputs(self, shape: GraphShape) -> Tensor:
        """Return inputs of a step in which every item uses the padding slot."""
        if shape.decoding == shape.tokens and not shape.verifies:
            slots = [self.batch_slots.padding_slot] * shape.tokens
            inputs = np.array(slots + [0] * shape.tokens, dtype=np.int32)
        else:
            inputs = self.lay_out([], shape)
        return torch.from_numpy(inputs).to(self.kv.tensor.device)

    @torch.inference_mode()
    def _capture(self, shape: GraphShape) -> StepGraph:
        inputs = self.padding_inputs(shape)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        # This run is not captured. It compiles kernels, and libraries allocate their memory.
        self._run(inputs, shape)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = self._run(inputs, shape)
        return StepGraph(graph, inputs, result)
