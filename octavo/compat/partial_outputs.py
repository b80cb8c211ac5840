"""The output of a request before its reply is complete, as its output_kind asks for it."""

from __future__ import annotations

from dataclasses import replace

from octavo.collect import Collector
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.params import RequestOutputKind


class PartialReply:
    """A request that may still give outputs."""

    def __init__(self, collector: Collector):
        self.collector = collector
        self.kind = collector.request.params.output_kind

    @property
    def finished(self) -> bool:
        return self.collector.finished

    def next_output(self) -> RequestOutput | None:
        """Return the output of the last step, or None if there is nothing to report."""
        pieces = self.collector.pieces
        assert pieces is not None
        if not pieces or (self.kind is RequestOutputKind.FINAL_ONLY and not self.finished):
            return None
        new_pieces = list(pieces)
        pieces.clear()
        output = self.collector.output()
        if self.kind is RequestOutputKind.DELTA:
            output.outputs = merge_pieces(new_pieces)
        elif not self.finished:
            output.outputs = self._texts_so_far()
        return output

    def _texts_so_far(self) -> list[CompletionOutput]:
        """A completion has its text only at its end. Its tokens grow, so the lists are copied."""
        return [
            replace(completion, text=stream.text, token_ids=list(completion.token_ids))
            for completion, stream in zip(
                self.collector.completions, self.collector.streams, strict=True
            )
        ]


def merge_pieces(pieces: list[CompletionOutput]) -> list[CompletionOutput]:
    """Return one piece for each completion that has new tokens."""
    merged: dict[int, CompletionOutput] = {}
    for piece in pieces:
        earlier = merged.get(piece.index)
        if earlier is None:
            merged[piece.index] = piece
            continue
        merged[piece.index] = replace(
            piece,
            text=earlier.text + piece.text,
            token_ids=earlier.token_ids + piece.token_ids,
            logprobs=None if piece.logprobs is None else (earlier.logprobs or []) + piece.logprobs,
        )
    return list(merged.values())
