"""Turns the engine's outputs into a reply: text, stop strings, logprobs and timings of one request.

This module works on tokens and text, not on scheduling or devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.params import SamplingParams
from octavo.text.detokenize import EndCheck, TextStream
from octavo.text.tokenizer import Tokenizer
from octavo.types import DraftCount, Output, Request, TokenLogprobs


def is_decoded_at_end(
    params: SamplingParams, make_end_check: Callable[[], EndCheck] | None
) -> bool:
    """Return whether the text can be decoded once at the end, because no text can end it early."""
    return not (params.stop or make_end_check or params.ranked) and params.logprobs is None


class Collector:
    """Collects the outputs of one request."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        make_end_check: Callable[[], EndCheck] | None = None,
    ):
        self.request = request
        self.prompt = prompt
        self.tokenizer = tokenizer
        params = request.params
        # These are all candidates. `best` selects those that the request asks for.
        self.completions = [CompletionOutput(index, "", []) for index in range(params.completions)]
        for completion in self.completions:
            if params.logprobs is not None:
                completion.logprobs = []
            if params.ranked or params.logprobs is not None:
                completion.cumulative_logprob = 0.0
        text_tokenizer = tokenizer if params.detokenize else None
        self.streams = [
            TextStream(
                text_tokenizer, params, make_end_check() if make_end_check is not None else None
            )
            for _ in self.completions
        ]
        self.metrics = RequestMetrics(request.arrival)
        self.cached = 0  # prompt tokens found in the prefix cache
        self.drafts: dict[int, DraftCount] = {}  # index of a completion -> its verified drafts
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.pooled: bytes | None = None  # hidden states, if the request wants them
        self.error: str | None = None
        # A caller that streams the reply sets a list, and new pieces are appended to it.
        self.pieces: list[CompletionOutput] | None = None
        self.open_completions = len(self.completions)
        self.decodes_at_end = is_decoded_at_end(params, make_end_check)

    @property
    def finished(self) -> bool:
        return self.open_completions == 0

    def add(self, output: Output) -> bool:
        """Add one output.

        Return True if the text ended at a stop string or after a complete tool call, so that the
        engine should end the sequence.
        """
        completion = self.completions[output.index]
        if self._can_postpone(output):
            completion.token_ids += output.tokens
            return False
        if completion.finish_reason is not None:
            return False  # The text has ended, but the engine has not received the stop yet.
        now = time.monotonic()
        if output.tokens and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if logprobs is None else self._logprobs(logprobs)
                for logprobs in output.prompt_logprobs
            ]
        self.cached = max(self.cached, output.cached_tokens)
        if output.drafts is not None:
            self.drafts[output.index] = output.drafts
        self.error = output.error or self.error
        self.pooled = output.pooled
        piece = self._decode(output)
        # The piece comes first: after an interrupt at any line, a last piece is in `pieces`, or the
        # completion has no finish reason yet and gets an error (RequestLoop._replace_engine).
        if self.pieces is not None:
            self.pieces.append(piece)
        self._extend(completion, piece)
        if piece.finish_reason is not None:
            completion.text = self.streams[output.index].text
            self.open_completions -= 1
        if self.finished:
            self.metrics.finished_time = now
        return self.streams[output.index].ended and output.finish_reason is None

    def _can_postpone(self, output: Output) -> bool:
        """Return whether the tokens need only be stored until the last one arrives.

        This is the common case of a reply that is not streamed.
        """
        return (
            self.decodes_at_end
            and output.finish_reason is None
            and self.pieces is None
            and self.metrics.first_token_time is not None
        )

    def _decode(self, output: Output) -> CompletionOutput:
        """Return the new part of a completion."""
        completion = self.completions[output.index]
        stream = self.streams[output.index]
        shown_ids = output.tokens
        if output.finish_reason == "stop" and not self.request.params.include_stop_str_in_output:
            shown_ids = shown_ids[:-1]
        if self.decodes_at_end:
            shown_ids = completion.token_ids[stream.tokens_used :] + shown_ids
        text, stop_string = stream.push(shown_ids, finished=output.finish_reason is not None)
        piece = CompletionOutput(
            output.index,
            text,
            output.tokens,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            error=output.error,
        )
        if stream.ended:
            piece.token_ids = output.tokens[: stream.tokens_used - len(completion.token_ids)]
            piece.finish_reason = "stop"
            piece.stop_reason = stop_string
        if output.logprobs is not None:
            logprobs = output.logprobs[: len(piece.token_ids)]
            piece.cumulative_logprob = sum(chosen.logprob for chosen in logprobs)
            if completion.logprobs is not None:
                piece.logprobs = [self._logprobs(chosen) for chosen in logprobs]
        return piece

    def _extend(self, completion: CompletionOutput, piece: CompletionOutput) -> None:
        """Add a piece to a completion, except its text, which the stream keeps."""
        completion.token_ids += piece.token_ids
        completion.finish_reason = piece.finish_reason
        completion.stop_reason = piece.stop_reason
        completion.error = piece.error
        if piece.cumulative_logprob is not None:
            total = completion.cumulative_logprob or 0.0
            completion.cumulative_logprob = total + piece.cumulative_logprob
        if completion.logprobs is not None and piece.logprobs is not None:
            completion.logprobs += piece.logprobs

    def _logprobs(self, position: TokenLogprobs) -> dict[int, Logprob]:
        """Return the log-probabilities of one position in the layout of vLLM.

        The chosen token comes first, then the most likely tokens or those that the request names.
        The rank of a named token is unknown.
        """
        chosen = Logprob(position.logprob, position.rank, self._decode_token(position.token))
        logprobs = {position.token: chosen}
        are_named = self.request.params.logprob_token_ids is not None
        for rank, (token_id, logprob) in enumerate(position.top, 1):
            known_rank = None if are_named else rank
            text = self._decode_token(token_id)
            logprobs.setdefault(token_id, Logprob(logprob, known_rank, text))
        return logprobs

    def _decode_token(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    @property
    def best(self) -> list[CompletionOutput]:
        """Return the n best of best_of completions by mean log-probability, the best first."""
        count = self.request.params.n
        if len(self.completions) == count:
            return self.completions

        def mean_logprob(completion: CompletionOutput) -> float:
            return (completion.cumulative_logprob or 0.0) / max(len(completion.token_ids), 1)

        ranked = sorted(self.completions, key=mean_logprob, reverse=True)
        return [replace(completion, index=index) for index, completion in enumerate(ranked[:count])]

    @property
    def accepted_drafts(self) -> int:
        """Return how many accepted drafts the reply may contain.

        A stop string may have cut off drafts that were accepted, so this is at most the length.
        """
        return sum(
            min(count.accepted, len(self.completions[index].token_ids))
            for index, count in self.drafts.items()
        )

    @property
    def rejected_drafts(self) -> int:
        """Return how many verified drafts are not part of the reply."""
        return sum(map(sum, self.drafts.values())) - self.accepted_drafts

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt,
            outputs=self.best,
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.cached,
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
            num_accepted_drafts=self.accepted_drafts,
            num_rejected_drafts=self.rejected_drafts,
            pooled=self.pooled,
        )
