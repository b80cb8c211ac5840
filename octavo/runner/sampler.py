"""From logits to tokens: masks, min_tokens, bias, penalties, temperature, min-p, top-k, top-p, then the choice. Stateless.

A token depends on (logits, parameters, seed, position) and on nothing else: not on the other rows, nor on how the work
was cut into steps. The noise for the choice is a hash of (seed, position, token), so a step that is run again draws
the same token, on any device.

    choice = argmax(logits / temperature + gumbel)     which samples from softmax(logits / temperature): ops.choose
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops import Ops
from octavo.runner.batch_slots import Rows
from octavo.runner.transfer import Upload
from octavo.types import TokenLogprobs

# sorted at once: sorting takes ten times the memory of what it sorts, unpacking masks twice
FILTER_ROWS = 64


@dataclass(slots=True)
class SampleJob:
    """What the rows of a step ask for beyond a temperature, as far as the host knows; staged for the device."""

    max_len: int  # no row has more tokens than this
    penalised: list[int]  # indices of rows
    filtered: list[int]  # top-k, top-p or min-p
    allowed: list[int]
    masked: list[int]
    slices: dict[str, slice]

    @staticmethod
    def stage(
        rows: list[int], max_len: int, state: Rows, up: Upload, masks: dict[int, bytes]
    ) -> SampleJob:
        """`masks`: what the rows at these indices may say, packed (Guide.mask)."""
        staged = [r for row in rows if (r := state.host[row]) is not None]
        params = [r.params for r in staged]
        bias = [
            (i, t, b) for i, p in enumerate(params) if p.logit_bias for t, b in p.logit_bias.items()
        ]
        banned = [(i, t) for i, r in enumerate(staged) if r.params.min_tokens for t in r.stop_ids]
        allowed = [i for i, p in enumerate(params) if p.allowed_token_ids is not None]
        permitted = [
            (k, t) for k, i in enumerate(allowed) for t in params[i].allowed_token_ids or ()
        ]
        penalised = [i for i, p in enumerate(params) if p.has_penalties]
        filtered = [
            i
            for i, p in enumerate(params)
            if not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        ]
        slices = {
            "penalised": up.ints(penalised),
            "filtered": up.ints(filtered),
            "allowed": up.ints(allowed),
            "bias_row": up.ints([x[0] for x in bias]),
            "bias_token": up.ints([x[1] for x in bias]),
            "bias_value": up.floats([x[2] for x in bias]),
            "banned_row": up.ints([x[0] for x in banned]),
            "banned_token": up.ints([x[1] for x in banned]),
            "permitted_row": up.ints([x[0] for x in permitted]),
            "permitted_token": up.ints([x[1] for x in permitted]),
            "masked": up.ints(list(masks)),
            "mask": up.ints(np.frombuffer(b"".join(masks.values()), np.int32)),
        }
        return SampleJob(max_len, penalised, filtered, allowed, list(masks), slices)


def choose(
    logits: Tensor,
    rows: Tensor,
    lengths: Tensor,
    state: Rows,
    ops: Ops,
    wanted: Tensor | None = None,
) -> Tensor:
    """Tokens [R] (int32), or -1, for rows [R] from logits [R, vocab], entered in the rows. lengths [R]: tokens that each holds,
    so the new one's position. wanted [R] (int32), where given: 0 for a row whose next token is known, which stays as it is."""
    # in the text: or its noise would repeat
    place = lengths + state.ints[rows.long(), 6] if state.evicting else lengths
    tokens = ops.choose(logits, rows, state.floats[:, 0], state.ints[:, 4], state.ints[:, 5], place)
    at = rows.long(), lengths.long()
    state.tokens[at] = (
        tokens if wanted is None else torch.where(wanted > 0, tokens, state.tokens[at])
    )
    return tokens


def adjust(
    logits: Tensor, rows: Tensor, lengths: Tensor, job: SampleJob, state: Rows, shipped: Tensor
) -> Tensor:
    """Apply every parameter but the temperature's division to float32 logits, in place.

    The order is vLLM's: masks, min_tokens, logit bias, penalties, then min-p, top-k and top-p.
    """
    at = {
        name: shipped[s].long()
        for name, s in job.slices.items()
        if name not in ("bias_value", "mask")
    }
    rows = rows.long()
    _, prompt_len, min_tokens, top_k, *_ = state.ints[rows].unbind(1)
    temperature, top_p, min_p, *penalties = state.floats[rows].unbind(1)
    _mask(logits, at, job, shipped)
    if len(at["banned_row"]):
        early = lengths - prompt_len < min_tokens
        _forbid_stops(logits, at["banned_row"], at["banned_token"], early, bool(job.masked))
    if len(at["bias_row"]):
        bias = shipped[job.slices["bias_value"]].view(torch.float32)
        logits.index_put_((at["bias_row"], at["bias_token"]), bias, accumulate=True)
    if job.penalised:
        i = at["penalised"]
        tokens = state.tokens[rows[i], : job.max_len]
        logits[i] = penalise(
            logits[i], tokens, prompt_len[i], lengths[i], *(p[i] for p in penalties)
        )
    if job.filtered:
        for i in at["filtered"].split(FILTER_ROWS):
            logits[i] = keep_likely(logits[i], temperature[i], top_k[i], top_p[i], min_p[i])
    return logits


