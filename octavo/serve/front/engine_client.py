"""The client of the engine sends requests, receives tokens and turns them into text.

    # This raises ApiError if the queue is full or the engine is not ready.
    call = engine_client.open(call_id, prepared, ...)
    with call:  # The end of the block aborts unfinished requests.
        # Wait until the requests are sent and, with structured output, accepted by the engine.
        await call.wait_accepted()
        # Either stream: each piece is the index of a prompt and its new text.
        async for pieces in call: ...
        # Or wait for everything, then read call.collectors.
        await call.wait_finished()

A Call has the requests of one client call: one Request for each prompt. Every transport uses this
module and no module below it.
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

from octavo.collect import Collector, is_decoded_at_end
from octavo.errors import DeviceOutOfMemory, NotANumber
from octavo.outputs import CompletionOutput
from octavo.serve.api import api_errors
from octavo.serve.api.api_errors import ApiError, api_error
from octavo.serve.api.validate import Prepared
from octavo.serve.channel.messages import (
    Abort,
    Accepted,
    Add,
    EventLines,
    Loaded,
    Ready,
    Refused,
    ReportRefusal,
    RequestSpans,
    SettingsReply,
    StepOutputs,
    Stop,
    ToFront,
)
from octavo.serve.front.keys import Key
from octavo.serve.front.metrics import Metrics
from octavo.serve.front.quarantine import Quarantine, fingerprint
from octavo.serve.front.queue_bound import QueueBound, QueueLimits
from octavo.serve.front.supervisor import Supervisor
from octavo.serve.front.tracing import CallSpans, ServerSpan, Tracing
from octavo.serve.front.trials import Trials
from octavo.serve.serve_config import ServeConfig
from octavo.text.tokenizer import Tokenizer
from octavo.types import Output, Request

log = logging.getLogger(__name__)


# Python's garbage collector runs after this many new objects. With the default of 700 it ran at
# every third request and used a tenth of the processor time.
GC_THRESHOLD = 20_000
# One iteration of the event loop processes at most this many outputs, and this many that end a
# reply.
OUTPUTS_PER_TURN = 8
FINISHED_PER_TURN = 2
# The ids of this many finished calls are remembered, to distinguish them from unknown ids.
REMEMBERED_CALLS = 1024

# Errors with these statuses concern a key, a route or a host name. They are unrelated to a request
# that the model could have run.
UNRELATED_STATUSES = frozenset({401, 403, 404, 405, 421})
OVERLOAD_STATUSES = frozenset({429, 503})
# The messages of these errors contain numbers, and no text of the request.
NUMERIC_ERRORS = frozenset({"context_length_exceeded", "kv_capacity_exceeded", "deadline_exceeded"})
MAX_REASON_CHARACTERS = 400  # The event stream shows this part of an error's message.

Piece = tuple[int, CompletionOutput]  # The index of the prompt, and its new text.


class OpenRequest(NamedTuple):
    """A request that the engine has not finished, and the call that it belongs to."""

    call: Call
    prompt_index: int

    @property
    def request(self) -> Request:
        return self.call.requests[self.prompt_index]

    def __str__(self) -> str:
        collector = self.call.collectors[self.prompt_index]
        request = collector.request
        state = "waiting"
        if request.id not in self.call.engine_client.queue_bound.waiting:
            counts = [len(output.token_ids) for output in collector.completions]
            state = f"generated {counts}"
        return f"{request.id}: {len(request.prompt)} prompt tokens, {state}"


class Call:
    """The requests of one client call, while they are in progress. EngineClient.open creates it."""

    def __init__(
        self,
        engine_client: EngineClient,
        call_id: str,
        prepared: Prepared,
        stream: bool,
        key: Key | None,
        parent_span: ServerSpan | None = None,
    ):
        self.engine_client = engine_client
        self.id = call_id
        self.requests = prepared.requests
        self.texts = prepared.texts
        self.make_end_check = prepared.make_end_check
        # The field of the client's request that contains the spec of structured output.
        self.structure_field = prepared.structure_field
        self.key = key
        self.owner = ""
        self.key_priority = 0
        if key is not None:
            self.owner = key.name
            self.key_priority = key.priority
        self.error: ApiError | None = None
        self.compiling = {
            request.id for request in self.requests if request.params.structured_outputs is not None
        }
        self.unfinished = len(self.requests)
        self.arrival = self.requests[0].arrival
        self.timer: asyncio.TimerHandle | None = None
        self.sent = False  # True means that the requests were sent to the engine.
        # The trial compilation of the call's structured output.
        self.trial: asyncio.Task[None] | None = None
        self.stream = stream
        self.spans: CallSpans | None = None  # None means that the call is not traced.
        if parent_span is not None and parent_span.is_recording:
            self.spans = parent_span.begin_call(self)
        self._closed = False
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None

    @cached_property
    def collectors(self) -> list[Collector]:
        """One collector for each prompt. They are created after the requests have been sent."""
        tokenizer = self.engine_client.tokenizer
        collectors = [
            Collector(request, text, tokenizer, self.make_end_check)
            for request, text in zip(self.requests, self.texts, strict=True)
        ]
        if self.stream:
            for collector in collectors:
                collector.pieces = []
        return collectors

    @property
    def token_count(self) -> int:
        """The number of tokens in all prompts and in all replies so far."""
        count = 0
        for collector in self.collectors:
            count += len(collector.request.prompt)
            count += sum(len(output.token_ids) for output in collector.completions)
        return count

    # ---- methods for the transport ---------------------------------------------------------------

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
        """Return the new pieces, or an empty list if `wake` was called.

        The error of a call is raised after the pieces that precede it.
        """
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

    async def wait_accepted(self) -> None:
        """Wait until the requests are sent to the engine. Raises the error of the call.

        With structured output, wait until the engine has accepted the requests. Without structured
        output, the engine may still refuse a request after this method has returned.
        """
        while (self.compiling or not self.sent) and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def wait_finished(self) -> None:
        """Wait until the replies to all prompts are complete. Raises the error of the call."""
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
        """Abort unfinished requests. The transport reads nothing more from the call."""
        if self._closed:
            return
        self._closed = True
        self.engine_client.end_call(self)
        if self.key is not None:
            self.key.leave(self.token_count)

    # ---- methods for EngineClient ----------------------------------------------------------------

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: ApiError) -> None:
        if self.error is None and self.unfinished:
            self.error = error
            self.engine_client.abort_in_engine(self)
            self.wake()

    def add_output(self, prompt_index: int, output: Output) -> int | None:
        """Add an output of the engine.

        Returns the index of the sequence if a stop string or a complete tool call has ended its
        text. The caller must then stop it in the engine, which does not know the text.
        """
        collector = self.collectors[prompt_index]
        if collector.completions[output.index].finish_reason is not None:
            # The engine generated this output before it received the Stop message.
            return None
        if output.finish_reason in ("error", "abort"):
            self.fail(self._engine_error(output))
            return None
        stopped = collector.add(output)
        if self.stream and collector.pieces:
            self._pieces += [(prompt_index, piece) for piece in collector.pieces]
            collector.pieces.clear()
        if collector.finished:
            self.unfinished -= 1
        if self.stream or not self.unfinished:
            self.wake()
        return output.index if stopped else None

    def _engine_error(self, output: Output) -> ApiError:
        """Return the client's error for a request that the engine has ended with an error."""
        if output.code == DeviceOutOfMemory.code:
            return api_errors.out_of_memory()
        if output.code is None or output.error is None:
            return api_errors.step_failed()
        if output.code == NotANumber.code:
            return api_errors.not_a_number(output.error)
        return ApiError(400, output.error, output.code, self.structure_field)


