"""Beam search: which of a request's beams go on, with which tokens, and which texts have ended. Decides, and moves nothing.

A step of a search of width 2 (scores are sums of logprobs; "." ends a text):

    beam A -1.0   reports   x -0.5   . -0.7   y -2.0          candidates, best first    A+x -1.5   goes on
    beam B -1.4   reports   x -0.6   z -0.9   . -3.0                                    A+. -1.7   has ended: among the best 2
                                                                                        B+x -2.0   goes on
                                                                                        B+z -2.3 ...

What it gives equals transformers' beam search: scores, texts and their order. Knows sequences and logprobs, no blocks:
forks.py forks whoever goes on twice, and the scheduler ends whoever does not.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.types import Beam, Output, Sequence, TokenLogprobs


class Hypothesis(NamedTuple):
    """A text that has ended."""

    score: float  # its rank goes by this: the sum of its logprobs / its length ** length_penalty
    said: list[TokenLogprobs]
    stopped: bool  # by a stop token; otherwise by its length


class Step(NamedTuple):
    """A way for a beam to go on."""

    seq: Sequence
    score: float  # of it and the new token
    token: TokenLogprobs
    entered: bool  # the device has chosen this token itself, and entered it in the row


class BeamSearch:
    """Of one request."""

    def __init__(self, root: Sequence):
        # the sequence that computes the prompt: later one of the beams
        self.root, self.params = root, root.params
        self.width, self.longest = root.params.width, root.position_limit - root.prompt_len
        self.candidates = candidates(root)
        self.ended: list[Hypothesis] = []  # best first, at most `width`

    def step(self, beams: list[Sequence]) -> list[Step]:
        """All beams have reported, in the order of their scores: those that go on, best first. None: the search is over."""
        order = sorted((s for seq in beams for s in self._ways(seq)), key=lambda s: -s.score)
        length = len(order[0].seq.tokens) + 1 - self.root.prompt_len
        on: list[Step] = []
        for rank, step in enumerate(order):
            stopped = step.token.token in self.root.stop_ids
            if rank < self.width and (stopped or length == self.longest):
                self._end(step, length, stopped)
            elif not stopped and len(on) < self.width:
                on.append(step)
        return [] if length == self.longest or self._over(on[0].score, length) else on

    def _ways(self, seq: Sequence) -> list[Step]:
        assert seq.beam is not None and seq.beam.report is not None
        score, sampled, found = seq.beam.score, seq.beam.report.token, seq.beam.report.top
        early = len(seq.tokens) - seq.prompt_len < self.params.min_tokens
        top = found[: self.params.logprobs or 0]
        return [
            Step(seq, score + logprob, TokenLogprobs(token, logprob, rank, top), token == sampled)
            for rank, (token, logprob) in enumerate(found[: self.candidates], 1)
            if not (early and token in self.root.stop_ids)
        ]

    def _end(self, step: Step, length: int, stopped: bool) -> None:
        assert step.seq.beam is not None
        said = [*step.seq.beam.output, step.token]
        self.ended.append(
            Hypothesis(step.score / length**self.params.length_penalty, said, stopped)
        )
        self.ended.sort(key=lambda h: -h.score)
        del self.ended[self.width :]

    def _over(self, best: float, length: int) -> bool:
        """Nothing that goes on is expected to beat the worst of those that have ended: transformers' three ways to tell. A
        single beam is greedy, as in transformers, and ends with its text."""
        early, penalty = self.params.early_stopping, self.params.length_penalty
        if len(self.ended) < self.width:
            return False
        if self.width == 1:
            return True
        if early == "never" and penalty > 0:
            length = self.longest  # the longest text is favoured the most
        return early is True or best / length**penalty <= self.ended[-1].score

    def outputs(self, eos_ids: frozenset[int]) -> list[Output]:
        """What the request is told, at the end and at once."""
        found = []
        for index, text in enumerate(self.ended[: self.params.n]):
            tokens = [at.token for at in text.said]
            out = Output(
                self.root.request.id, index, tokens, text.said, "stop" if text.stopped else "length"
            )
            out.stop_reason = tokens[-1] if text.stopped and tokens[-1] not in eos_ids else None
            out.cached_tokens, out.prompt_logprobs = (
                self.root.cached_tokens,
                self.root.prompt_logprobs,
            )
            found.append(out)
        return found


def candidates(seq: Sequence) -> int:
    """How many of the likeliest tokens a beam must report: as many as may go on, and all that could end it. Then there are
    always `width` that go on."""
    return seq.params.width + len(seq.stop_ids)


def reported(seq: Sequence) -> bool:
    """A beam that has said what it may go on with, and waits for its siblings to have done so."""
    return seq.beam is not None and seq.beam.report is not None


def go_on(seq: Sequence, step: Step) -> None:
    """The sequence goes on as decided; `step.seq` is its parent, or itself."""
    assert step.seq.beam is not None
    seq.beam = Beam(step.score, [*step.seq.beam.output, step.token])
    seq.tokens.append(step.token.token)
