"""What the targets for structured output have in common: a spec is compiled, and random texts
follow it, as in a worker process."""

from __future__ import annotations

from functools import cache
from typing import Any

from octavo.errors import InvalidRequest
from octavo.params import StructuredOutputs
from octavo.text.spec_trial import try_spec
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import Vocabulary, make_vocabulary
from tests.fuzz.front import tokenizer_directory
from tests.tiny_tokenizer import EOS, VOCAB

MAX_BYTES = 4096


@cache
def vocabulary() -> Vocabulary:
    return make_vocabulary(Tokenizer.from_directory(tokenizer_directory()), VOCAB, (EOS,))


def check(**fields: Any) -> object:
    """A spec can be followed, or it is refused."""
    try:
        try_spec(vocabulary(), StructuredOutputs(**fields))
    except InvalidRequest as error:
        assert str(error)
        reason = str(error).rpartition("cannot be used: ")[2]
        return tuple(reason.split()[:2])  # the rest may quote the input
    return "followed"
