"""The front's view of the engine: many outputs at once are looked at a few a turn, in order, and
none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.serve.channel.messages import StepOutputs
from octavo.serve.front.engine_client import FINISHED_PER_TURN, OUTPUTS_PER_TURN, EngineClient
from octavo.serve.front.metrics import Metrics
from octavo.serve.serve_config import ServeConfig
from octavo.types import Output


def outputs(first: int, count: int) -> list[Output]:
    return [Output(f"r{i}", 0, [i]) for i in range(first, first + count)]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = EngineClient(ServeConfig(), Metrics("octavo", "m"))
    found.seen = []  # type: ignore[attr-defined]

    def look(out: Output, now: float) -> None:
        found.seen.append(out.tokens[0])  # type: ignore[attr-defined]
        if out.tokens[0] == 3:
            raise RuntimeError("a mistake in the front")

    monkeypatch.setattr(found, "_process_output", look)
    return found


def test_a_few_a_turn_and_in_order_whatever_one_of_them_does(client: Any) -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        with pytest.raises(RuntimeError):
            client.receive(StepOutputs(outputs(0, 20), []))
        assert client.seen == [0, 1, 2, 3]
        client.receive(StepOutputs(outputs(20, 10), []))
        await asyncio.sleep(0)
        assert client.seen == list(range(4 + OUTPUTS_PER_TURN)), "no sooner because more came"
        await asyncio.sleep(0.01)
        assert client.seen == list(range(30))

    asyncio.run(run())


def test_replies_that_end_with_one_step_are_ended_few_at_a_time(client: Any) -> None:
    async def run() -> None:
        ends = [Output(f"r{i}", 0, [i], finish_reason="length") for i in range(10, 15)]
        client.receive(StepOutputs([*outputs(20, 3), *ends], []))
        assert client.seen == [20, 21, 22, 10, 11] and FINISHED_PER_TURN == 2
        await asyncio.sleep(0)
        assert client.seen[5:] == [12, 13]
        await asyncio.sleep(0)
        assert client.seen[7:] == [14]

    asyncio.run(run())


def test_what_an_engine_said_before_its_end_counts(client: Any) -> None:
    async def run() -> None:
        client.receive(StepOutputs(outputs(10, 20), []))
        client.engine_lost()
        assert client.seen == list(range(10, 30))

    asyncio.run(run())


def test_all_hear_of_the_engine_s_end_whatever_its_last_words_do(client: Any) -> None:
    class Open:
        error: Any = None

        def fail(self, error: Any) -> None:
            self.error = error

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        client.calls = {"a": Open(), "b": Open()}
        client._outputs.extend(outputs(0, 6))
        client.engine_lost()
        assert client.seen == list(range(6)), "the fourth was a mistake"
        assert all(call.error.code == "engine_restarting" for call in client.calls.values())

    asyncio.run(run())
