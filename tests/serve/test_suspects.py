"""Who is suspected of what."""

from __future__ import annotations

import pytest

from octavo.params import SamplingParams
from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.quarantine import BLOCKED, REMEMBERED, Suspects, fingerprint
from octavo.types import Request


def request(*prompt: int, **params: int) -> Request:
    return Request("r", list(prompt), SamplingParams(**params))  # type: ignore[arg-type]


POISON, A, B, C = request(1), request(2), request(3), request(4)


def code(suspects: Suspects, one: Request, *running: Request) -> str | None:
    try:
        suspects.check([one], running)
    except ApiError as error:
        return error.code
    return None


def test_the_second_failure_of_the_same_request_is_one_too_many() -> None:
    suspects = Suspects()
    assert suspects.blame([POISON, A, B]) == set()
    assert all(code(suspects, r, A) is None for r in (POISON, A, B)), "all may try again, together"
    assert suspects.blame([POISON, C]) == {fingerprint(POISON)}
    assert code(suspects, POISON) == "poison_request" and code(suspects, C) is None


def test_several_that_were_in_two_failures_are_tried_one_at_a_time() -> None:
    suspects = Suspects()
    for _ in range(2):
        assert suspects.blame([POISON, A, B]) == set()
    assert (
        code(suspects, A) is None
        and code(suspects, POISON, A) == "engine_restarting"
        and code(suspects, C, A) is None
    )
    suspects.acquit(A)
    assert code(suspects, POISON, A) is None
    assert suspects.blame([POISON, A, C]) == {fingerprint(POISON)}
    assert code(suspects, A) is None and code(suspects, B) is None


def test_what_ends_well_is_not_suspected() -> None:
    suspects = Suspects()
    suspects.blame([A])
    suspects.acquit(A)
    assert suspects.blame([A]) == set() and not suspects.blame([B])


def test_it_is_forgotten_with_time_and_bounded() -> None:
    now = 0.0
    suspects = Suspects(lambda: now)
    suspects.blame([POISON])
    suspects.blame([POISON])
    assert code(suspects, POISON) == "poison_request"
    now = BLOCKED
    assert code(suspects, POISON) is None
    suspects.blame([request(k) for k in range(REMEMBERED + 10)])
    assert len(suspects.known) == REMEMBERED


def test_other_parameters_are_another_request() -> None:
    assert (
        len(
            {
                fingerprint(r)
                for r in (request(1), request(1, max_tokens=3), request(1, 1), request(1))
            }
        )
        == 3
    )


def test_nothing_known_costs_nothing() -> None:
    with pytest.raises(AttributeError):
        fingerprint(None)  # type: ignore[arg-type]
    Suspects().check([None], [None])  # type: ignore[list-item]
