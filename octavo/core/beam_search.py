"""Beam search: which beams of a request continue, with which tokens, and which texts are finished.

One round of a search of width 2 (a score is a sum of logprobs, "." ends a text):

    beam A -1.0   reports   x -0.5   . -0.7   y -2.0       candidates, best first
    beam B -1.4   reports   x -0.6   z -0.9   . -3.0         A+x -1.5   continues
                                                             A+. -1.7   finished: among the best 2
                                                             B+x -2.0   continues
                                                             B+z -2.3   ...

Scores, texts and their order equal those of transformers' beam search. This module works on
sequences and logprobs, not on blocks: forks.py forks a beam that continues twice, and the scheduler
ends a beam that does not continue.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.types import Beam, Output, Sequence, TokenLogprobs


class Hypothesis(NamedTuple):
    """A finished text."""

    score: float  # sum of its logprobs / length ** length_penalty; orders the results
    output: list[TokenLogprobs]
    stopped: bool  # True: by a stop token; False: by its length


class Continuation(NamedTuple):
    """One beam extended by one token."""

    seq: Sequence
    score: float  # sum of logprobs, the new token included
    token: TokenLogprobs
    on_device: bool  # the device sampled this token itself and has it in the batch slot


class BeamSearch:
    """The search of one request."""

    def __init__(self, root: Sequence):
        self.root = root  # the sequence that computes the prompt and is later one of the beams
        self.params = root.params
        self.width = root.params.width
        self.max_length = root.token_limit - root.prompt_len
        self.num_candidates = num_candidates(root)
        self.finished: list[Hypothesis] = []  # best first, at most `width`

    def advance(self, beams: list[Sequence]) -> list[Continuation]:
        """Return the continuations, best first, after all beams have reported. If there are none,
        the search is over."""
        candidates = [continuation for seq in beams for continuation in self._continuations(seq)]
        candidates.sort(key=lambda continuation: -continuation.score)
        length = candidates[0].seq.num_generated + 1
        continuing: list[Continuation] = []
        for position, continuation in enumerate(candidates):
            stopped = continuation.token.token in self.root.stop_ids
            if position < self.width and (stopped or length == self.max_length):
                self._finish(continuation, length, stopped)
            elif not stopped and len(continuing) < self.width:
                continuing.append(continuation)
        if length == self.max_length or self._is_over(continuing[0].score, length):
            return []
        return continuing

    def _continuations(self, seq: Sequence) -> list[Continuation]:
        assert seq.beam is not None and seq.beam.report is not None
        report = seq.beam.report
        too_short = seq.num_generated < self.params.min_tokens
        top = report.top[: self.params.logprobs or 0]
        return [
            Continuation(
                seq=seq,
                score=seq.beam.score + logprob,
                token=TokenLogprobs(token, logprob, rank, top),
                on_device=token == report.token,
            )
            for rank, (token, logprob) in enumerate(report.top[: self.num_candidates], 1)
            if not (too_short and token in self.root.stop_ids)
        ]

    def _finish(self, continuation: Continuation, length: int, stopped: bool) -> None:
        assert continuation.seq.beam is not None
        score = continuation.score / length**self.params.length_penalty
        output = [*continuation.seq.beam.output, continuation.token]
        self.finished.append(Hypothesis(score, output, stopped))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]

    def _is_over(self, best_score: float, length: int) -> bool:
        """Return whether no continuing beam can beat the worst finished text, by the rules of
        transformers' early_stopping. A single beam is greedy, and its search ends with its text."""
        early_stopping = self.params.early_stopping
        penalty = self.params.length_penalty
        if len(self.finished) < self.width:
            return False
        if self.width == 1 or early_stopping is True:
            return True
        if early_stopping == "never" and penalty > 0:
            length = self.max_length  # the penalty favours the longest text most
        return best_score / length**penalty <= self.finished[-1].score

    def outputs(self, eos_ids: frozenset[int]) -> list[Output]:
        """Return the results of all completions, at the end of the search."""
        outputs = []
        for index, text in enumerate(self.finished[: self.params.n]):
            tokens = [logprobs.token for logprobs in text.output]
            by_stop_token = text.stopped and tokens[-1] not in eos_ids
            outputs.append(
                Output(
                    request_id=self.root.request.id,
                    index=index,
                    tokens=tokens,
                    logprobs=text.output,
                    finish_reason="stop" if text.stopped else "length",
                    stop_reason=tokens[-1] if by_stop_token else None,
                    cached_tokens=self.root.cached_tokens,
                    prompt_logprobs=self.root.prompt_logprobs,
                )
            )
        return outputs


def num_candidates(seq: Sequence) -> int:
    """Return how many of the likeliest tokens a beam must report: `width`, and one for each token
    that could end it. At least `width` of them then continue."""
    return seq.params.width + len(seq.stop_ids)


def has_reported(seq: Sequence) -> bool:
    """Return whether a beam has reported its candidates and waits for its siblings."""
    return seq.beam is not None and seq.beam.report is not None


def extend_beam(seq: Sequence, continuation: Continuation) -> None:
    """Continue a sequence as decided; `continuation.seq` is its parent or the sequence itself."""
    assert continuation.seq.beam is not None
    seq.beam = Beam(continuation.score, [*continuation.seq.beam.output, continuation.token])
    seq.tokens.append(continuation.token.token)
