"""Samples tokens from logits. The functions have no state.

They apply masks, min_tokens, bias, penalties, temperature, min-p, top-k and top-p in this order,
and then choose a token. A token depends only on (logits, parameters, seed, position). It does not
depend on the other items of the step, or on how the work was divided into steps. The noise of the
choice is a hash of (seed, position, token), so a step that is run again samples the same token, on
any device.

    choice = argmax(logits / temperature + gumbel)     samples from softmax(logits / temperature)

In the shapes below, R is the number of sampled items and V is the size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops import Ops
from octavo.runner.batch import ForwardResult
from octavo.runner.batch_slots import BatchSlots, FloatColumn, IntColumn
from octavo.runner.transfer import Upload
from octavo.types import TokenLogprobs

# Masks of this many items are unpacked at a time. Unpacking takes twice the memory of the logits.
MASK_CHUNK = 64


@dataclass(slots=True)
class SampleJob:
    """The sampling parameters of a step besides the temperature, prepared for the device.

    The lists contain indices of items.
    """

    max_len: int  # The largest number of tokens in a slot.
    penalised: list[int]  # The items with penalties.
    allowed: list[int]  # The items with allowed_token_ids.
    masked: list[int]  # The items with a mask of a guide (Guide.mask).
    slices: dict[str, slice]  # The parts of the upload, by name.

    @staticmethod
    def prepare(
        slots: list[int],
        max_len: int,
        batch_slots: BatchSlots,
        upload: Upload,
        masks: dict[int, bytes],
    ) -> SampleJob:
        """Add to the upload the parameters of the items in these slots.

        `masks` has the packed masks of items with a guide (Guide.mask).
        """
        filled = [batch_slots.fill_of(slot) for slot in slots]
        params = [fill.params for fill in filled]
        allowed = [
            item
            for item, item_params in enumerate(params)
            if item_params.allowed_token_ids is not None
        ]
        penalised = [item for item, item_params in enumerate(params) if item_params.has_penalties]
        bias = [
            (item, token, bias_value)
            for item, item_params in enumerate(params)
            for token, bias_value in (item_params.logit_bias or {}).items()
        ]
        banned = [
            (item, token)
            for item, fill in enumerate(filled)
            if fill.params.min_tokens
            for token in fill.stop_ids
        ]
        permitted = [
            (row, token)
            for row, item in enumerate(allowed)
            for token in params[item].allowed_token_ids or ()
        ]
        slices = {
            "penalised": upload.ints(penalised),
            "allowed": upload.ints(allowed),
            "bias_item": upload.ints([item for item, _, _ in bias]),
            "bias_token": upload.ints([token for _, token, _ in bias]),
            "bias_value": upload.floats([bias_value for _, _, bias_value in bias]),
            "banned_item": upload.ints([item for item, _ in banned]),
            "banned_token": upload.ints([token for _, token in banned]),
            "permitted_row": upload.ints([row for row, _ in permitted]),
            "permitted_token": upload.ints([token for _, token in permitted]),
            "masked": upload.ints(list(masks)),
            "mask": upload.ints(np.frombuffer(b"".join(masks.values()), np.int32)),
        }
        return SampleJob(max_len, penalised, allowed, list(masks), slices)


def choose(
    forward: ForwardResult, batch_slots: BatchSlots, ops: Ops, sampled: Tensor | None = None
) -> Tensor:
    """Sample a token for each item and write it to the item's slot.

    Returns the tokens [R] (int32). A token is -1 if no logit is finite. `sampled` [R] (int32) is 0
    for an item whose next token is known. The slot of such an item does not change.
    """
    positions = forward.lengths
    if batch_slots.is_bounded:
        # The noise depends on the position in the text. The position in the KV cache falls when
        # blocks are dropped, so the noise would repeat.
        dropped = batch_slots.ints[forward.slots.long(), IntColumn.DROPPED_TOKENS]
        positions = forward.lengths + dropped
    tokens = ops.choose(forward.logits, forward.slots, positions, batch_slots.sampling)
    target = forward.slots.long(), forward.lengths.long()
    if sampled is None:
        batch_slots.tokens[target] = tokens
    else:
        batch_slots.tokens[target] = torch.where(sampled > 0, tokens, batch_slots.tokens[target])
    return tokens


def adjust(
    forward: ForwardResult, job: SampleJob, batch_slots: BatchSlots, uploaded: Tensor
) -> Tensor:
    """Apply masks, min_tokens, logit bias and penalties to float32 logits [R, V], in place.

    The order is vLLM's. Ops.choose applies the other parameters.
    """
    logits = forward.logits
    lengths = forward.lengths
    indices = {
        name: uploaded[job_slice].long()
        for name, job_slice in job.slices.items()
        if name not in ("bias_value", "mask")
    }
    slots = forward.slots.long()
    ints = batch_slots.ints[slots]
    floats = batch_slots.floats[slots]
    prompt_len = ints[:, IntColumn.PROMPT_LEN]
    _mask(logits, indices, job, uploaded)
    if len(indices["banned_item"]):
        too_short = lengths - prompt_len < ints[:, IntColumn.MIN_TOKENS]
        _forbid_stops(
            logits, indices["banned_item"], indices["banned_token"], too_short, bool(job.masked)
        )
    if len(indices["bias_item"]):
        bias = uploaded[job.slices["bias_value"]].view(torch.float32)
        targets = (indices["bias_item"], indices["bias_token"])
        logits.index_put_(targets, bias, accumulate=True)
    if job.penalised:
        items = indices["penalised"]
        logits[items] = penalise(
            logits=logits[items],
            tokens=batch_slots.tokens[slots[items], : job.max_len],
            prompt_len=prompt_len[items],
            lengths=lengths[items],
            presence=floats[items, FloatColumn.PRESENCE_PENALTY],
            frequency=floats[items, FloatColumn.FREQUENCY_PENALTY],
            repetition=floats[items, FloatColumn.REPETITION_PENALTY],
        )
    return logits


def _mask(logits: Tensor, indices: dict[str, Tensor], job: SampleJob, uploaded: Tensor) -> None:
    """Set the logits of tokens that allowed_token_ids or a guide's mask excludes to -inf."""
    vocab_size = logits.shape[1]
    if job.allowed:
        keep = torch.zeros(len(job.allowed), vocab_size, dtype=torch.bool, device=logits.device)
        keep[indices["permitted_row"], indices["permitted_token"]] = True
        items = indices["allowed"]
        logits[items] = logits[items].masked_fill(~keep, -torch.inf)
    if job.masked:
        words = uploaded[job.slices["mask"]].view(len(job.masked), -1)
        chunks = zip(indices["masked"].split(MASK_CHUNK), words.split(MASK_CHUNK), strict=True)
        for items, packed in chunks:
            logits[items] = logits[items].masked_fill(~unpack(packed, vocab_size), -torch.inf)


