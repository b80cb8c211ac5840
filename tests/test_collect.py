"""Text that is made when a request ends is the text that would have been made token by token."""

from __future__ import annotations

import pytest

from octavo.collect import Collector
from octavo.params import SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output, Request
from tests import tiny

TEXT = "über 3 €, 漢字 and plain"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(tiny.model_dir())


def collect(
    tokenizer: Tokenizer, ids: list[int], follow: bool, reason: str = "length", **params: object
) -> Collector:
    request = Request("r", [1], SamplingParams(max_tokens=len(ids), **params))  # type: ignore[arg-type]
    collector = Collector(request, None, tokenizer)
    if follow:
        collector.pieces = []
    for k, id in enumerate(ids):
        collector.add(Output("r", 0, [id], finish_reason=reason if k == len(ids) - 1 else None))
    return collector


@pytest.mark.parametrize("reason, include", [("length", False), ("stop", False), ("stop", True)])
def test_text_made_at_the_end_equals_streamed_text(
    tokenizer: Tokenizer, reason: str, include: bool
) -> None:
    ids = tokenizer.encode(TEXT)  # one token per byte, so characters are split
    whole = collect(tokenizer, ids, False, reason, include_stop_str_in_output=include)
    followed = collect(tokenizer, ids, True, reason, include_stop_str_in_output=include)
    assert whole.completions[0].token_ids == followed.completions[0].token_ids == ids
    assert (
        whole.completions[0].text
        == followed.completions[0].text
        == (TEXT if reason == "length" or include else TEXT[:-1])
    )
    assert (
        followed.pieces is not None
        and "".join(piece.text for piece in followed.pieces) == followed.completions[0].text
    )
    assert (
        whole.finished
        and whole.metrics.first_token_time is not None
        and whole.metrics.finished_time is not None
    )


def test_a_stop_string_is_found_in_a_reply_that_is_not_streamed(tokenizer: Tokenizer) -> None:
    request = Request("r", [1], SamplingParams(max_tokens=99, stop=["and"]))
    collector = Collector(request, None, tokenizer)
    stops = [collector.add(Output("r", 0, [id])) for id in tokenizer.encode("this and that")[:8]]
    assert stops == [False] * 7 + [True] and collector.completions[0].text == "this "
