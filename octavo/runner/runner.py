"""launch(plan): bring rows and blocks up to date, prepare the batch, forward, sample. Returns a handle at once.

A pure function of the stream of plans. Nothing here waits for the device; the handle does, when it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.errors import DeviceOutOfMemory
from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch, Span
from octavo.runner.batch import gather, lay_out, only_last, watch
from octavo.runner.batch_slots import Rows
from octavo.runner.canary import Canary
from octavo.runner.kvstore import KVStore
from octavo.runner.sampler import (
    AskedLogprobs,
    SampleJob,
    adjust,
    as_records,
    choose,
    logprobs_of,
)
from octavo.runner.staging import Lap
from octavo.runner.tier_store import TierStore
from octavo.runner.transfer import Download, Upload, copy
from octavo.types import Item, Plan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from octavo.runner.graphs import StepGraphs

# prompt positions whose full logits exist at once: 156 MB at a vocabulary of 152k
LOGPROB_CHUNK = 256


@dataclass(slots=True)
class StepHandle:
    """A launched step. Results are laid out for the host only when it asks for them."""

    items: list[Item]
    tokens: Download | None  # one an item, or one a sampled item; None: nothing is sampled
    # sampled items that asked, what they asked for, results
    logprobs: tuple[list[int], AskedLogprobs, Download] | None
    # item, how many top, results with the tokens last
    prompt_logprobs: list[tuple[int, int, Download]]
    # of the items that asked, in order: a row each, all layers together
    mass: Download | None = None
    finish: Callable[[StepResult], None] | None = None  # adds what is not of the items

    def wait(self) -> StepResult:
        values = self.tokens.wait()[0].tolist() if self.tokens is not None else []
        if len(values) < len(self.items):  # only of those that are sampled
            sampled = iter(values)
            values = [next(sampled) if item.sample else 0 for item in self.items]
        result = StepResult(
            [[value] if item.sample else [] for item, value in zip(self.items, values, strict=True)]
        )
        if self.logprobs is not None:
            which, asked, download = self.logprobs
            result.logprobs = [[] for _ in self.items]
            chosen = [result.tokens[i][0] for i in which]
            for i, record in zip(which, asked.records(chosen, download.wait()), strict=True):
                result.logprobs[i] = [record]
        if self.prompt_logprobs:
            gathered: dict[int, list[TokenLogprobs]] = {}
            for i, num_top, download in self.prompt_logprobs:
                *parts, after = download.wait()
                gathered.setdefault(i, []).extend(
                    as_records(after.tolist(), parts, [slice(num_top)] * len(after))
                )
            result.prompt_logprobs = gathered
        if self.mass is not None:
            (rows,) = self.mass.wait()
            watched = (i for i, item in enumerate(self.items) if item.wants_attention_mass)
            result.attention_mass = dict(zip(watched, rows.tolist(), strict=True))
        if self.finish is not None:
            self.finish(result)
        return result


class Runner:
    def __init__(
        self,
        model: CausalLM,
        kv: KVStore,
        max_rows: int,
        max_len: int,
        max_tokens: int,
        device: torch.device,
        graphs: bool = False,
        tiers: TierStore | None = None,
        canary: Canary | None = None,
        evicting: bool = False,
    ):
        """`canary`: look after KV, for debugging; only without graphs and tiers."""
        self.model = model
        self.kv = kv
        self.device = device
        self.tiers = tiers
        self.rows = Rows(max_rows, max_len, kv.block_size, device, evicting)
        self.canary = canary
        self.graphs: StepGraphs | None = None
        if graphs:
            from octavo.runner.graphs import StepGraphs

            self.graphs = StepGraphs(model, kv, self.rows, max_rows, max_len, max_tokens)

    def capture(self) -> None:
        """Capture every graph now. Otherwise each is captured when it is first needed."""
        if self.graphs is not None:
            self.graphs.capture_all()

    def launch(self, plan: Plan) -> StepHandle:
        """Raises DeviceOutOfMemory if the step is too large for what is left of the device's memory."""
        try:
            return self._begin(plan)
        except torch.OutOfMemoryError as error:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            raise DeviceOutOfMemory(f"no memory for a step of {plan.num_tokens} tokens") from error

    @torch.inference_mode()
    def _begin(self, plan: Plan) -> StepHandle:
        tiers = self.tiers
        if tiers is None:
            return self._launch(plan)
        tiers.begin(plan)
        lap = Lap(self.device) if plan.touches_slots or plan.loads else None
        if plan.touches_slots:
            handle = self._launch(plan, lap)
        else:  # somebody waits for the disk, whose readers take the interpreter wherever a call gives it up: as few as can be
            handle = StepHandle([], None, None, [])
            if lap is not None:
                tiers.load(plan.loads)
                lap.mark()
        check = tiers.take_check()
        if lap is not None:
            lap.mark()

        def finish(result: StepResult) -> None:
            if lap is not None:
                result.load_seconds, result.compute_seconds = lap.seconds()
            if check is not None:
                result.corrupt_host_blocks = tiers.spoilt(check)
            result.disk_events = tiers.news(wait=not plan.items)

        handle.finish = finish
        return handle

    def _launch(self, plan: Plan, lap: Lap | None = None) -> StepHandle:
        """The step but for what leaves the device."""
        graphs = self.graphs
        items = plan.items
        watched = (
            [i for i, item in enumerate(items) if item.wants_attention_mass]
            if self.rows.evicting
            else []
        )
        if graphs is not None and not watched and graphs.decodes(plan):
            if lap is not None:
                lap.mark()
            rows, logits, lengths, tokens = graphs.decode(plan)
            return self._sample(plan, list(range(len(items))), rows, logits, lengths, [], tokens)
        up = Upload()
        copies = [up.ints([c[k] for c in plan.copies]) for k in range(2)]
        shifts = up.ints([block for block, _ in plan.shifts])
        changes = self.rows.stage(plan, up)
        shape = graphs.mixed_shape(items) if graphs is not None and items and not watched else None
        laid_out = up.ints(
            lay_out(items) if graphs is None or shape is None else graphs.lay_out(items, shape)
        )
        sampled = [i for i, item in enumerate(items) if item.sample]
        sampled_at = up.ints(sampled if shape is None else [])
        watched_at = up.ints(watched)
        shipped = up.ship(self.device)

        if plan.copies:
            self.kv.copy(shipped[copies[0]].long(), shipped[copies[1]].long())
        if plan.loads:
            assert self.tiers is not None
            self.tiers.load(plan.loads)
        if plan.shifts:
            self._shift(shipped[shifts].long(), plan.shifts[0][1])
        if lap is not None:
            lap.mark()
        self.rows.apply(changes, shipped)
        if self.canary is not None:
            self.canary.step(plan, self.rows)
        if not items:
            return StepHandle([], None, None, [])
        prompt_logprobs: list[tuple[int, int, Download]] = []
        chosen = None
        if graphs is not None and shape is not None:
            rows, logits, lengths, chosen = graphs.mixed(shape, shipped[laid_out], len(items))
        else:
            index = shipped[sampled_at].long()
            spans = []
            first = 0
            for item in items:
                spans.append(Span(first, item.num_tokens, item.max_kv_len))
                first += item.num_tokens
            batch = gather(shipped[laid_out], len(items), self.rows, self.kv.block_size, spans)
            batch.logit_rows = batch.logit_rows[index]
            asked = any(item.prompt_logprobs is not None for item in items)
            if sampled and not asked and len(sampled) < first:
                batch.last = only_last(batch, index, [spans[i] for i in sampled])
            if watched:
                width = -(-max(items[i].max_kv_len for i in watched) // self.kv.block_size)
                batch.watched = watch(batch, shipped[watched_at].long(), self.rows, width)
            # Between layers and head nothing is left to do: a CPU's threads would fall asleep over it.
            rows = batch.rows[index]
            lengths = batch.seq_lens[index]
            self.rows.computed[batch.rows.long()] = batch.seq_lens
            hidden = self.model(batch, self.kv.view)
            if asked:
                prompt_logprobs = self._prompt_logprobs(items, batch, hidden)
                # else the model returned these alone: `last`, or all tokens are sampled
                hidden = hidden[batch.logit_rows]
            logits = self.model.logits(hidden) if sampled else hidden
        if not sampled:
            return StepHandle(items, None, None, prompt_logprobs)
        handle = self._sample(plan, sampled, rows, logits, lengths, prompt_logprobs, chosen)
        if watched:
            assert batch.watched is not None
            handle.mass = Download(batch.watched.mass / self.model.config.num_layers)
        return handle

    def _shift(self, blocks: Tensor, by: int) -> None:
        """Layers that are rotated alike stand together in a few runs: all of them, but for models with two kinds of layers."""
        kv = self.kv.view
        angles = [self.model.angles(i) for i in range(self.model.config.num_layers)]
        assert isinstance(kv, Tensor)
        for _, run in groupby(enumerate(angles), key=lambda pair: id(pair[1])):
            first, *rest = run
            assert first[1] is not None
            self.model.ops.shift(kv[:, first[0] : first[0] + 1 + len(rest)], blocks, by, first[1])

    def _sample(
        self,
        plan: Plan,
        sampled: list[int],
        rows: Tensor,
        logits: Tensor,
        lengths: Tensor,
        prompt_logprobs: list[tuple[int, int, Download]],
        chosen: Tensor | None = None,
    ) -> StepHandle:
        """Choose a token for each sampled item: rows, lengths [R] and logits [R, vocab] are theirs. Of a graph they are
        those of all items, and `chosen` [R] what it has drawn already, going by temperature alone."""
        items = plan.items
        host_rows = [items[i].slot for i in sampled]
        if not plan.token_masks and self.rows.special.isdisjoint(host_rows):
            if chosen is None:
                chosen = choose(logits, rows, lengths, self.rows, self.model.ops)
            by = copy if self.graphs is None else self.graphs.tell
            return StepHandle(items, Download(chosen, by=by), None, prompt_logprobs)
        up = Upload()
        masks = {k: plan.token_masks[i] for k, i in enumerate(sampled) if i in plan.token_masks}
        job = SampleJob.stage(
            host_rows, max(items[i].max_kv_len for i in sampled), self.rows, up, masks
        )
        asked = AskedLogprobs.of(host_rows, self.rows)
        asked_at = up.ints(asked.rows)
        named_at = up.ints(asked.padded())
        sampled_at = up.ints(sampled)
        shipped = up.ship(self.device)
        if len(sampled) < len(rows):
            index = shipped[sampled_at].long()
            rows = rows[index]
            logits = logits[index]
            lengths = lengths[index]
        which = shipped[asked_at].long()
        raw = logits[which] if asked.rows else None  # as the model gave them
        adjusted = adjust(logits.float(), rows, lengths, job, self.rows, shipped)
        tokens = choose(adjusted, rows, lengths, self.rows, self.model.ops)
        logprobs = None
        if raw is not None:
            named = shipped[named_at].long().view(len(asked.rows), -1)
            parts = logprobs_of(raw, tokens[which], asked.most, named if any(asked.named) else None)
            logprobs = ([sampled[k] for k in asked.rows], asked, Download(*parts))
        return StepHandle(items, Download(tokens), logprobs, prompt_logprobs)

    def _prompt_logprobs(
        self, items: list[Item], batch: ForwardBatch, hidden: Tensor
    ) -> list[tuple[int, int, Download]]:
        """For each position of the items that asked: logprobs of the token that stands after it."""
        out = []
        for i, (item, span) in enumerate(zip(items, batch.spans, strict=True)):
            if item.prompt_logprobs is None:
                continue
            for first in range(span.first, span.first + span.num, LOGPROB_CHUNK):
                part = slice(first, min(first + LOGPROB_CHUNK, span.first + span.num))
                after = self.rows.tokens[item.slot, batch.positions[part] + 1]
                logits = self.model.logits(hidden[part])
                out.append(
                    (
                        i,
                        item.prompt_logprobs,
                        Download(*logprobs_of(logits, after, item.prompt_logprobs), after),
                    )
                )
        return out
