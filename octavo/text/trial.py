"""A trial of a spec of structured output, for a process that may crash: llguidance ends its process where the stack overflows.

A trial has less stack than the threads that compile guides, so a spec that survives it cannot overflow theirs. It also follows
a few random texts, as the engine's main thread would.
"""

from __future__ import annotations

import random
from contextlib import suppress

from octavo.errors import GuideError, InvalidRequest
from octavo.params import StructuredOutputs
from octavo.text.guide import LLGuide, build, start_thread
from octavo.text.spec_errors import refused
from octavo.text.vocabulary import Vocabulary

STACK_BYTES = 64 * 2**20
WALKS = 2
TOKENS = 32


def try_spec(vocabulary: Vocabulary, spec: StructuredOutputs) -> None:
    """Compile a spec and follow a few random texts along it, in a thread with a smaller stack than guides are compiled with. Raises
    InvalidRequest. Meant for a process that may crash: llguidance ends its process where the stack overflows."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            guide = build(vocabulary, spec)
            for seed in range(WALKS):
                walk(guide.copy(), random.Random(seed))
        except BaseException as error:  # a panic in native code is not an Exception
            found.append(error)

    start_thread(run, STACK_BYTES).join()
    if found:
        error = found[0]
        raise error if isinstance(error, InvalidRequest) else refused(spec, str(error))


def walk(guide: LLGuide, chance: random.Random) -> None:
    """Follow a text of random tokens. A text that cannot go on is no failure of the spec: others may."""
    ends = set(guide._vocabulary.end_ids)
    with suppress(GuideError):
        for _ in range(TOKENS):
            token = some_token(guide.mask, chance)
            if token in ends:
                return
            guide.accept(token)


def some_token(mask: bytes, chance: random.Random) -> int:
    """A random token that a mask allows."""
    start = chance.randrange(len(mask))
    rest = mask[start:].lstrip(b"\0")
    place = len(mask) - len(rest) if rest else len(mask) - len(mask.lstrip(b"\0"))
    return place * 8 + chance.choice([bit for bit in range(8) if mask[place] >> bit & 1])