def _forbid_stops(
    logits: Tensor, items: Tensor, tokens: Tensor, too_short: Tensor, is_masked: bool
) -> None:
    """Set stop tokens to -inf for items that have fewer than min_tokens tokens.

    If a mask allows an item only stop tokens, min_tokens does not apply to the item.
    """
    original = logits[items, tokens]
    logits[items, tokens] = torch.where(too_short[items], -torch.inf, original)
    if is_masked:
        has_no_token = logits.amax(1).isneginf()
        logits[items, tokens] = torch.where(has_no_token[items], original, logits[items, tokens])


def unpack(words: Tensor, count: int) -> Tensor:
    """Return the bits [R, count] (bool) of int32 words [R, W], the lowest bit first."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :count]


def penalise(
    logits: Tensor,
    tokens: Tensor,
    prompt_len: Tensor,
    lengths: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Lower the logits of tokens [R, L] that have occurred.

    The repetition penalty counts the prompt and the output, and the others only the output.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
    is_known = positions < lengths[:, None]
    is_output = is_known & (positions >= prompt_len[:, None])
    tokens = tokens.long().clamp_(min=0)
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, is_output.float())
    occurred = torch.zeros_like(logits).scatter_add_(1, tokens, is_known.float()) > 0
    factor = repetition[:, None]
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(occurred, penalised, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


# ---- logprobs ------------------------------------------------------------------------------------


def logprobs_of(
    logits: Tensor, tokens: Tensor, num_top: int, named: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (logprob [R], rank [R], ids [R, n], logprobs [R, n]) of tokens [R].

    logits [R, V] are the logits of the model, which no parameter has changed. The columns are the
    likeliest `num_top` tokens, or fewer if the vocabulary is smaller, and then `named` [R, m].
    """
    logprobs = logits.float().log_softmax(1)
    token_logprobs = logprobs.gather(1, tokens.long().clamp_(min=0)[:, None])
    rank = (logprobs > token_logprobs).sum(1) + 1
    num_top = min(num_top, logprobs.shape[1])
    top_logprobs = token_logprobs[:, :0]
    top_ids = rank[:, None][:, :0]
    if num_top:
        top_logprobs, top_ids = logprobs.topk(num_top, dim=1)
    if named is not None:
        top_ids = torch.cat([top_ids, named], 1)
        top_logprobs = torch.cat([top_logprobs, logprobs.gather(1, named)], 1)
    return token_logprobs[:, 0], rank, top_ids, top_logprobs


