"""Which requests are quarantined after failures, and for how long."""

from __future__ import annotations

import pytest

from octavo.params import SamplingParams
from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.quarantine import MAX_RECORDS, QUARANTINE_SECONDS, Quarantine, fingerprint
from octavo.types import Request


def request(*prompt: int, **params: int) -> Request:
    return Request("r", list(prompt), SamplingParams(**params))  # type: ignore[arg-type]


POISON, A, B, C = request(1), request(2), request(3), request(4)


def code(quarantine: Quarantine, one: Request, *running: Request) -> str | None:
    try:
        quarantine.check([one], running)
    except ApiError as error:
        return error.code
    return None


def test_the_second_failure_of_the_same_request_is_one_too_many() -> None:
    quarantine = Quarantine()
    assert quarantine.record_failure([POISON, A, B]) == set()
    assert all(code(quarantine, r, A) is None for r in (POISON, A, B)), (
        "all may try again, together"
    )
    assert quarantine.record_failure([POISON, C]) == {fingerprint(POISON)}
    assert code(quarantine, POISON) == "poison_request" and code(quarantine, C) is None


def test_several_that_were_in_two_failures_are_tried_one_at_a_time() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        assert quarantine.record_failure([POISON, A, B]) == set()
    assert (
        code(quarantine, A) is None
        and code(quarantine, POISON, A) == "engine_restarting"
        and code(quarantine, C, A) is None
    )
    quarantine.clear(A)
    assert code(quarantine, POISON, A) is None
    assert quarantine.record_failure([POISON, A, C]) == {fingerprint(POISON)}
    assert code(quarantine, A) is None and code(quarantine, B) is None


def test_what_ends_well_is_not_suspected() -> None:
    quarantine = Quarantine()
    quarantine.record_failure([A])
    quarantine.clear(A)
    assert quarantine.record_failure([A]) == set() and not quarantine.record_failure([B])


def test_it_is_forgotten_with_time_and_bounded() -> None:
    now = 0.0
    quarantine = Quarantine(lambda: now)
    quarantine.record_failure([POISON])
    quarantine.record_failure([POISON])
    assert code(quarantine, POISON) == "poison_request"
    now = QUARANTINE_SECONDS
    assert code(quarantine, POISON) is None
    quarantine.record_failure([request(k) for k in range(MAX_RECORDS + 10)])
    assert len(quarantine.records) == MAX_RECORDS


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
    Quarantine().check([None], [None])  # type: ignore[list-item]
