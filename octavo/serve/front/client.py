"""The front's view of the engine: requests out, text in. One Call is one client's request, of one or several prompts.

    call = engine.open(requests, ...)          raises ApiError: the queue is full, the engine is not ready
    with call:                                 leaving it ends what is unfinished, within a step
        await call.taken()                     nothing in it will be refused any more
        async for pieces in call: ...          (which prompt, what is new), as it comes
        await call.done()                      or all at once: then read call.collectors

Every transport uses this and nothing below it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import cached_property, partial
from types import TracebackType
from typing import NamedTuple

from octavo.collect import Collector, Until, made_later
from octavo.errors import DeviceOutOfMemory, NotANumber
from octavo.outputs import CompletionOutput
from octavo.serve.api import api_errors
from octavo.serve.api.api_errors import ApiError, api_error
from octavo.serve.channel.messages import (
    Abort,
    Add,
    Loaded,
    News,
    Ready,
    Refused,
    Stop,
    Taken,
    ToFront,
    View,
)
from octavo.serve.front.keys import Key
from octavo.serve.front.metrics import Metrics
from octavo.serve.front.quarantine import Suspects, fingerprint
from octavo.serve.front.queue_bound import Queue
from octavo.serve.front.supervisor import Supervisor
from octavo.serve.front.trials import Trials
from octavo.serve.serve_config import ServeConfig
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output, Request

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Whose a request is."""

    call: Call
    which: int  # of the call's prompts

    @property
    def request(self) -> Request:
        return self.call.requests[self.which]

    def __str__(self) -> str:
        collector = self.call.collectors[self.which]
        waiting = collector.request.id in self.call.client.queue.waiting
        counts = [len(o.token_ids) for o in collector.outputs]
        return f"{collector.request.id}: {len(collector.request.prompt)} prompt tokens, {'waits' if waiting else f'has {counts}'}"


Piece = tuple[int, CompletionOutput]  # which of the call's prompts, what is new of it
# More objects at a time than before by so many let the garbage collector look through the new ones. With Python's own 700 that
# was at every third request, a tenth of what one costs.
OBJECTS = 20_000
# looked at in a turn, and how many of those may be a reply's last
OUTPUTS = 8
ENDS = 2
REMEMBERED = 1024  # ended calls that can still be told from unknown ones


