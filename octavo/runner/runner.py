"""Executes plans: updates slots and blocks, prepares the batch, runs the forward pass and samples.

`launch(plan)` returns a handle without waiting for the device. `wait()` of the handle waits and
returns the results. Sampled tokens depend only on the sequence of plans. Disk events and measured
times may differ between runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from octavo.errors import DeviceOutOfMemory, is_out_of_memory
from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch, Span
from octavo.runner.batch import ForwardResult, gather, last_tokens, lay_out, watch
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.canary import Canary
from octavo.runner.cpu_steps import CpuSteps
from octavo.runner.drafter import Drafter, Observed
from octavo.runner.graph_shapes import GraphShape, RunnerLimits
from octavo.runner.kvstore import KVStore
from octavo.runner.logits_processors import LogitsPipeline
from octavo.runner.sampler import (
    RequestedLogprobs,
    SampleJob,
    adjust,
    as_records,
    choose,
    logprobs_of,
)
from octavo.runner.staging import StepTimer
from octavo.runner.tier_store import TierStore
from octavo.runner.transfer import Download, Upload, copy_async
from octavo.runner.verification import (
    compute_rows,
    keep_rows,
    lay_out_rows,
    slots_to_draft,
)
from octavo.types import Item, Plan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from octavo.runner.graphs import StepGraphs

# The logits of this many prompt positions are in memory at once: 156 MB with a vocabulary of 152k.
LOGPROB_CHUNK = 256


class PromptLogprobs(NamedTuple):
    """Prompt logprobs of some positions of one item, on their way to the host."""

    item: int
    num_top: int
    results: Download  # The tensors that logprobs_of() returns, and then the tokens.


class SampledLogprobs(NamedTuple):
    """Logprobs of sampled tokens, on their way to the host."""

    # For each record: the index of its item, and the index among the item's sampled tokens.
    places: list[tuple[int, int]]
    requested: RequestedLogprobs
    results: Download


@dataclass(slots=True)
class StepHandle:
    """A launched step. `wait` converts the results for the host."""

    items: list[Item] = field(default_factory=list)
    # One token for each item or each sampled item. In a step with drafts, one for each computed
    # token. It is None if no item is sampled.
    tokens: Download | None = None
    # Whether each row of a step with drafts is kept. It is None if there are no drafts.
    kept_rows: Download | None = None
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    attention_mass: Download | None = None  # One entry for each item that wants it, in order.
    pooled: dict[int, Download] = field(default_factory=dict)  # item index -> hidden states
    # This function adds the results that do not belong to items.
    finish: Callable[[StepResult], None] | None = None

    def wait(self) -> StepResult:
        """Wait for the end of the step, and return its results."""
        result = StepResult(self._tokens_by_item())
        self._add_logprobs(result)
        if self.kept_rows is not None:
            drop_rejected(result, self.kept_rows.wait()[0].tolist())
        if self.attention_mass is not None:
            (masses,) = self.attention_mass.wait()
            measured_items = (
                index for index, item in enumerate(self.items) if item.wants_attention_mass
            )
            result.attention_mass = dict(zip(measured_items, masses.tolist(), strict=True))
        for index, states in self.pooled.items():
            result.pooled[index] = array("f", states.wait()[0].numpy().tobytes())
        if self.finish is not None:
            self.finish(result)
        return result

    def _tokens_by_item(self) -> list[list[int]]:
        """Return the sampled tokens of each item, including those after a rejected draft."""
        tokens = self.tokens.wait()[0].tolist() if self.tokens is not None else []
        if self.kept_rows is not None:
            row_tokens = iter(tokens)
            return [list(islice(row_tokens, item.num_tokens)) for item in self.items]
        if len(tokens) < len(self.items):  # Only sampled items have a token.
            sampled_tokens = iter(tokens)
            return [[next(sampled_tokens)] if item.sample else [] for item in self.items]
        return [
            [token] if item.sample else [] for item, token in zip(self.items, tokens, strict=True)
        ]

    def _add_logprobs(self, result: StepResult) -> None:
        if self.logprobs is not None:
            places, requested, results = self.logprobs
            result.logprobs = [[] for _ in self.items]
            sampled_tokens = [result.tokens[item][offset] for item, offset in places]
            records = requested.records(sampled_tokens, results.wait())
            for (item, _), record in zip(places, records, strict=True):
                result.logprobs[item].append(record)
        if self.prompt_logprobs:
            by_item: dict[int, list[TokenLogprobs]] = {}
            for item, num_top, results in self.prompt_logprobs:
                *columns, tokens = results.wait()
                records = as_records(tokens.tolist(), columns, [slice(num_top)] * len(tokens))
                by_item.setdefault(item, []).extend(records)
            result.prompt_logprobs = by_item


def drop_rejected(result: StepResult, is_row_kept: list[bool]) -> None:
    """Drop the tokens of each item that were sampled after a rejected draft."""
    flags = iter(is_row_kept)
    for index, tokens in enumerate(result.tokens):
        count = sum(islice(flags, len(tokens)))
        del tokens[count:]
        if result.logprobs is not None:
            del result.logprobs[index][count:]


class PreparedStep(NamedTuple):
    """The data of a step that the host has prepared: indices of items, and slices of the upload."""

    # The CUDA graph to replay. None means that the step has no graph.
    graph_shape: GraphShape | None
    item_of_row: list[int]  # The sampled items. Each has one row of logits.
    watched: list[int]  # The items whose attention is measured.
    pooled: list[int]  # The items whose hidden states are reported.
    copy_sources: slice
    copy_targets: slice
    shifts: slice
    slot_changes: tuple[slice, slice]
    layout: slice
    row_items: slice  # The numbers of item_of_row.
    watched_indices: slice
    draft_slots: list[slice]  # For each pass of the drafter: the slots that it drafts for.


class Runner:
    def __init__(
        self,
        model: CausalLM,
        kv: KVStore,
        limits: RunnerLimits,
        use_graphs: bool = False,
        tier_store: TierStore | None = None,
        canary: Canary | None = None,
        drafter: Drafter | None = None,
    ):
        """Create a runner.

        `canary` checks all KV that is read, for debugging. It needs a runner without graphs and
        tiers. Without a `drafter`, the plan contains the drafts.
        """
        self.model = model
        self.kv = kv
        self.device = kv.tensor.device
        self.tier_store = tier_store
        self.batch_slots = BatchSlots(
            max_slots=limits.max_slots,
            max_len=limits.max_len,
            block_size=kv.block_size,
            device=self.device,
            is_bounded=limits.is_bounded,
        )
        self.canary = canary
        self.drafter = drafter
        self.logits_pipeline = LogitsPipeline()
        # Small steps run in one call: as a CUDA graph, or as a job of a CPU.
        self.graphs: StepGraphs | None = None
        self.cpu_steps: CpuSteps | None = None
        if use_graphs and self.device.type == "cuda":
            from octavo.runner.graphs import StepGraphs

            self.graphs = StepGraphs(model, kv, self.batch_slots, limits, drafter)
        elif use_graphs and (step := model.fuse_step()) is not None:
            self.cpu_steps = CpuSteps(step, kv, self.batch_slots, drafter)

    def capture(self) -> None:
        """Capture every graph now. Without this call, a graph is captured when it is first used."""
        if self.graphs is not None:
            self.graphs.capture_all()

    def compile_graphs(self, part: int, num_parts: int) -> None:
        """Compile the kernels of one part of the graphs, without capturing them."""
        if self.graphs is not None:
            self.graphs.compile_part(part, num_parts)

    # ---- launch ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> StepHandle:
        """Launch a step. Raises DeviceOutOfMemory if it is too large for the device's memory."""
        try:
            if self.tier_store is None:
                return self._launch_step(plan)
            return self._launch_with_tiers(plan, self.tier_store)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            raise DeviceOutOfMemory(f"no memory for a step of {plan.num_tokens} tokens") from error

    def _launch_with_tiers(self, plan: Plan, tier_store: TierStore) -> StepHandle:
        tier_store.begin(plan)
        timer = StepTimer(self.device) if plan.touches_slots or plan.loads else None
        if plan.touches_slots:
            handle = self._launch_step(plan, timer)
        else:
            # A sequence waits for the disk. Wherever a call releases the interpreter lock, reader
            # threads take it, so this path makes as few calls as possible.
            handle = StepHandle()
            if timer is not None:
                tier_store.load(plan.loads)
                timer.mark()
        verification = tier_store.take_verification()
        if timer is not None:
            timer.mark()

        def finish(result: StepResult) -> None:
            if timer is not None:
                result.load_seconds, result.compute_seconds = timer.seconds()
            if verification is not None:
                result.corrupt_host_blocks = tier_store.corrupt_blocks(verification)
            result.disk_events = tier_store.collect_events(wait=not plan.items)

        handle.finish = finish
        return handle

    def _launch_step(self, plan: Plan, timer: StepTimer | None = None) -> StepHandle:
        """Launch a step without its stores.

        It runs as a decode graph, as a mixed graph, as a job of a CPU, or kernel by kernel.
        """
        self.logits_pipeline.add(plan.slot_fills)
        watched: list[int] = []
        if self.batch_slots.is_bounded:
            watched = [index for index, item in enumerate(plan.items) if item.wants_attention_mass]
        if not watched and (handle := self._launch_decode(plan, timer)) is not None:
            return handle
        upload = Upload()
        prepared = self._prepare(plan, watched, upload)
        uploaded = upload.send(self.device)
        self._apply(plan, prepared, uploaded, timer)
        if not plan.items:
            return StepHandle()
        if self.graphs is not None and prepared.graph_shape is not None:
            return self._replay(plan, prepared, uploaded[prepared.layout], self.graphs)
        if plan.num_drafts:
            return self._verify(plan, prepared, uploaded)
        return self._run_eagerly(plan, prepared, uploaded)

    def _launch_decode(self, plan: Plan, timer: StepTimer | None) -> StepHandle | None:
        """Launch a step that only decodes as a decode graph or as a job of a CPU.

        Returns None if the step cannot run in this way.
        """
        steps: StepGraphs | CpuSteps | None = self.graphs or self.cpu_steps
        if (
            steps is None
            or not steps.is_decode(plan)
            or (plan.num_drafts and self._needs_full_sampler(plan))
        ):
            return None
        if timer is not None:
            timer.mark()
        forward = steps.replay_decode(plan)
        if not plan.num_drafts:
            return self._sample(plan, list(range(len(plan.items))), forward, [])
        assert forward.tokens is not None
        assert forward.kept_rows is not None
        return StepHandle(
            plan.items, Download(forward.tokens), kept_rows=Download(forward.kept_rows)
        )

    def _replay(
        self, plan: Plan, prepared: PreparedStep, layout: Tensor, graphs: StepGraphs
    ) -> StepHandle:
        """Launch the graph of a mixed step, or of a step that verifies drafts."""
        assert prepared.graph_shape is not None
        if prepared.graph_shape.verifies:
            forward = graphs.replay(prepared.graph_shape, layout, plan.num_tokens)
            assert forward.tokens is not None
            assert forward.kept_rows is not None
            tokens = Download(forward.tokens, copy=graphs.copy_to_host)
            return StepHandle(plan.items, tokens, kept_rows=Download(forward.kept_rows))
        forward = graphs.replay(prepared.graph_shape, layout, len(plan.items))
        if not prepared.item_of_row:
            return StepHandle(plan.items)
        return self._sample(plan, prepared.item_of_row, forward, [])

    def _prepare(self, plan: Plan, watched: list[int], upload: Upload) -> PreparedStep:
        """Collect the data that the host sends to the device."""
        items = plan.items
        item_of_row = [index for index, item in enumerate(items) if item.sample]
        pooled = [index for index, item in enumerate(items) if item.pooling is not None]
        copy_sources = upload.ints([source for source, _ in plan.copies])
        copy_targets = upload.ints([target for _, target in plan.copies])
        shifts = upload.ints([block for block, _ in plan.shifts])
        slot_changes = self.batch_slots.prepare(plan, upload)
        shape = None
        if self.graphs is not None and items and not (watched or pooled):
            shape = self._find_shape(plan, self.graphs)
        lay_out_step = lay_out_rows if plan.num_drafts else lay_out
        layout = lay_out_step(items)
        if self.graphs is not None and shape is not None:
            layout = self.graphs.lay_out(items, shape)
        drafting = slots_to_draft(plan) if plan.num_drafts and shape is None else []
        return PreparedStep(
            graph_shape=shape,
            item_of_row=item_of_row,
            watched=watched,
            pooled=pooled,
            copy_sources=copy_sources,
            copy_targets=copy_targets,
            shifts=shifts,
            slot_changes=slot_changes,
            layout=upload.ints(layout),
            row_items=upload.ints(item_of_row if shape is None else []),
            watched_indices=upload.ints(watched),
            draft_slots=[upload.ints(slots) for slots in drafting],
        )

    def _find_shape(self, plan: Plan, graphs: StepGraphs) -> GraphShape | None:
        """Return the graph to replay, or None.

        A step with drafts has no graph if a sequence needs more than Ops.choose for sampling.
        """
        shape = None
        if not plan.num_drafts:
            shape = graphs.find_mixed_shape(plan.items)
        elif not self._needs_full_sampler(plan):
            shape = graphs.find_verify_shape(plan)
        return None if shape is None else graphs.with_draft_extend(shape, plan)

    def _needs_full_sampler(self, plan: Plan) -> bool:
        """Return whether sampling needs more than Ops.choose."""
        if plan.token_masks or self.logits_pipeline.processors:
            return True
        return not self.batch_slots.full_sampler_slots.isdisjoint(item.slot for item in plan.items)

    def _apply(
        self, plan: Plan, prepared: PreparedStep, uploaded: Tensor, timer: StepTimer | None
    ) -> None:
        """Update blocks and slots before the forward pass, and run the drafter on the device.

        Plan says in which order.
        """
        if plan.copies:
            sources = uploaded[prepared.copy_sources].long()
            targets = uploaded[prepared.copy_targets].long()
            self.kv.copy(sources, targets)
            if self.drafter is not None and self.drafter.kv is not None:
                self.drafter.kv.copy(sources, targets)
        if plan.loads:
            assert self.tier_store is not None
            self.tier_store.load(plan.loads)
        if plan.shifts:
            self._shift(uploaded[prepared.shifts].long(), plan.shifts[0][1])
        if timer is not None:
            timer.mark()
        self.batch_slots.apply(prepared.slot_changes, uploaded)
        if prepared.draft_slots:
            assert self.drafter is not None
            passes = [uploaded[slots] for slots in prepared.draft_slots]
            max_len = max(item.max_kv_len for item in plan.items)
            self.drafter.draft(passes, max_len, self.batch_slots)
        if self.canary is not None:
            self.canary.check_step(plan, self.batch_slots)

    def _shift(self, blocks: Tensor, positions: int) -> None:
        """Rotate the keys of blocks back by `positions`.

        Consecutive layers with the same rotation are shifted together. These are all layers, unless
        a model has two kinds of layers.
        """
        kv = self.kv.view
        assert isinstance(kv, Tensor)
        num_layers = self.model.config.num_layers
        rope_tables = [self.model.rope_table_for_shift(layer) for layer in range(num_layers)]
        for _, run in groupby(enumerate(rope_tables), key=lambda pair: id(pair[1])):
            layers = [layer for layer, _ in run]
            rope_table = rope_tables[layers[0]]
            assert rope_table is not None
            layer_kv = kv[:, layers[0] : layers[-1] + 1]
            self.model.ops.shift(layer_kv, blocks, positions, rope_table)

    # ---- forward and sample ----------------------------------------------------------------------

    def _run_eagerly(self, plan: Plan, prepared: PreparedStep, uploaded: Tensor) -> StepHandle:
        """Run the forward pass kernel by kernel, and sample."""
        items = plan.items
        batch_slots = self.batch_slots
        item_of_row = uploaded[prepared.row_items].long()
        spans: list[Span] = []
        num_tokens = 0
        for item in items:
            spans.append(Span(num_tokens, item.num_tokens, item.max_kv_len))
            num_tokens += item.num_tokens
        batch = gather(
            uploaded[prepared.layout], len(items), batch_slots, self.kv.block_size, spans
        )
        batch.logit_indices = batch.logit_indices[item_of_row]
        wants_prompt_logprobs = any(item.prompt_logprobs is not None for item in items)
        wants_hidden = self.drafter is not None and self.drafter.needs_hidden and plan.draft_extend
        samples_all = len(prepared.item_of_row) == num_tokens
        wants_all_hidden = wants_prompt_logprobs or wants_hidden or bool(prepared.pooled)
        if prepared.item_of_row and not (wants_all_hidden or samples_all):
            batch.last = last_tokens(
                batch, item_of_row, [spans[index] for index in prepared.item_of_row]
            )
        if prepared.watched:
            max_kv_len = max(items[index].max_kv_len for index in prepared.watched)
            num_blocks = -(-max_kv_len // self.kv.block_size)
            batch.watched = watch(
                batch, uploaded[prepared.watched_indices].long(), batch_slots, num_blocks
            )
        # All other work is done before the forward pass. If there were work between the layers and
        # the head, the threads of a CPU would fall asleep.
        slots = batch.slots[item_of_row]
        lengths = batch.seq_lens[item_of_row]
        batch_slots.computed[batch.slots.long()] = batch.seq_lens
        logits: Tensor | None = None
        prompt_logprobs: list[PromptLogprobs] = []
        if (batch.last is not None or samples_all) and not wants_prompt_logprobs:
            # The model returns only the sampled tokens.
            hidden, logits = self.model.forward_with_logits(batch, self.kv.view)
        else:
            hidden = self.model(batch, self.kv.view)
            if wants_prompt_logprobs:
                prompt_logprobs = self._prompt_logprobs(items, batch, hidden)
            if prepared.item_of_row:
                logits = self.model.logits(hidden[batch.logit_indices])
        handle = StepHandle(items, prompt_logprobs=prompt_logprobs)
        if logits is not None:
            forward = ForwardResult(slots, logits, lengths)
            handle = self._sample(plan, prepared.item_of_row, forward, prompt_logprobs)
        handle.pooled = {
            index: Download(pool(hidden, spans[index], items[index].pooling))
            for index in prepared.pooled
        }
        if batch.watched is not None:
            handle.attention_mass = Download(batch.watched.mass / self.model.config.num_layers)
        if self.drafter is not None and plan.draft_extend:
            self.drafter.observe(Observed(batch, hidden), batch_slots)
        return handle

    def _verify(self, plan: Plan, prepared: PreparedStep, uploaded: Tensor) -> StepHandle:
        """Run a step that only decodes and has drafts.

        A token is sampled after every row, and each slot advances over the rows that are kept.
        """
        items = plan.items
        batch_slots = self.batch_slots
        max_len = max(item.max_kv_len for item in items)
        rows = compute_rows(self.model, self.kv, batch_slots, uploaded[prepared.layout], max_len)
        item_of_row = [index for index, item in enumerate(items) for _ in range(item.num_tokens)]
        handle = self._sample(plan, item_of_row, rows.forward, [])
        handle.kept_rows = Download(keep_rows(rows, batch_slots))
        if self.drafter is not None and plan.draft_extend:
            self.drafter.observe(Observed(rows.batch, rows.hidden), batch_slots)
        return handle

    def _sample(
        self,
        plan: Plan,
        item_of_row: list[int],
        forward: ForwardResult,
        prompt_logprobs: list[PromptLogprobs],
    ) -> StepHandle:
        """Choose a token for each row of logits. An item with drafts has several rows.

        `forward` has these rows or, from a graph, one row for each item.
        """
        batch_slots = self.batch_slots
        slots = [plan.items[index].slot for index in item_of_row]
        needs_full_sampler = plan.token_masks or self.logits_pipeline.processors
        if needs_full_sampler or not batch_slots.full_sampler_slots.isdisjoint(slots):
            return self._run_full_sampler(plan, item_of_row, forward, prompt_logprobs)
        tokens = forward.tokens
        if tokens is None:
            tokens = choose(forward, batch_slots, self.model.ops)
        copy = copy_async if self.graphs is None else self.graphs.copy_to_host
        return StepHandle(
            items=plan.items,
            tokens=Download(tokens, copy=copy),
            prompt_logprobs=prompt_logprobs,
        )

    def _run_full_sampler(
        self,
        plan: Plan,
        item_of_row: list[int],
        forward: ForwardResult,
        prompt_logprobs: list[PromptLogprobs],
    ) -> StepHandle:
        """Choose tokens if some items need more than Ops.choose for sampling."""
        items = plan.items
        batch_slots = self.batch_slots
        slots = [items[index].slot for index in item_of_row]
        upload = Upload()
        places = list(number_repeats(item_of_row))
        job = SampleJob.prepare(
            slots=slots,
            max_len=max(items[index].max_kv_len for index in item_of_row),
            batch_slots=batch_slots,
            upload=upload,
            masks={
                row: plan.token_masks[index][offset]
                for row, (index, offset) in enumerate(places)
                if index in plan.token_masks
            },
        )
        requested = RequestedLogprobs.of(slots, batch_slots)
        requested_indices = upload.ints(requested.items)
        named_tokens = upload.ints(requested.padded())
        row_items = upload.ints(item_of_row)
        uploaded = upload.send(self.device)
        if len(item_of_row) < len(forward.slots):
            index = uploaded[row_items].long()
            forward = ForwardResult(
                forward.slots[index], forward.logits[index], forward.lengths[index]
            )
        requested_rows = uploaded[requested_indices].long()
        # Logprobs are computed from the logits before adjust() changes them.
        raw_logits = forward.logits[requested_rows] if requested.items else None
        forward = forward._replace(logits=forward.logits.float())
        if self.logits_pipeline.applies_to(slots):
            logits = self.logits_pipeline.apply(forward, slots, batch_slots)
            forward = forward._replace(logits=logits)
        adjusted = forward._replace(logits=adjust(forward, job, batch_slots, uploaded))
        tokens = choose(adjusted, batch_slots, self.model.ops)
        handle = StepHandle(items, Download(tokens), prompt_logprobs=prompt_logprobs)
        if raw_logits is not None:
            named = None
            if any(requested.named):
                named = uploaded[named_tokens].long().view(len(requested.items), -1)
            columns = logprobs_of(raw_logits, tokens[requested_rows], requested.max_count, named)
            requested_places = [places[row] for row in requested.items]
            handle.logprobs = SampledLogprobs(requested_places, requested, Download(*columns))
        return handle

    def _prompt_logprobs(
        self, items: list[Item], batch: ForwardBatch, hidden: Tensor
    ) -> list[PromptLogprobs]:
        """Compute the logprobs of the token after each position, for items that want them."""
        results: list[PromptLogprobs] = []
        for index, (item, span) in enumerate(zip(items, batch.spans, strict=True)):
            num_top = item.prompt_logprobs
            if num_top is None:
                continue
            end = span.first + span.num
            for start in range(span.first, end, LOGPROB_CHUNK):
                chunk = slice(start, min(start + LOGPROB_CHUNK, end))
                tokens = self.batch_slots.tokens[item.slot, batch.positions[chunk] + 1]
                logprobs = logprobs_of(self.model.logits(hidden[chunk]), tokens, num_top)
                results.append(PromptLogprobs(index, num_top, Download(*logprobs, tokens)))
        return results


def pool(hidden: Tensor, span: Span, pooling: str | None) -> Tensor:
    """Return hidden states of one item in float32: the last state, the sum, or all states."""
    states = hidden[span.first : span.first + span.num]
    if pooling == "last":
        states = states[-1]
    states = states.float()
    return states.sum(0) if pooling == "mean" else states


def number_repeats(items: list[int]) -> Iterator[tuple[int, int]]:
    """Yield each item with the number of times it occurred directly before."""
    for item, repeats in groupby(items):
        for offset, _ in enumerate(repeats):
            yield item, offset
