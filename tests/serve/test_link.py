"""Between the front and the engine process: what is said in one turn of the event loop goes
together and in order."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Any

import pytest

from octavo.params import SamplingParams
from octavo.serve.channel import sockets
from octavo.serve.channel.messages import (
    Abort,
    Add,
    EngineFailed,
    Heartbeat,
    Phase,
    Refused,
    Shutdown,
    ToEngine,
    ToFront,
)
from octavo.serve.channel.sockets import LENGTH, EngineLink, FrontLink


def add(id: str, **params: Any) -> Add:
    return Add(id, [1, 2, 3], SamplingParams(**params), time.monotonic(), "")


def count(data: bytes) -> int:
    """Messages in these bytes."""
    found = 0
    while data:
        data, found = data[4 + LENGTH.unpack_from(data)[0] :], found + 1
    return found


def talk(
    say: Callable[[FrontLink], Any], asked: int = 0
) -> tuple[list[ToEngine], list[int], list[ToFront]]:
    """What the engine's end hears, how many messages left together each time, and what the front's
    end hears."""
    heard: list[ToEngine] = []
    sizes: list[int] = []
    answers: list[ToFront] = []

    async def run() -> None:
        front = FrontLink(answers.append, lambda: asked)
        send = front._pipe.send

        def counted(data: bytes = b"") -> bool:
            sizes.append(count(data))
            return send(data)

        front._pipe.send = counted  # type: ignore[method-assign]
        engine = EngineLink(front.engine_end)
        engine.send(Heartbeat())
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

    asyncio.run(run())
    return heard, sizes, answers


def test_what_is_said_in_one_turn_goes_as_one_message_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "LONGEST_WAIT", 10.0)
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


def test_an_idle_engine_is_told_when_a_turn_brings_nothing_more() -> None:
    async def say(front: FrontLink) -> None:
        for ids in ("ab", "c"):
            for id in ids:
                front.send(add(id))
            await asyncio.sleep(0)

    heard, sizes, _ = talk(say)
    assert [m.id for m in heard if isinstance(m, Add)] == ["a", "b", "c"] and sizes == [3]


def test_who_said_it_hears_when_it_has_left() -> None:
    async def run() -> None:
        front = FrontLink(lambda message: None)
        told: list[bool] = []
        front.send(
            add("a"), lambda: told.append(EngineLink(front.engine_end).receive(0) is not None)
        )
        assert not told
        await asyncio.sleep(0.05)
        front.close()
        assert told == [True]

    asyncio.run(run())


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
    monkeypatch.setattr(sockets, "LONGEST_WAIT", 0.02)

    def say(front: FrontLink) -> None:
        for id in "abc":  # c comes when a has waited for long enough
            front.send(add(id))
            time.sleep(0.012)
        front.send(add("d"))

    heard, sizes, _ = talk(say)
    assert [m.id for m in heard if isinstance(m, Add)] == ["a", "b", "c", "d"] and sizes == [3, 1]


def test_one_that_cannot_be_used_is_refused_and_the_others_are_heard() -> None:
    bad = add("bad")
    bad.params.temperature = -1.0
    heard, sizes, answers = talk(
        lambda front: [front.send(message) for message in (add("a"), bad, add("b"))]
    )
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
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: errors.append(context)
        )
        await run()

    asyncio.run(watched())
    assert not errors


def test_a_front_that_does_not_read_holds_up_no_engine_and_misses_nothing() -> None:
    """More than the socket has room for: it is kept, in order, and a message larger than one read
    comes whole."""
    heard: list[ToFront] = []
    said = [Phase(str(i) * 1000, i) for i in range(3000)] + [Phase("x" * 2**22)]

    async def run() -> None:
        front = FrontLink(heard.append)
        engine = EngineLink(front.engine_end)
        begun = time.monotonic()
        for message in said:
            engine.send(message)
        assert time.monotonic() - begun < 1 and engine.has_unsent.is_set() and not heard
        while len(heard) < len(said):
            engine.push(0)
            await asyncio.sleep(0)
        assert not engine.has_unsent.is_set()
        front.close()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert heard == said


def test_an_engine_that_does_not_read_holds_up_no_front_and_misses_nothing() -> None:
    async def run() -> None:
        front = FrontLink(lambda message: None)
        engine, said = EngineLink(front.engine_end), [Abort([f"{i}" * 500]) for i in range(3000)]
        for message in said:
            front.send(message)
        heard: list[ToEngine] = []
        while len(heard) < len(said):
            await asyncio.sleep(0)
            while (message := engine.receive(0)) is not None:
                heard.append(message)
        front.close()
        assert heard == said

    asyncio.run(asyncio.wait_for(run(), 20))


def test_what_an_engine_said_last_is_heard_after_its_end() -> None:
    heard: list[ToFront] = []

    async def run() -> None:
        front = FrontLink(heard.append)
        engine = EngineLink(front.engine_end)
        engine.send(EngineFailed("the model cannot be served"))
        engine.close()
        front.engine_end.close()
        front.close()

    asyncio.run(run())
    assert heard == [EngineFailed("the model cannot be served")]


def test_one_message_that_nobody_can_use_takes_no_other_with_it() -> None:
    heard: list[ToFront] = []

    def deliver(message: ToFront) -> None:
        heard.append(message)
        if len(heard) == 1:
            raise RuntimeError("a mistake in the front")

    async def run() -> None:
        front = FrontLink(deliver)
        engine = EngineLink(front.engine_end)
        engine.send(Heartbeat(steps=1))
        engine.send(Heartbeat(steps=2))
        await asyncio.sleep(0.05)
        front.close()

    asyncio.run(run())
    assert heard == [Heartbeat(steps=1), Heartbeat(steps=2)]


def test_an_engine_whose_front_is_gone_ends() -> None:
    async def run() -> None:
        front = FrontLink(lambda message: None)
        other = front.engine_end.dup()
        front.close()
        engine = EngineLink(other)
        engine.send(Heartbeat())  # to nobody, and no error
        assert isinstance(engine.receive(None), Shutdown)
        other.close()

    asyncio.run(run())


def test_what_the_system_has_no_room_for_just_now_goes_later() -> None:
    class Full:
        sent, failures = b"", 1

        def setblocking(self, flag: bool) -> None: ...

        def send(self, data: memoryview) -> int:
            if len(self.sent) == 3 and self.failures:
                self.failures = 0
                raise OSError(errno.ENOBUFS, "no buffer space")
            self.sent += bytes(data[:3])
            return min(3, len(data))

    end = Full()
    pipe = sockets.Pipe(end)  # type: ignore[arg-type]
    assert not pipe.send(b"abcdef") and end.sent == b"abc"
    assert pipe.send(b"gh") and end.sent == b"abcdefgh"
