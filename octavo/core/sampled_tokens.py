"""Rules for a token that the model has sampled: whether it may end its sequence, whether structured
output allows it, and whether it needs only to be appended."""

from __future__ import annotations

from octavo.errors import GuideError
from octavo.types import Guide, Sequence


def may_stop(seq: Sequence) -> bool:
    """Return whether a stop token ends the sequence: not before min_tokens, unless a guide has
    allowed it."""
    return seq.num_generated >= seq.params.min_tokens or seq.guide is not None


def advance_guide(guide: Guide, token: int, ended: bool) -> None:
    """Advance a guide by a token that the sequence generated. Raises GuideError if it was not
    allowed."""
    if not guide.mask[token >> 3] >> (token & 7) & 1:
        raise GuideError(
            f"the model sampled token {token}, which structured_outputs do not allow here"
        )
    if not ended:
        guide.accept(token)


def only_appends(seq: Sequence, token: int) -> bool:
    """Return whether a token of a step without logprobs only needs to be appended: it is not the
    first token of its sequence, does not end the sequence, and no guide or repetition check reads
    it. Beams are excluded, because their steps have logprobs. This covers most tokens, and the
    short path makes Scheduler.commit() a tenth faster."""
    return (
        token not in seq.stop_ids
        and len(seq.tokens) + 1 < seq.token_limit
        and seq.first_token_at is not None
        and seq.guide is None
        and seq.repetition is None
    )
