"""Steps as CUDA graphs: all kernels of a step in one launch. Nothing else knows that graphs exist.

A step launches some 250 kernels; from Python that takes longer than a small step computes: 17 ms for Qwen3-0.6B, of which
one decode step takes 1. A graph has a fixed size, so there is a ladder of sizes and a step takes the next larger one:

    decode   every item is one token; sampled in the graph. What is left over is the padding row, at position 0 of block 0
    mixed    up to 512 tokens of any items, sampled in the graph too. What is left over is one more item, of the padding row
    beside   the same, up to 640 tokens, and the first so many items are one token each: attention takes those for decoding rows.
             No row is left over for that: who decodes and is not among them is an item like any other

Attention lengths, tokens and tables are read from device memory when the graph runs.
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
from octavo.ops.triton.step_inputs import advance, tell
from octavo.runner.batch import gather, lay_out_padded, only_last
from octavo.runner.batch_slots import Rows
from octavo.runner.kvstore import KVStore
from octavo.runner.sampler import choose
from octavo.runner.shapes import Shape, decode_sizes, mixed_shapes
from octavo.types import Item, Plan


@dataclass(slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # what the host says, int32
    logits: Tensor  # [items, vocab]
    lengths: Tensor  # [items]
    tokens: Tensor  # [items]
    # what inputs hold: of few rows nothing changes from most steps to the next
    said: list[int] = field(default_factory=list)


class StepGraphs:
    tell = staticmethod(tell)  # how what a step has drawn reaches the host

    def __init__(
        self, model: CausalLM, kv: KVStore, rows: Rows, max_rows: int, max_len: int, max_tokens: int
    ):
        self.model = model
        self.kv = kv
        self.rows = rows
        self.max_len = max_len
        self.decode_sizes = decode_sizes(max_rows)
        # Not above max_len: what is left over of a graph is one item, and it too must fit a row.
        self.mixed_shapes = [
            s for s in mixed_shapes(max_rows, max_tokens) if s.tokens - s.decoding <= max_len
        ]
        self.captured: dict[Shape, Captured] = {}
        self.pool: Any = None  # memory that all graphs share: only one runs at a time

    def capture_all(self) -> None:
        """The largest first: the others then fit in its memory."""
        for size in reversed(self.decode_sizes):
            self._get(Shape(size, size))
        for shape in reversed(self.mixed_shapes):
            self._get(shape)
        self.tell(torch.empty(1, dtype=torch.int32, pin_memory=True), self.rows.ints[0, :1])

    # ---- decode ------------------------------------------------------------------------------------

    def decodes(self, plan: Plan) -> bool:
        """A step that only decodes: one token a row, nothing new, nothing copied or loaded. Stores are done before it."""
        changed = plan.new_slots or plan.copies or plan.loads
        return (
            bool(plan.items)
            and not changed
            and all(i.num_tokens == 1 and i.sample for i in plan.items)
        )

    def decode(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Launch the step. (rows, logits, lengths, tokens) of its items, valid until the next launch."""
        count = len(plan.items)
        size = self.decode_sizes[bisect.bisect_left(self.decode_sizes, count)]
        captured = self._get(Shape(size, size))
        fresh = {row: block for row, _, block in plan.block_appends}
        rows = [item.slot for item in plan.items]
        blocks = [fresh.get(row, 0) for row in rows] if fresh else [0] * count
        pad = size - count
        said = rows + [self.rows.padding] * pad + blocks + [0] * pad
        if said != captured.said:
            captured.inputs.copy_(
                torch.tensor(said, dtype=torch.int32, pin_memory=True), non_blocking=True
            )
            captured.said = said
        captured.graph.replay()
        return (
            captured.inputs[:count],
            captured.logits[:count],
            captured.lengths[:count],
            captured.tokens[:count],
        )

    def decode_step(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, lengths, tokens). inputs [2 * size]: rows, then the new block of each or 0."""
        rows, fresh = inputs.view(2, -1)
        state = self.rows
        ids, positions, slots, seq_lens = advance(
            rows,
            fresh,
            state.tokens,
            state.table,
            state.computed,
            state.padding,
            self.kv.block_size,
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
            spans=[Span(i, 1, self.max_len) for i in range(len(rows))],
        )
        logits = self.model.logits(self.model(batch, self.kv.view))
        return logits, seq_lens, choose(logits, rows, seq_lens, state, self.model.ops)

    # ---- mixed -------------------------------------------------------------------------------------

    def mixed_shape(self, items: list[Item]) -> Shape | None:
        """The smallest graph that these items fit in, if there is one; of equals the one that takes most for decoding."""
        tokens = sum(item.num_tokens for item in items)
        if any(item.prompt_logprobs is not None for item in items):
            return None
        singles = next((i for i, item in enumerate(items) if item.num_tokens != 1), len(items))
        fit = (
            s
            for s in self.mixed_shapes
            if s.tokens >= tokens and s.decoding <= singles and s.items > len(items)
        )
        return next(fit, None)

    def lay_out(self, items: list[Item], shape: Shape) -> NDArray[np.int32]:
        """As in batch.py, and then for each item whether it is sampled."""
        sampled = np.zeros(shape.items, np.int32)
        sampled[: len(items)] = [item.sample for item in items]
        return np.concatenate(
            [
                lay_out_padded(items, self.rows.padding, shape.items, shape.tokens, shape.decoding),
                sampled,
            ]
        )

    def mixed(
        self, shape: Shape, laid_out: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Launch the step. (rows, logits, lengths, tokens) of its items; tokens of those that are not sampled mean nothing."""
        captured = self._get(shape)
        captured.inputs.copy_(laid_out)
        captured.graph.replay()
        return (
            captured.inputs[:count],
            captured.logits[:count],
            captured.lengths[:count],
            captured.tokens[:count],
        )

    def mixed_step(self, inputs: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, lengths, tokens) of every item's last token. inputs: lay_out()'s."""
        (decoding, tokens) = shape
        count = shape.items
        laid_out = inputs[:-count]
        sampled = inputs[-count:]
        spans = [Span(i, 1, self.max_len) for i in range(decoding)]
        # no item of the rest is taken for decoding
        spans += [Span(decoding, tokens - decoding, self.max_len)]
        spans += [Span(tokens, 0, self.max_len)] * (count - len(spans))
        batch = gather(laid_out, count, self.rows, self.kv.block_size, spans)
        batch.last = only_last(batch, torch.arange(count, device=laid_out.device), spans)
        hidden = self.model(batch, self.kv.view)
        self.rows.computed[batch.rows.long()] = batch.seq_lens
        self.rows.computed[self.rows.padding :].zero_()
        logits = self.model.logits(hidden)
        return (
            logits,
            batch.seq_lens,
            choose(logits, batch.rows, batch.seq_lens, self.rows, self.model.ops, sampled),
        )

    # ---- capture -----------------------------------------------------------------------------------

    def _get(self, shape: Shape) -> Captured:
        if shape not in self.captured:
            self.captured[shape] = self._capture(shape)
        return self.captured[shape]

    def _step(self, inputs: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.decode_step(inputs)
            if shape.decoding == shape.tokens
            else self.mixed_step(inputs, shape)
        )

    def nobody(self, shape: Shape) -> Tensor:
        """Inputs of a step in which all items are the padding row's."""
        decode = [self.rows.padding] * shape.tokens + [0] * shape.tokens
        inputs = np.array(decode) if shape.decoding == shape.tokens else self.lay_out([], shape)
        return torch.from_numpy(inputs.astype(np.int32)).to(self.kv.tensor.device)

    @torch.inference_mode()
    def _capture(self, shape: Shape) -> Captured:
        inputs = self.nobody(shape)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        self._step(inputs, shape)  # once as it is: compiles kernels, lets libraries allocate
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits, lengths, tokens = self._step(inputs, shape)
        return Captured(graph, inputs, logits, lengths, tokens)
