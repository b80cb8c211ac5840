"""Rules for a token that the model has sampled: what it may do to its sequence."""

from __future__ import annotations

from octavo.errors import GuideError
from octavo.types import Guide, Sequence


def may_stop(seq: Sequence) -> bool:
    """Return whether a stop token ends the sequence: min_tokens holds unless a guide decides."""
    return seq.num_generated >= seq.params.min_tokens or seq.guide is not None


def advance_guide(guide: Guide, token: int, ended: bool) -> None:
    """Advance a guide by a token that the sequence generated. Raises GuideError if it was not
    allowed."""
    if not guide.mask[token >> 3] >> (token & 7) & 1:
        raise GuideError(
            f"the model gave token {token}, which structured_outputs do not allow here"
        )
    if not ended:
        guide.accept(token)


def is_usual_token(seq: Sequence, token: int) -> bool:
    """Return whether a token of a step without logprobs neither ends its sequence nor is its first
    one, and nothing looks at it. (A step with beams has logprobs.) Most tokens are usual, and
    committing them on a path of their own takes a tenth less time per step."""
    return (
        token not in seq.stop_ids
        and len(seq.tokens) + 1 < seq.position_limit
        and seq.first_token_at is not None
        and seq.guide is None
        and seq.repetition is None
    )