class Call:
    """A client's request on its way. Not made by hand: see EngineClient.open."""

    def __init__(
        self,
        client: EngineClient,
        id: str,
        requests: list[Request],
        texts: list[str | None],
        until: Until | None,
        follow: bool,
        key: Key | None,
    ):
        self.client = client
        self.id = id
        self.requests = requests
        self.texts = texts
        self.until = until
        self.key = key
        self.owner, self.priority = (key.name, key.priority) if key is not None else ("", 0)
        self.error: ApiError | None = None
        self.structure: str | None = None  # the client's field that said what the text must match
        self.compiling = {r.id for r in requests if r.params.structured_outputs is not None}
        self.unfinished = len(requests)
        self.arrival = requests[0].arrival
        self.timer: asyncio.TimerHandle | None = None
        self.told = False  # the engine has been
        self.trial: asyncio.Task[None] | None = None  # of its structured output, while it is tried
        self.follow = follow
        self._closed = False
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None

    @cached_property
    def collectors(self) -> list[Collector]:
        """Of each prompt. Made when first asked for, which is when the engine has been told."""
        tokenizer = self.client.tokenizer
        found = [
            Collector(r, text, tokenizer, self.until)
            for r, text in zip(self.requests, self.texts, strict=True)
        ]
        if self.follow:
            for collector in found:
                collector.pieces = []
        return found

    # ---- the reader's side -----------------------------------------------------------------------

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> list[Piece]:
        """What is new; empty if `wake` was called. Raises the call's error after the last piece before it."""
        if not self._pieces:
            if self.error is not None:
                raise self.error
            if not self.unfinished:
                raise StopAsyncIteration
            await self._wait()
        pieces = self._pieces
        self._pieces = []
        if not pieces and self.error is not None:
            raise self.error
        return pieces

    async def taken(self) -> None:
        """The engine has been told, and what the text must match been compiled, if it must match something. Raises the call's
        error."""
        while (self.compiling or not self.told) and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def done(self) -> None:
        """All prompts are answered. Raises the call's error."""
        while self.unfinished and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Nobody listens any more. What is unfinished is aborted."""
        if not self._closed:
            self._closed = True
            self.client.forget(self)
            if self.key is not None:
                self.key.leave(
                    sum(
                        len(c.request.prompt) + sum(len(o.token_ids) for o in c.outputs)
                        for c in self.collectors
                    )
                )

    # ---- the engine's side -----------------------------------------------------------------------

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: ApiError) -> None:
        if self.error is None and self.unfinished:
            self.error = error
            self.client.abandon(self)
            self.wake()

    def take(self, which: int, out: Output) -> int | None:
        """Fold in one output. Returns the index of a sequence whose text is over, which the engine does not know."""
        collector = self.collectors[which]
        if collector.outputs[out.index].finish_reason is not None:
            return None  # its text was over; the engine had not heard of it yet
        if out.finish_reason in ("error", "abort"):
            if out.code == DeviceOutOfMemory.code:
                self.fail(api_errors.out_of_memory())
            elif out.code == NotANumber.code and out.error is not None:
                self.fail(api_errors.not_a_number(out.error))
            elif out.code is not None and out.error is not None:
                self.fail(ApiError(400, out.error, out.code, self.structure))
            else:
                self.fail(api_errors.step_failed())
            return None
        stop = collector.take(out)
        if self.follow and collector.pieces:
            self._pieces += [(which, piece) for piece in collector.pieces]
            collector.pieces.clear()
        if collector.finished:
            self.unfinished -= 1
        if self.follow or not self.unfinished:
            self.wake()
        return out.index if stop else None


class EngineClient:
    def __init__(self, config: ServeConfig, metrics: Metrics, supervisor: Supervisor | None = None):
        self.config = config
        self.metrics = metrics
        self.queue = Queue(config.max_queue, config.max_queue_tokens)
        self.open_requests: dict[str, Place] = {}
        self.calls: dict[str, Call] = {}
        self.ended: OrderedDict[str, str] = OrderedDict()  # call id -> owner
        self._outputs: deque[Output] = deque()  # that came and have not been looked at
        self.tokenizer: Tokenizer | None = None
        self.draining = False
        self.full = False  # the engine has no room for who waits: as it last said
        self.view: View | None = None  # the engine's last one, until live_feed.py takes it
        self.suspects = Suspects()
        self.trials: Trials | None = None  # None: specs of structured output are not tried
        self.supervisor = supervisor or Supervisor(
            config, self.receive, self.lost, lambda: self.open_requests
        )
        self.on_loaded: Callable[[Loaded], None] = lambda loaded: None
        self._loading: asyncio.Task[None] | None = None

    # ---- the state -------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.supervisor.ready and self.tokenizer is not None and not self.draining

    @property
    def model(self) -> Loaded:
        """Raises while there is no engine."""
        if self.draining:
            raise api_errors.draining()
        if (
            self.supervisor.phase != "ready"
            or self.tokenizer is None
            or self.supervisor.loaded is None
        ):
            raise api_errors.not_ready(self.supervisor.phase, self.supervisor.restarting)
        return self.supervisor.loaded

    def state(self) -> dict[str, object]:
        found = self.supervisor.state()
        if self.draining:
            found["state"] = "draining"
        elif found["state"] == "ready" and self.tokenizer is None:
            found["state"] = "starting"
        return found

    # ---- requests --------------------------------------------------------------------------------

    def open(
        self,
        id: str,
        requests: list[Request],
        texts: list[str | None],
        *,
        follow: bool,
        key: Key | None = None,
        timeout: float | None = None,
        structure: str | None = None,
        until: Until | None = None,
    ) -> Call:
        """Open a call and send its requests to the engine; a new spec of structured output is tried first. `follow`: the caller
        wants pieces as they come. `key`: whose they are, and who hears when they are over; `structure`: see Call; `until`:
        Collector."""
        self._check_room(requests, key)
        spec = requests[0].params.structured_outputs
        untried = (
            spec is not None and self.trials is not None and not self.trials.passed(spec, structure)
        )
        for i, request in enumerate(requests):
            request.id = f"{id}-{i}"
        call = Call(self, id, requests, texts, until, follow, key)
        call.structure = structure
        self.calls[id] = call
        if untried:
            call.trial = asyncio.create_task(self._send_after_trial(call, timeout))
        else:
            self._send(call, timeout)
        return call

    def check_admission(self, priority: int) -> None:
        """Raise ApiError if not even the smallest request could be sent now."""
        self.queue.check_full(priority, self._free_rows())

    def _free_rows(self) -> int:
        """How many requests get a row as soon as the engine looks."""
        rows = self.model.max_num_seqs - len(self.open_requests) + len(self.queue.waiting)
        return 0 if self.full else max(rows, 0)

    def _check_room(self, requests: list[Request], key: Key | None) -> None:
        """Raise ApiError where the requests may not be sent now."""
        self.queue.check(
            len(requests),
            sum(len(r.prompt) for r in requests),
            key.priority if key is not None else 0,
            self._free_rows(),
        )
        self.suspects.check(requests, (place.request for place in self.open_requests.values()))

    def _send(self, call: Call, timeout: float | None) -> None:
        if not self.open_requests:
            self.supervisor.progress = time.monotonic()  # from now on there is work
        told: Callable[[], None] | None = None
        for i, request in enumerate(call.requests):
            self.open_requests[request.id] = Place(call, i)
            self.queue.enter(request.id, call, len(request.prompt))
            if i == len(call.requests) - 1:
                told = partial(self._told, call, timeout)
            self.supervisor.send(
                Add(
                    request.id,
                    request.prompt,
                    request.params,
                    request.arrival,
                    request.cache_salt,
                    request.priority,
                    request.deadline,
                    request.tenant,
                    whole=not call.follow and made_later(request.params, call.until),
                ),
                told,
            )

    async def _send_after_trial(self, call: Call, timeout: float | None) -> None:
        """The engine does not know of the call meanwhile: it is not at work, and cannot be stalled."""
        spec = call.requests[0].params.structured_outputs
        assert spec is not None and self.trials is not None
        total = min(timeout or self.config.request_timeout, self.config.request_timeout)
        try:
            async with asyncio.timeout(max(call.arrival + total - time.monotonic(), 0)):
                await self.trials.run(spec, call.structure)
            if call.error is None:
                self._check_room(call.requests, call.key)
                self._send(call, timeout)
        except TimeoutError:
            call.fail(api_errors.deadline_exceeded(total))
        except ApiError as error:
            call.fail(error)

    def _told(self, call: Call, timeout: float | None) -> None:
        """The engine knows of it: now what it need not wait for. One timer: until the request should have begun, and then until
        it should have ended."""
        call.told = True
        call.wake()
        if call.id not in self.calls:
            return
        _ = call.collectors
        loop = asyncio.get_running_loop()
        spent = time.monotonic() - call.arrival
        total = min(timeout or self.config.request_timeout, self.config.request_timeout)
        waiting = self.config.queue_timeout

        def late() -> None:
            call.fail(api_errors.deadline_exceeded(total))

        def begun() -> None:
            if any(r.id in self.queue.waiting for r in call.requests):
                call.fail(api_errors.queue_timeout(waiting, self.queue.retry_after()))
            else:
                call.timer = loop.call_later(total - waiting, late)

        first = begun if waiting < total else late
        call.timer = loop.call_later(max(min(waiting, total) - spent, 0), first)

    def abandon(self, call: Call) -> None:
        """Take a call's requests from the engine."""
        ids = [r.id for r in call.requests if self.open_requests.pop(r.id, None)]
        for id in ids:
            self.queue.leave(id, begun=False)
        if ids:
            self.supervisor.send(Abort(ids))

    def forget(self, call: Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if call.trial is not None:
            call.trial.cancel()
        self.abandon(call)
        if self.calls.pop(call.id, None):
            self.ended[call.id] = call.owner
            while len(self.ended) > REMEMBERED:
                self.ended.popitem(last=False)
            self.metrics.ended(call)

    def cancel(self, id: str, owner: str) -> bool:
        """End a call by its id. False: it had ended already. Raises for one that is not there, or not the owner's."""
        call = self.calls.get(id)
        if call is not None and call.owner == owner:
            call.fail(api_errors.cancelled())
            return True
        if call is None and self.ended.get(id) == owner:
            return False
        raise ApiError(404, "there is no such request", "request_not_found")

    def fail_all(self, error: ApiError) -> None:
        for call in list(self.calls.values()):
            call.fail(error)

    # ---- news ------------------------------------------------------------------------------------

    def receive(self, message: ToFront) -> None:
        if isinstance(message, News):
            self.full = message.full
            for id, at in message.begun:
                self._begun(id, at)
            for tokens in message.steps:
                self.metrics.iteration.observe(tokens)
            self._blame(
                {
                    out.request_id
                    for out in message.outputs
                    if out.finish_reason == "error" and out.code is None
                }
            )
            self._outputs.extend(message.outputs)
            if len(self._outputs) == len(message.outputs):
                self._some()
            self.metrics.generated_tokens(
                sum(len(out.tokens) for out in message.outputs) + message.untold
            )
        elif isinstance(message, View):
            self.view = message
        elif isinstance(message, Refused):
            found = self.open_requests.get(message.id)
            if found is not None:
                param = (
                    found.call.structure if message.param == "structured_outputs" else message.param
                )
                found.call.fail(ApiError(400, message.message, message.code, param))
        elif isinstance(message, Taken):
            found = self.open_requests.get(message.id)
            if found is not None:
                found.call.compiling.discard(message.id)
                found.call.wake()
        elif isinstance(message, Loaded):
            self.on_loaded(message)
            self._loading = asyncio.create_task(self._load_tokenizer(message))
        elif isinstance(message, Ready):
            self.metrics.loaded(self.model_info())

    def _begun(self, id: str, at: float) -> None:
        if id in self.queue.waiting:
            self.queue.leave(id, begun=True)
            call, which = self.open_requests[id]
            self.metrics.begun(call.collectors[which], at)

    def _some(self) -> None:
        """A few outputs a turn, so that the first ones are on their way to their clients before the last ones are read. Of those
        that end a reply fewer: clients who ask again when they are answered then do so while others are still being answered.
        Answered all at once they would ask all at once, in step from then on, and front and engine would take turns."""
        now = time.monotonic()
        ended = 0
        try:
            for _ in range(min(OUTPUTS, len(self._outputs))):
                out = self._outputs.popleft()
                ended += out.finish_reason is not None
                self._output(out, now)
                if ended == ENDS:
                    break
        finally:  # whatever one of them may do, the others are looked at
            if self._outputs:
                asyncio.get_running_loop().call_soon(self._some)

    def _output(self, out: Output, now: float) -> None:
        found = self.open_requests.get(out.request_id)
        if found is None:
            return
        self._begun(out.request_id, now)
        call, which = found
        collector = call.collectors[which]
        self.metrics.tokens(collector, out, now)
        try:
            stop = call.take(which, out)
        except (
            BaseException
        ) as error:  # a panic in a library's native code too: others' news are still to be read
            log.exception("the text of request %s cannot be made", out.request_id)
            call.fail(api_error(RuntimeError(str(error))))
            return
        if stop is not None:
            self.supervisor.send(Stop(out.request_id, stop))
        if collector.finished:
            del self.open_requests[out.request_id]
            self.suspects.acquit(collector.request)

    def lost(self) -> None:
        """The engine is gone, and what it worked on with it."""
        while self._outputs:
            try:
                self._output(self._outputs.popleft(), time.monotonic())
            except Exception:  # whatever one of them may do, all hear of the end
                log.exception("what the engine said last could not be used")
        self.full = False
        self._blame(set(self.open_requests))
        for call in list(self.calls.values()):
            call.fail(api_errors.engine_lost())

    def _blame(self, ids: set[str]) -> None:
        """A step failed, or the engine, with these in it. What is found to be the cause hears that; the rest may try again."""
        places = [place for id in ids if (place := self.open_requests.get(id))]
        guilty = self.suspects.blame(place.request for place in places) if places else set()
        for place in places:
            if guilty and fingerprint(place.request) in guilty:
                place.call.fail(api_errors.poisoned())

    def model_info(self) -> Loaded | None:
        return self.supervisor.loaded

    async def _load_tokenizer(self, loaded: Loaded) -> None:
        tokenizer = await asyncio.to_thread(read_tokenizer, loaded)
        if self.config.chat_template is not None:
            tokenizer.chat_templates = {"default": self.config.chat_template}
        self.tokenizer = tokenizer
        gc.freeze()  # a vocabulary's objects stay, and are not looked through again and again
        gc.set_threshold(OBJECTS)


def read_tokenizer(loaded: Loaded) -> Tokenizer:
    """And what of it takes a while, here and not at the first request."""
    if loaded.tokenizer_gguf is not None:
        tokenizer = Tokenizer.from_gguf(loaded.tokenizer_gguf)
    else:
        assert loaded.tokenizer_directory is not None
        tokenizer = Tokenizer.from_directory(loaded.tokenizer_directory)
    _ = tokenizer.longest_token
    return tokenizer