def _mask(logits: Tensor, at: dict[str, Tensor], job: SampleJob, shipped: Tensor) -> None:
    """Set the logits of tokens that allowed_token_ids or a guide's mask excludes to -inf."""
    if job.allowed:
        keep = torch.zeros(
            len(job.allowed), logits.shape[1], dtype=torch.bool, device=logits.device
        )
        keep[at["permitted_row"], at["permitted_token"]] = True
        logits[at["allowed"]] = logits[at["allowed"]].masked_fill(~keep, -torch.inf)
    if job.masked:
        words = shipped[job.slices["mask"]].view(len(job.masked), -1)
        for i, packed in zip(
            at["masked"].split(FILTER_ROWS), words.split(FILTER_ROWS), strict=True
        ):
            logits[i] = logits[i].masked_fill(~unpack(packed, logits.shape[1]), -torch.inf)


def _forbid_stops(logits: Tensor, row: Tensor, token: Tensor, early: Tensor, masked: bool) -> None:
    """Set stop tokens to -inf in rows that have fewer than min_tokens tokens. If a mask leaves
    a row nothing but stop tokens, min_tokens does not apply to it."""
    kept = logits[row, token]
    logits[row, token] = torch.where(early[row], -torch.inf, kept)
    if masked:
        stuck = logits.amax(1).isneginf()
        logits[row, token] = torch.where(stuck[row], kept, logits[row, token])


def unpack(words: Tensor, count: int) -> Tensor:
    """Bits [R, count] (bool), of int32 words [R, W], the lowest first."""
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
    """Lower what was said before. tokens [R, L]; repetition looks at prompt and output, the others at output alone."""
    position = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
    known = position < lengths[:, None]
    said = known & (position >= prompt_len[:, None])
    tokens = tokens.long().clamp_(min=0)
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, said.float())
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, known.float()) > 0
    factor = repetition[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def keep_likely(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Set all but the likeliest tokens to -inf: first those less than min_p times as likely as the
    first, then those beyond the top k; of the rest the fewest are kept whose probabilities, which
    then sum to 1, reach top_p. The token that crosses top_p is kept. Ties rank by token id."""
    ordered, index = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None, :]
    least = ordered[:, :1] + (temperature * min_p.log())[:, None]
    ordered = ordered.masked_fill((ordered < least) | (rank >= top_k[:, None]), -torch.inf)
    probs = (ordered / temperature[:, None]).softmax(1)
    drop = probs.cumsum(1) - probs >= top_p[:, None]
    drop[:, 0] = False
    return torch.empty_like(logits).scatter_(1, index, ordered.masked_fill(drop, -torch.inf))


def logprobs_of(
    logits: Tensor, tokens: Tensor, num_top: int, named: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprob [R], rank [R], ids [R, n], logprobs [R, n]) of tokens [R] under logits [R, vocab] as the
    model gave them, before any parameter changed them. The columns are the likeliest `num_top` tokens,
    or fewer if the vocabulary is smaller, then those of `named` [R, m]."""
    logprobs = logits.float().log_softmax(1)
    chosen = logprobs.gather(1, tokens.long().clamp_(min=0)[:, None])
    rank = (logprobs > chosen).sum(1) + 1
    num_top = min(num_top, logprobs.shape[1])
    top, ids = logprobs.topk(num_top, dim=1) if num_top else (chosen[:, :0], rank[:, None][:, :0])
    if named is not None:
        ids = torch.cat([ids, named], 1)
        top = torch.cat([top, logprobs.gather(1, named)], 1)
    return chosen[:, 0], rank, ids, top


@dataclass(slots=True)
class AskedLogprobs:
    """The rows of a step that want logprobs of the tokens they sample."""

    rows: list[int]  # indices into the rows of the step
    counts: list[int]  # how many of the likeliest tokens each row wants
    named: list[list[int]]  # tokens that a row wants in place of the likeliest; empty: none

    @staticmethod
    def of(rows: list[int], state: Rows) -> AskedLogprobs:
        asked = AskedLogprobs([], [], [])
        for index, row in enumerate(rows):
            slot = state.host[row]
            if slot is None or slot.num_logprobs is None:
                continue
            named = slot.params.logprob_token_ids or []
            asked.rows.append(index)
            asked.counts.append(0 if named else slot.num_logprobs)
            asked.named.append(named)
        return asked

    @property
    def most(self) -> int:
        """How many of the likeliest tokens are computed for every row."""
        return max(self.counts, default=0)

    def padded(self) -> list[list[int]]:
        """The named tokens as a table. Rows that name fewer than others are filled up with token 0."""
        width = max(map(len, self.named), default=0)
        return [named + [0] * (width - len(named)) for named in self.named]

    def records(self, tokens: list[int], parts: list[Tensor]) -> list[TokenLogprobs]:
        """The results of `logprobs_of` as the host knows them: a record for each row."""
        columns = parts[2].shape[1] - max(map(len, self.named), default=0)
        wanted = [
            slice(columns, columns + len(named)) if named else slice(0, min(count, columns))
            for count, named in zip(self.counts, self.named, strict=True)
        ]
        return as_records(tokens, parts, wanted)


def as_records(tokens: list[int], parts: list[Tensor], wanted: list[slice]) -> list[TokenLogprobs]:
    """The results of `logprobs_of` as the host knows them: a record for each row, with the columns
    that it wants."""
    chosen, rank, ids, top = (t.tolist() for t in parts)
    return [
        TokenLogprobs(t, chosen[i], rank[i], list(zip(ids[i][part], top[i][part], strict=True)))
        for i, (t, part) in enumerate(zip(tokens, wanted, strict=True))
    ]
