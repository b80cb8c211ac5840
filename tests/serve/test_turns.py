"""Requests that come at once are read in groups: nobody waits who need not, nobody is forgotten, the order is kept."""

from __future__ import annotations

import asyncio

import pytest

from octavo.serve import turns
from octavo.serve.turns import Turnstile


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "GROUP", 3)


def enter(count: int, leave: frozenset[int] = frozenset()) -> list[list[int]]:
    """Who came through in each turn of the loop. `leave`: who gives up at once."""
    found: list[list[int]] = [[]]

    async def one(gate: Turnstile, number: int) -> None:
        await gate.enter()
        found[-1].append(number)

    async def run() -> None:
        gate = Turnstile()
        tasks = [asyncio.create_task(one(gate, i)) for i in range(count)]
        await asyncio.sleep(0)
        assert gate.crowded == (count > 3)
        for i in leave:
            tasks[i].cancel()
        for _ in range(50):
            found.append([])
            await asyncio.sleep(0)
        assert not gate.crowded
        await asyncio.gather(*tasks, return_exceptions=True)
        await gate.enter()  # and it is open again

    asyncio.run(asyncio.wait_for(run(), 5))
    return [group for group in found if group]


def test_a_few_wait_for_nobody() -> None:
    assert enter(3) == [[0, 1, 2]]


def test_many_come_through_in_groups_and_in_order() -> None:
    assert enter(8) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_who_gives_up_takes_no_place() -> None:
    assert enter(8, leave=frozenset({3, 5})) == [[0, 1, 2], [4, 6, 7]]
