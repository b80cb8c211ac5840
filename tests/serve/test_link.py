"""Between the front and the engine process: what is said in one turn of the event loop goes together and in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from octavo.serve import supervisor
from octavo.serve.engine_process import Link
from octavo.serve.messages import Abort, Add, Beat, Refused, ToEngine, ToFront
from octavo.serve.supervisor import FrontLink
from octavo.types import SamplingParams


def add(id: str, **params: Any) -> Add:
    return Add(id, [1, 2, 3], SamplingParams(**params), time.monotonic(), "")


def talk(say: Callable[[FrontLink], Any], asked: int = 0) -> tuple[list[ToEngine], list[int], list[ToFront]]:
    """What the engine's end hears, how many parts each message had, and what the front's end hears."""
    heard: list[ToEngine] = []
    sizes: list[int] = []
    answers: list[ToFront] = []

    async def run() -> None:
        front, context = FrontLink(answers.append, lambda: asked), zmq.Context()
        engine = Link(context, front.address)
        receive = engine._in.recv_multipart

        def counted() -> list[bytes]:
            parts = receive()
            sizes.append(len(parts))
            return parts

        engine._in.recv_multipart = counted  # type: ignore[assignment,method-assign]
        engine.send(Beat())
        try:
            result = say(front)
            if asyncio.iscoroutine(result):
                await result
            await asyncio.sleep(0.1)
            while (message := engine.receive(0.2)) is not None:
                heard.append(message)
            await asyncio.sleep(0.1)
        finally:
            front.close()
            context.destroy(linger=0)

    asyncio.run(run())
    return heard, sizes, answers


def test_what_is_said_in_one_turn_goes_as_one_message_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_WAIT", 10.0)
    said: list[ToEngine] = [add("a"), add("b"), Abort(["a"]), add("c")]
    heard, sizes, _ = talk(lambda front: [front.send(message) for message in said])
    assert heard == said and sizes == [4]


def test_what_cannot_be_said_takes_nothing_else_with_it() -> None:
    said: list[ToEngine] = [add("a"), add("b", stop="\ud800"), add("c")]
    heard, _, answers = talk(lambda front: [front.send(message) for message in said])
    assert [m.id for m in heard if isinstance(m, Add)] == ["a", "c"]
    assert [m.id for m in answers if isinstance(m, Refused)] == ["b"]


def test_an_engine_at_work_is_told_at_once() -> None:
    said: list[ToEngine] = [add("a"), add("b"), add("c")]
    heard, sizes, _ = talk(lambda front: [front.send(message) for message in said], asked=5)
    assert heard == said and sizes == [1, 1, 1]


def test_turns_are_not_joined() -> None:
    async def say(front: FrontLink) -> None:
        for id in "ab":
            front.send(add(id))
            await asyncio.sleep(0.01)

    heard, sizes, _ = talk(say)
    assert [m.id for m in heard if isinstance(m, Add)] == ["a", "b"] and sizes == [1, 1]


def test_a_request_counts_as_submitted_when_it_leaves() -> None:
    def say(front: FrontLink) -> None:
        front.send(add("a"))
        front.send(add("b"))

    begun = time.monotonic()
    heard, *_ = talk(say)
    first, second = (m.submitted for m in heard if isinstance(m, Add))
    assert begun < first == second < time.monotonic()


def test_a_long_turn_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_WAIT", 0.02)

    def say(front: FrontLink) -> None:
        for id in "abc":  # c comes when a has waited for long enough
            front.send(add(id))
            time.sleep(0.012)
        front.send(add("d"))

    heard, sizes, _ = talk(say)
    assert [m.id for m in heard if isinstance(m, Add)] == ["a", "b", "c", "d"] and sizes == [3, 1]


def test_who_has_waited_for_long_already_waits_for_nobody() -> None:
    def say(front: FrontLink) -> None:
        for id in "ab":
            late = add(id)
            late.arrival -= 1.0
            front.send(late)

    _, sizes, _ = talk(say)
    assert sizes == [1, 1]


def test_one_that_cannot_be_used_is_refused_and_the_others_are_heard() -> None:
    bad = add("bad")
    bad.params.temperature = -1.0
    heard, sizes, answers = talk(lambda front: [front.send(message) for message in (add("a"), bad, add("b"))])
    assert [m.id for m in heard if isinstance(m, Add)] == ["a", "b"] and sizes == [3]
    assert [m.id for m in answers if isinstance(m, Refused)] == ["bad"]


def test_what_is_said_last_is_no_error_when_the_link_is_closed() -> None:
    async def run() -> None:
        front = FrontLink(lambda message: None)
        front.send(Abort(["a"]))
        front.close()
        await asyncio.sleep(0.01)

    errors: list[Any] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        await run()

    asyncio.run(watched())
    assert not errors
