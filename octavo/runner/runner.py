"""launch(plan): bring rows and blocks up to date, prepare the batch, forward, sample. Returns a handle at once.

A pure function of the stream of plans. Nothing here waits for the device; the handle does, when it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch, Span
from octavo.runner.kvstore import KVStore
from octavo.runner.rows import Rows
from octavo.runner.sampler import SampleJob, adjust, as_records, choose, logprobs_of
from octavo.runner.transfer import Download, Upload
from octavo.types import Item, Plan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from octavo.runner.graphs import DecodeGraphs

LOGPROB_CHUNK = 256  # prompt positions whose full logits exist at once: 156 MB at a vocabulary of 152k


@dataclass(slots=True)
class StepHandle:
    """A launched step. Results are laid out for the host only when it asks for them."""

    items: list[Item]
    tokens: Download
    logprobs: tuple[list[int], list[int], Download] | None  # sampled items that asked, how many top each, results
    prompt_logprobs: list[tuple[int, int, Download]]  # item, how many top, results with the tokens last

    def wait(self) -> StepResult:
        (sampled,) = self.tokens.wait()
        values = iter(sampled.tolist())
        result = StepResult([[next(values)] if item.sample else [] for item in self.items])
        if self.logprobs is not None:
            which, wanted, download = self.logprobs
            result.logprobs = [[] for _ in self.items]
            tokens = [result.tokens[i][0] for i in which]
            for i, record in zip(which, as_records(tokens, download.wait(), wanted), strict=True):
                result.logprobs[i] = [record]
        if self.prompt_logprobs:
            gathered: dict[int, list[TokenLogprobs]] = {}
            for i, num_top, download in self.prompt_logprobs:
                *parts, after = download.wait()
                gathered.setdefault(i, []).extend(as_records(after.tolist(), parts, [num_top] * len(after)))
            result.prompt_logprobs = gathered
        return result


class Runner:
    def __init__(self, model: CausalLM, kv: KVStore, max_rows: int, max_len: int, device: torch.device, graphs: bool = False):
        self.model, self.kv, self.device = model, kv, device
        self.rows = Rows(max_rows, max_len, kv.block_size, device)
        self.graphs: DecodeGraphs | None = None
        if graphs:
            from octavo.runner.graphs import DecodeGraphs

            self.graphs = DecodeGraphs(model, kv, self.rows, max_rows, max_len)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every graph now, the largest first: the others then fit in its memory. Otherwise each waits for its first use."""
        if self.graphs is not None:
            for size in reversed(self.graphs.sizes):
                self.graphs.capture(size)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> StepHandle:
        if self.graphs is not None and self.graphs.fits(plan):
            rows, logits, lengths = self.graphs.run(plan)
            return self._sample(plan.items, list(range(len(plan.items))), rows, logits, lengths, [])
        up = Upload()
        copies = [up.ints([c[k] for c in plan.copies]) for k in range(2)]
        changes = self.rows.stage(plan, up)
        layout = self._stage_batch(plan.items, up)
        sampled = [i for i, item in enumerate(plan.items) if item.sample]
        sampled_at = up.ints(sampled)
        shipped = up.ship(self.device)

        if plan.copies:
            self.kv.copy(shipped[copies[0]].long(), shipped[copies[1]].long())
        self.rows.apply(changes, shipped)
        if not plan.items:
            return StepHandle([], Download(shipped[:0]), None, [])
        batch = self._batch(plan.items, layout, shipped)
        index = shipped[sampled_at].long()
        asked = any(item.prompt_logprobs is not None for item in plan.items)
        if sampled and not asked and len(sampled) < len(batch.ids):
            batch.last = self._last(batch, sampled, index)
        hidden = self.model(batch, self.kv.tensor)
        self.rows.computed[batch.rows.long()] = batch.seq_lens
        prompt_logprobs = self._prompt_logprobs(plan.items, batch, hidden) if asked else []
        if not sampled:
            return StepHandle(plan.items, Download(shipped[:0]), None, prompt_logprobs)
        logits = self.model.logits(hidden[batch.logit_rows] if batch.last is None else hidden)
        return self._sample(plan.items, sampled, batch.rows[index], logits, batch.seq_lens[index], prompt_logprobs)

    def _sample(
        self,
        items: list[Item],
        sampled: list[int],
        rows: Tensor,
        logits: Tensor,
        lengths: Tensor,
        prompt_logprobs: list[tuple[int, int, Download]],
    ) -> StepHandle:
        """Choose a token for each sampled item: rows, lengths [R] and logits [R, vocab] are theirs."""
        host_rows = [items[i].row for i in sampled]
        if self.rows.special.isdisjoint(host_rows):
            tokens = choose(logits, rows, lengths, self.rows, self.model.ops)
            return StepHandle(items, Download(tokens), None, prompt_logprobs)
        up = Upload()
        job = SampleJob.stage(host_rows, max(items[i].end for i in sampled), self.rows, up)
        asked = self._asked_logprobs(host_rows)
        asked_at = up.ints([k for k, _ in asked])
        shipped = up.ship(self.device)
        which = shipped[asked_at].long()
        raw = logits[which] if asked else None  # as the model gave them
        adjusted = adjust(logits.float(), rows, lengths, job, self.rows, shipped)
        tokens = choose(adjusted, rows, lengths, self.rows, self.model.ops)
        logprobs = None
        if raw is not None:
            parts = logprobs_of(raw, tokens[which], max(n for _, n in asked))
            logprobs = ([sampled[k] for k, _ in asked], [n for _, n in asked], Download(*parts))
        return StepHandle(items, Download(tokens), logprobs, prompt_logprobs)

    def _stage_batch(self, items: list[Item], up: Upload) -> list[slice]:
        nums = np.array([item.num for item in items], dtype=np.int32)
        ends = np.cumsum(nums)
        which = np.repeat(np.arange(len(items)), nums)
        offset = np.arange(len(which)) - (ends - nums)[which]
        logit_rows = [end - 1 for end, item in zip(ends, items, strict=True) if item.sample]
        rows = [item.row for item in items]
        return [up.ints(x) for x in (rows, nums, which, offset, np.concatenate([[0], ends]), logit_rows)]

    def _batch(self, items: list[Item], layout: list[slice], shipped: Tensor) -> ForwardBatch:
        """Where each token stands is the device's knowledge: `computed` of its row, plus its offset in the item."""
        rows, nums, which, offset, query_start, logit_rows = (shipped[s] for s in layout)
        size, item_rows = self.kv.block_size, rows.long()
        start = self.rows.computed[item_rows]
        token_rows = item_rows[which.long()]
        positions = (start[which.long()] + offset).long()
        blocks = self.rows.table[token_rows, positions // size].long()
        spans, first = [], 0
        for item in items:
            spans.append(Span(first, item.num, item.end))
            first += item.num
        return ForwardBatch(
            ids=self.rows.tokens[token_rows, positions].long(),
            positions=positions,
            kv_slots=blocks * size + positions % size,
            query_start=query_start,
            seq_lens=start + nums,
            block_table=self.rows.table,
            rows=rows,
            logit_rows=logit_rows.long(),
            spans=spans,
        )

    def _last(self, batch: ForwardBatch, sampled: list[int], index: Tensor) -> ForwardBatch:
        """The last token of each sampled item: what decoding rows would look like."""
        at = batch.logit_rows
        return ForwardBatch(
            ids=batch.ids[at],
            positions=batch.positions[at],
            kv_slots=batch.kv_slots[at],
            query_start=torch.arange(len(sampled) + 1, dtype=torch.int32, device=self.device),
            seq_lens=batch.seq_lens[index],
            block_table=batch.block_table,
            rows=batch.rows[index],
            logit_rows=at,
            spans=[Span(k, 1, batch.spans[i].end) for k, i in enumerate(sampled)],
        )

    def _asked_logprobs(self, rows: list[int]) -> list[tuple[int, int]]:
        """(index, how many top) of those of the rows that want logprobs."""
        host = [self.rows.host[row] for row in rows]
        return [(k, r.params.logprobs) for k, r in enumerate(host) if r is not None and r.params.logprobs is not None]

    def _prompt_logprobs(self, items: list[Item], batch: ForwardBatch, hidden: Tensor) -> list[tuple[int, int, Download]]:
        """For each position of the items that asked: logprobs of the token that stands after it."""
        out = []
        for i, (item, span) in enumerate(zip(items, batch.spans, strict=True)):
            if item.prompt_logprobs is None:
                continue
            for first in range(span.first, span.first + span.num, LOGPROB_CHUNK):
                part = slice(first, min(first + LOGPROB_CHUNK, span.first + span.num))
                after = self.rows.tokens[batch.rows[i].long(), batch.positions[part] + 1]
                logits = self.model.logits(hidden[part])
                out.append((i, item.prompt_logprobs, Download(*logprobs_of(logits, after, item.prompt_logprobs), after)))
        return out
