"""Turns the engine's outputs into a reply: text, stop strings, logprobs and timings of one request.

This module knows tokens and text. It knows nothing of scheduling or devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.params import SamplingParams
from octavo.text.detokenize import TextStream
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output, Request, TokenLogprobs

Until = Callable[[], Callable[[str], bool]]  # makes one predicate per text: see TextStream


def made_later(params: SamplingParams, until: Until | None) -> bool:
    """Whether the text can be decoded once at the end: nothing in the text can end it early."""
    return not params.stop and until is None and params.logprobs is None and not params.ranked


class Collector:
    """Collects the outputs of one request."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        until: Until | None = None,
    ):
        self.request = request
        self.prompt = prompt
        self.tokenizer = tokenizer
        params = request.params
        # all candidates; `best` selects the ones that the caller asked for
        self.outputs = [CompletionOutput(i, "", []) for i in range(params.completions)]
        for completion in self.outputs:
            completion.logprobs = None if params.logprobs is None else []
            completion.cumulative_logprob = (
                0.0 if params.ranked or params.logprobs is not None else None
            )
        text = tokenizer if params.detokenize else None
        self.texts = [
            TextStream(text, params, until() if until is not None else None) for _ in self.outputs
        ]
        self.metrics = RequestMetrics(request.arrival)
        self.cached = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.error: str | None = None
        # new pieces, if the caller streams the reply
        self.pieces: list[CompletionOutput] | None = None
        self.open = len(self.outputs)  # completions that are not finished
        self.later = made_later(params, until)

    @property
    def finished(self) -> bool:
        return self.open == 0

    def take(self, out: Output) -> bool:
        """Add one output. True: a stop string ended the text, and the engine should end the sequence."""
        if (
            self.later
            and out.finish_reason is None
            and self.pieces is None
            and self.metrics.first_token_time is not None
        ):
            # the common case: tokens are only stored until the last one arrives
            self.outputs[out.index].token_ids += out.tokens
            return False
        if self.outputs[out.index].finish_reason is not None:
            return False  # the text already ended; the engine had not received the stop yet
        now = time.monotonic()
        if out.tokens and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        completion = self.outputs[out.index]
        stream = self.texts[out.index]
        if out.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if p is None else self._logprobs(p) for p in out.prompt_logprobs
            ]
        self.cached = max(self.cached, out.cached_tokens)
        self.error = out.error or self.error
        hidden = out.finish_reason == "stop" and not self.request.params.include_stop_str_in_output
        shown = out.tokens[:-1] if hidden else out.tokens
        if self.later:
            shown = completion.token_ids[stream.tokens_used :] + shown
        delta, stop = stream.push(shown, finished=out.finish_reason is not None)
        new = out.tokens
        reason = out.finish_reason
        stop_reason = out.stop_reason
        if stream.ended:
            new = new[: stream.tokens_used - len(completion.token_ids)]
            reason = "stop"
            stop_reason = stop
        piece = CompletionOutput(
            out.index, delta, new, finish_reason=reason, stop_reason=stop_reason, error=out.error
        )
        if out.logprobs is not None:
            chosen = out.logprobs[: len(new)]
            piece.cumulative_logprob = sum(p.logprob for p in chosen)
            completion.cumulative_logprob = (
                completion.cumulative_logprob or 0.0
            ) + piece.cumulative_logprob
            if completion.logprobs is not None:
                piece.logprobs = [self._logprobs(p) for p in chosen]
                completion.logprobs += piece.logprobs
        completion.token_ids += new
        completion.finish_reason = reason
        completion.stop_reason = stop_reason
        completion.error = out.error
        if reason is not None:
            completion.text = stream.text
            self.open -= 1
        if self.pieces is not None:
            self.pieces.append(piece)
        if self.finished:
            self.metrics.finished_time = now
        return stream.ended and out.finish_reason is None

    def _logprobs(self, at: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then the most likely tokens or those that the request names, in vLLM's
        layout. The rank of a named token is not known."""
        found = {at.token: Logprob(at.logprob, at.rank, self._decoded(at.token))}
        named = self.request.params.logprob_token_ids is not None
        for rank, (token, logprob) in enumerate(at.top, 1):
            known = None if named else rank
            found.setdefault(token, Logprob(logprob, known, self._decoded(token)))
        return found

    def _decoded(self, token: int) -> str | None:
        return (
            None
            if self.tokenizer is None
            else self.tokenizer.decode([token], skip_special_tokens=False)
        )

    @property
    def best(self) -> list[CompletionOutput]:
        """The completions to return: the n best of best_of by mean log-probability, best first."""
        n = self.request.params.n
        if len(self.outputs) == n:
            return self.outputs
        order = sorted(
            self.outputs, key=lambda c: -(c.cumulative_logprob or 0.0) / max(len(c.token_ids), 1)
        )
        return [replace(completion, index=i) for i, completion in enumerate(order[:n])]

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request.id,
            self.prompt,
            self.request.prompt,
            self.best,
            self.finished,
            self.metrics,
            self.cached,
            self.prompt_logprobs,
            self.error,
        )
