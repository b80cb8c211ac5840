"""Tries a structured output spec in a process that may crash.

llguidance ends its process when the stack overflows. A trial has less stack than the threads that
compile guides, so a spec that passes it cannot overflow their stacks. A trial also follows a few
random texts, as the main thread of the engine would.
"""

from __future__ import annotations

import random
from contextlib import suppress

from octavo.errors import GuideError, InvalidRequest
from octavo.params import StructuredOutputs
from octavo.text.guide import LLGuide, build_guide, start_thread
from octavo.text.spec_errors import unusable_spec
from octavo.text.vocabulary import Vocabulary

STACK_BYTES = 64 * 2**20
WALKS_PER_SPEC = 2
TOKENS_PER_WALK = 32


def try_spec(vocabulary: Vocabulary, spec: StructuredOutputs) -> None:
    """Compile a spec in a thread with a small stack, and follow a few random texts with it.

    Raises InvalidRequest. Call this only in a process that may crash.
    """
    errors: list[BaseException] = []

    def compile_and_walk() -> None:
        try:
            guide = build_guide(vocabulary, spec)
            for seed in range(WALKS_PER_SPEC):
                follow_random_text(guide.copy(), random.Random(seed))
        except BaseException as error:  # a panic in native code is not an Exception
            errors.append(error)

    start_thread(compile_and_walk, STACK_BYTES).join()
    if errors:
        error = errors[0]
        raise error if isinstance(error, InvalidRequest) else unusable_spec(spec, str(error))


def follow_random_text(guide: LLGuide, generator: random.Random) -> None:
    """Follow a text of random tokens. A text that reaches a dead end does not make the spec bad."""
    end_ids = set(guide._vocabulary.end_ids)
    with suppress(GuideError):
        for _ in range(TOKENS_PER_WALK):
            token_id = random_allowed_token(guide.mask, generator)
            if token_id in end_ids:
                return
            guide.accept(token_id)


def random_allowed_token(mask: bytes, generator: random.Random) -> int:
    """Return a random token that a mask allows."""
    start_byte = generator.randrange(len(mask))
    remaining = mask[start_byte:].lstrip(b"\0")
    if not remaining:
        remaining = mask.lstrip(b"\0")
    byte_index = len(mask) - len(remaining)
    allowed_bits = [bit for bit in range(8) if mask[byte_index] >> bit & 1]
    return byte_index * 8 + generator.choice(allowed_bits)