@dataclass(slots=True)
class RequestedLogprobs:
    """The sampled items of a step whose requests want logprobs."""

    items: list[int]  # The indices of the items.
    counts: list[int]  # The number of likeliest tokens that each item wants.
    # The tokens that an item wants instead of the likeliest. The list of other items is empty.
    named: list[list[int]]

    @staticmethod
    def of(slots: list[int], batch_slots: BatchSlots) -> RequestedLogprobs:
        requested = RequestedLogprobs([], [], [])
        for item, slot in enumerate(slots):
            fill = batch_slots.fill_of(slot)
            if fill.num_logprobs is None:
                continue
            named = fill.params.logprob_token_ids or []
            requested.items.append(item)
            requested.counts.append(0 if named else fill.num_logprobs)
            requested.named.append(named)
        return requested

    @property
    def max_count(self) -> int:
        """The number of likeliest tokens that are computed for every item."""
        return max(self.counts, default=0)

    def padded(self) -> list[list[int]]:
        """Return the named tokens as a table. Shorter lists are filled up with token 0."""
        width = max(map(len, self.named), default=0)
        return [named + [0] * (width - len(named)) for named in self.named]

    def records(self, tokens: list[int], results: list[Tensor]) -> list[TokenLogprobs]:
        """Convert the results of `logprobs_of` to one record per item."""
        num_top = results[2].shape[1] - max(map(len, self.named), default=0)
        columns = [
            slice(num_top, num_top + len(named)) if named else slice(0, min(count, num_top))
            for count, named in zip(self.counts, self.named, strict=True)
        ]
        return as_records(tokens, results, columns)


def as_records(
    tokens: list[int], results: list[Tensor], columns: list[slice]
) -> list[TokenLogprobs]:
    """Convert the results of `logprobs_of` to one record per item, with the columns it wants."""
    logprobs, ranks, top_ids, top_logprobs = (tensor.tolist() for tensor in results)
    return [
        TokenLogprobs(
            token=token,
            logprob=logprobs[item],
            rank=ranks[item],
            top=list(
                zip(top_ids[item][item_columns], top_logprobs[item][item_columns], strict=True)
            ),
        )
        for item, (token, item_columns) in enumerate(zip(tokens, columns, strict=True))
    ]