class EngineClient:
    """Sends requests to the engine process and passes its outputs on to their calls."""

    def __init__(self, config: ServeConfig, metrics: Metrics, supervisor: Supervisor | None = None):
        self.config = config
        self.metrics = metrics
        self.queue_bound = QueueBound(
            QueueLimits(
                memory=config.max_queue_memory,
                seconds=config.queue_timeout,
                requests=config.max_queue,
                tokens=config.max_queue_tokens,
            )
        )
        self.open_requests: dict[str, OpenRequest] = {}
        self.calls: dict[str, Call] = {}
        self.finished_calls: OrderedDict[str, str] = OrderedDict()  # call id -> owner
        self._outputs: deque[Output] = deque()  # Outputs that are received but not processed.
        self.tokenizer: Tokenizer | None = None
        self.draining = False
        # True means that the engine reported that it has no room for waiting requests.
        self.engine_saturated = False
        self.on_event_lines: Callable[[EventLines], None] = lambda message: None
        # The reply to a change of settings that is in progress (endpoints/live_controls.py).
        self.settings_reply: asyncio.Future[str] | None = None
        # True means that the event stream shows refusals, because it is recorded or watched.
        self.reports_refusals = False
        self.quarantine = Quarantine()
        self.tracing: Tracing | None = None  # None means that no endpoint for spans is given.
        # If this is None, specs of structured output are not compiled as a trial.
        self.trials: Trials | None = None
        self.supervisor = supervisor or Supervisor(
            config, self.receive, self.engine_lost, lambda: self.open_requests
        )
        self.on_loaded: Callable[[Loaded], None] = lambda loaded: None
        self._loading: asyncio.Task[None] | None = None

    # ---- the state -------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.supervisor.ready and self.tokenizer is not None and not self.draining

    @property
    def model(self) -> Loaded:
        """The model that the engine serves. Raises ApiError while the engine is not ready."""
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
        state = self.supervisor.state()
        if self.draining:
            state["state"] = "draining"
        elif state["state"] == "ready" and self.tokenizer is None:
            state["state"] = "starting"
        return state

    # ---- requests --------------------------------------------------------------------------------

    def open(
        self,
        call_id: str,
        prepared: Prepared,
        *,
        stream: bool,
        key: Key | None,
        parent_span: ServerSpan | None = None,
    ) -> Call:
        """Open a call and send its requests to the engine.

        A new spec of structured output is first compiled as a trial. With `stream`, the call
        returns pieces of text as they are generated. `key` is the API key of the client, and
        `parent_span` is the span of its HTTP request or gRPC call.
        """
        requests = prepared.requests
        self._check_queue(requests, key)
        spec = requests[0].params.structured_outputs
        needs_trial = False
        if spec is not None and self.trials is not None:
            needs_trial = not self.trials.passed(spec, prepared.structure_field)
        for index, request in enumerate(requests):
            request.id = f"{call_id}-{index}"
        call = Call(
            engine_client=self,
            call_id=call_id,
            prepared=prepared,
            stream=stream,
            key=key,
            parent_span=parent_span,
        )
        self.calls[call_id] = call
        if needs_trial:
            call.trial = asyncio.create_task(self._send_after_trial(call, prepared.timeout))
        else:
            self._send(call, prepared.timeout)
        return call

    def check_may_send(self, key_priority: int) -> None:
        """Raise ApiError if not even the smallest request could be sent now."""
        self.queue_bound.check_full(key_priority, self._free_slots())

    def _free_slots(self) -> int:
        """Return how many requests the engine can admit in its next step."""
        model = self.model  # This raises ApiError while the engine is not ready.
        if self.engine_saturated:
            return 0
        running = len(self.open_requests) - len(self.queue_bound.waiting)
        return max(model.max_num_seqs - running, 0)

    def _check_queue(self, requests: list[Request], key: Key | None) -> None:
        """Raise ApiError if the requests may not be sent now."""
        self.queue_bound.check(
            requests=len(requests),
            tokens=sum(len(request.prompt) for request in requests),
            key_priority=key.priority if key is not None else 0,
            free=self._free_slots(),
        )
        running = (open_request.request for open_request in self.open_requests.values())
        self.quarantine.check(requests, running)

    def _send(self, call: Call, timeout: float | None) -> None:
        if not self.open_requests:
            # The watchdog counts from this time.
            self.supervisor.last_progress_at = time.monotonic()
        on_sent: Callable[[], None] | None = None
        for index, request in enumerate(call.requests):
            self.open_requests[request.id] = OpenRequest(call, index)
            self.queue_bound.enter(request.id, call, len(request.prompt))
            if index == len(call.requests) - 1:
                on_sent = partial(self._after_send, call, timeout)
            message = Add(
                id=request.id,
                prompt=request.prompt,
                params=request.params,
                arrival=request.arrival,
                cache_salt=request.cache_salt,
                priority=request.priority,
                deadline=request.deadline,
                tenant=request.tenant,
                send_at_end=not call.stream
                and is_decoded_at_end(request.params, call.make_end_check),
                traced=call.spans is not None,
                pooling=request.pooling,
            )
            self.supervisor.send(message, on_sent)

    async def _send_after_trial(self, call: Call, timeout: float | None) -> None:
        """Compile the spec of a call as a trial in a worker process, then send the call.

        The watchdog does not count the time of the trial, because the engine does not have the
        call yet.
        """
        spec = call.requests[0].params.structured_outputs
        assert spec is not None and self.trials is not None
        total = self._total_timeout(timeout)
        try:
            async with asyncio.timeout(max(call.arrival + total - time.monotonic(), 0)):
                await self.trials.run(spec, call.structure_field)
            if call.error is None:
                self._check_queue(call.requests, call.key)
                self._send(call, timeout)
        except TimeoutError:
            call.fail(api_errors.deadline_exceeded(total))
        except ApiError as error:
            call.fail(error)

    def _total_timeout(self, timeout: float | None) -> float:
        return min(timeout or self.config.request_timeout, self.config.request_timeout)

    def _after_send(self, call: Call, timeout: float | None) -> None:
        """Create the collectors and start the timer, while the engine already runs the requests.

        The timer first limits the time in the queue, and then the time of the whole request.
        """
        call.sent = True
        call.wake()
        if call.id not in self.calls:
            return
        _ = call.collectors
        loop = asyncio.get_running_loop()
        elapsed = time.monotonic() - call.arrival
        total = self._total_timeout(timeout)
        queue_timeout = self.config.queue_timeout

        def on_deadline() -> None:
            call.fail(api_errors.deadline_exceeded(total))

        def on_queue_timeout() -> None:
            if any(request.id in self.queue_bound.waiting for request in call.requests):
                call.fail(api_errors.queue_timeout(queue_timeout, self.queue_bound.retry_after()))
            else:
                call.timer = loop.call_later(total - queue_timeout, on_deadline)

        if queue_timeout < total:
            call.timer = loop.call_later(max(queue_timeout - elapsed, 0), on_queue_timeout)
        else:
            call.timer = loop.call_later(max(total - elapsed, 0), on_deadline)

    def abort_in_engine(self, call: Call) -> None:
        """Abort the requests of a call in the engine."""
        request_ids = [
            request.id
            for request in call.requests
            if self.open_requests.pop(request.id, None) is not None
        ]
        for request_id in request_ids:
            self.queue_bound.leave(request_id, admitted=False)
        if request_ids:
            self.supervisor.send(Abort(request_ids))

    def end_call(self, call: Call) -> None:
        """Abort a call, stop its timer and its trial, and count it as finished."""
        if call.timer is not None:
            call.timer.cancel()
        if call.trial is not None:
            call.trial.cancel()
        self.abort_in_engine(call)
        if self.calls.pop(call.id, None) is not None:
            self.finished_calls[call.id] = call.owner
            while len(self.finished_calls) > REMEMBERED_CALLS:
                self.finished_calls.popitem(last=False)
            self.metrics.ended(call)
            if call.spans is not None:
                call.spans.end(call)

    def refuse(self, request_id: str, error: ApiError) -> None:
        """Count a request that was refused, and report it to the event stream.

        The message of an error may quote the request. The event stream shows the message only if
        the server shows texts, or if the message is known to quote nothing.
        """
        self.metrics.rejections.labels(error.code or error.type).inc()
        is_recorded = self.config.engine.record_events is not None
        if (self.reports_refusals or is_recorded) and error.status not in UNRELATED_STATUSES:
            reason = f"{error.status} {error.code or error.type}"
            quotes_nothing = error.status in OVERLOAD_STATUSES or error.code in NUMERIC_ERRORS
            if quotes_nothing or self.config.engine.show_text:
                reason += f": {error.message[:MAX_REASON_CHARACTERS]}"
            elif error.param:
                reason += f" ({error.param})"
            self.supervisor.send(ReportRefusal(request_id, reason))

    def cancel(self, call_id: str, owner: str) -> bool:
        """End a call by its id. Returns False if the call has already finished.

        Raises ApiError if the call does not exist or belongs to another owner.
        """
        call = self.calls.get(call_id)
        if call is not None and call.owner == owner:
            call.fail(api_errors.cancelled())
            return True
        if call is None and self.finished_calls.get(call_id) == owner:
            return False
        raise ApiError(404, "this server has no request with this id", "request_not_found")

    def fail_all(self, error: ApiError) -> None:
        for call in list(self.calls.values()):
            call.fail(error)

    # ---- messages from the engine ----------------------------------------------------------------

    def receive(self, message: ToFront) -> None:
        if isinstance(message, StepOutputs):
            self._receive_step(message)
        elif isinstance(message, EventLines):
            self.on_event_lines(message)
        elif isinstance(message, SettingsReply):
            if self.settings_reply is not None and not self.settings_reply.done():
                self.settings_reply.set_result(message.error)
        elif isinstance(message, RequestSpans):
            if self.tracing is not None:
                self.tracing.add_engine_spans(message)
        elif isinstance(message, Refused):
            self._receive_refusal(message)
        elif isinstance(message, Accepted):
            accepted = self.open_requests.get(message.id)
            if accepted is not None:
                accepted.call.compiling.discard(message.id)
                accepted.call.wake()
        elif isinstance(message, Loaded):
            self.on_loaded(message)
            self._loading = asyncio.create_task(self._load_tokenizer(message))
        elif isinstance(message, Ready):
            self.metrics.loaded(self.model_info())

    def _receive_step(self, message: StepOutputs) -> None:
        """Record the results of a step of the engine, and start to process its outputs."""
        self.engine_saturated = message.saturated
        for request_id, start_time in message.admitted:
            self._leave_queue(request_id, start_time)
        for tokens in message.steps:
            self.metrics.iteration.observe(tokens)
        failed = {
            output.request_id
            for output in message.outputs
            if output.finish_reason == "error" and output.code is None
        }
        self._record_failure(failed)
        self._outputs.extend(message.outputs)
        if len(self._outputs) == len(message.outputs):
            # The queue was empty, so no turn is scheduled that would process these outputs.
            self._process_outputs()
        tokens_sent = sum(len(output.tokens) for output in message.outputs)
        self.metrics.generated_tokens(tokens_sent + message.discarded_tokens)

    def _receive_refusal(self, message: Refused) -> None:
        refused = self.open_requests.get(message.id)
        if refused is None:
            return
        param = message.param
        if param == "structured_outputs":
            param = refused.call.structure_field
        refused.call.fail(ApiError(400, message.message, message.code, param))

    def _leave_queue(self, request_id: str, start_time: float) -> None:
        """Record that the engine has admitted a request, unless that is known already."""
        if request_id in self.queue_bound.waiting:
            self.queue_bound.leave(request_id, admitted=True)
            call, prompt_index = self.open_requests[request_id]
            self.metrics.admitted(call.collectors[prompt_index], start_time)

    def _process_outputs(self) -> None:
        """Process a few outputs in each iteration of the event loop.

        The first replies are then sent before the last outputs are processed. Outputs that end a
        reply are processed more slowly: otherwise clients that wait for a reply before their next
        request would all send it at once and stay synchronised, and the front process and the
        engine would work alternately instead of at the same time.
        """
        now = time.monotonic()
        finished = 0
        try:
            for _ in range(min(OUTPUTS_PER_TURN, len(self._outputs))):
                output = self._outputs.popleft()
                finished += output.finish_reason is not None
                self._process_output(output, now)
                if finished == FINISHED_PER_TURN:
                    break
        finally:  # An error in one output must not keep the others from being processed.
            if self._outputs:
                asyncio.get_running_loop().call_soon(self._process_outputs)

    def _process_output(self, output: Output, now: float) -> None:
        open_request = self.open_requests.get(output.request_id)
        if open_request is None:
            return
        self._leave_queue(output.request_id, now)
        call, prompt_index = open_request
        collector = call.collectors[prompt_index]
        self.metrics.tokens(collector, output, now)
        try:
            stopped_sequence = call.add_output(prompt_index, output)
        except BaseException as error:
            # A panic in native code is a BaseException. It must end only this call.
            log.exception("cannot convert the tokens of request %s to text", output.request_id)
            call.fail(api_error(RuntimeError(str(error))))
            return
        if stopped_sequence is not None:
            self.supervisor.send(Stop(output.request_id, stopped_sequence))
        if collector.finished:
            del self.open_requests[output.request_id]
            self.quarantine.clear(collector.request)

    def engine_lost(self) -> None:
        """End all calls, because the engine process has ended.

        The outputs that it sent before its end are processed first.
        """
        while self._outputs:
            try:
                self._process_output(self._outputs.popleft(), time.monotonic())
            except Exception:  # An error in one output must not keep the calls from being ended.
                log.exception("cannot process an output of the engine that has ended")
        self.engine_saturated = False
        self._record_failure(set(self.open_requests))
        for call in list(self.calls.values()):
            call.fail(api_errors.engine_lost())

    def _record_failure(self, request_ids: set[str]) -> None:
        """Record the failure of a step or of the engine in which these requests took part.

        The request that is found to be the cause is not accepted again. Clients may retry the
        others.
        """
        failed = [
            self.open_requests[request_id]
            for request_id in request_ids
            if request_id in self.open_requests
        ]
        if not failed:
            return
        quarantined = self.quarantine.record_failure(
            open_request.request for open_request in failed
        )
        for open_request in failed:
            if quarantined and fingerprint(open_request.request) in quarantined:
                open_request.call.fail(api_errors.poisoned())

    def model_info(self) -> Loaded | None:
        return self.supervisor.loaded

    async def _load_tokenizer(self, loaded: Loaded) -> None:
        tokenizer = await asyncio.to_thread(read_tokenizer, loaded)
        if self.config.chat_template is not None:
            tokenizer.chat_templates = {"default": self.config.chat_template}
        self.tokenizer = tokenizer
        # The objects of a vocabulary are permanent, so the garbage collector need not visit them.
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)


def read_tokenizer(loaded: Loaded) -> Tokenizer:
    """Read the tokenizer, and compute its lazy attributes before the first request needs them."""
    if loaded.tokenizer_gguf is not None:
        tokenizer = Tokenizer.from_gguf(loaded.tokenizer_gguf)
    else:
        assert loaded.tokenizer_directory is not None
        tokenizer = Tokenizer.from_directory(loaded.tokenizer_directory)
    _ = tokenizer.longest_token
    return tokenizer
