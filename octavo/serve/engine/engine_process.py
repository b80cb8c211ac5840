"""The main program of the engine process, which loads the model and runs steps.

The process ends when the front process that started it ends. It has these threads:

    main thread    receives messages, runs steps and sends results; it waits on the socket when idle
    guide threads  compile structured output (octavo/text/guide.py) before its request is queued
    heartbeat      sends a heartbeat four times a second, and data for which the socket had no room

Messages wait in the queue of the socket, and sending never blocks (sockets.py). This process
handles tokens, not text. Its only signal handler writes the stacks of all threads to a file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.draft_methods import describe as describe_speculative
from octavo.core.dummy_run import dummy_run
from octavo.core.engine import Engine
from octavo.core.event_recorder import EventRecorder
from octavo.core.event_stream import EventStream
from octavo.core.live_settings import change_settings
from octavo.core.speculation import DraftCounters
from octavo.core.tier_index import TierIndex
from octavo.errors import InvalidRequest, OctavoError
from octavo.events import GuideStarted, RequestRefused
from octavo.params import SamplingParams
from octavo.parent_process import die_with_parent
from octavo.process_usage import rss_bytes
from octavo.serve.channel.messages import (
    Abort,
    Accepted,
    Add,
    ChangeSettings,
    ClearCache,
    EngineFailed,
    EventLines,
    Heartbeat,
    Loaded,
    Phase,
    Ready,
    Refused,
    ReportRefusal,
    SettingsReply,
    Shutdown,
    Start,
    StepOutputs,
    Stop,
    ToEngine,
    WatchEvents,
)
from octavo.serve.channel.sockets import EngineLink
from octavo.serve.engine.request_tracer import RequestTracer
from octavo.serve.engine.server_sources import server_sources
from octavo.serve.engine.step_reports import LongSteps, StepCounts
from octavo.serve.process import return_free_memory
from octavo.types import Guide, Output, Request, Sequence

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.serve.engine.kv_publisher import KVPublisher
    from octavo.text.guide import Compilation, Guides

log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 0.25
LOST_EXIT_CODE = 3  # The process exits with this code after it has lost the device or a rank.
# Operations per second of the slowest core and the slowest GPU that are supported.
SLOWEST = {"cpu": 5e9, "cuda": 5e13}
POLL_SECONDS = 0.002  # An idle engine checks this often whether guides are compiled.
# The log of a violated invariant has at most this many sequences, and blocks of each sequence.
MAX_DUMPED = 64
# Why a request never arrives at the scheduler (RequestRefused.reason).
COMPILATION_ABORTED = "it was aborted while its structured output was compiled"
INVALID_STRUCTURE = "its structured output is not valid"
HOST_TIMES = ("plan", "launch", "wait", "commit")
LOG_FORMAT = "%(asctime)s engine: %(levelname)s %(message)s"
LOG_TIME = "%Y-%m-%d %H:%M:%S"


class DeviceLost(OctavoError):
    """The device is unusable in this process, after an illegal access or a failed assertion."""


class EngineLoop:
    # This function is called after a failed step, and returns whether the device is usable.
    alive: Callable[[], bool] = staticmethod(lambda: True)

    def __init__(
        self,
        engine: Engine,
        link: EngineLink,
        guides: Guides | None = None,
        check_interval: float = 0.0,
        seconds_per_token: float = 0.0,
        kv_publisher: KVPublisher | None = None,
        event_stream: EventStream | None = None,
    ):
        """Create the loop.

        `check_interval` is the number of seconds between two checks of the scheduler's invariants,
        and 0 turns the checks off. `seconds_per_token` is the time of a prompt token on the slowest
        supported machine. `kv_publisher` is None if KV events are not published. `event_stream` may
        be recorded already.
        """
        self.engine = engine
        self.kv_publisher = kv_publisher
        self.link = link
        self.guides = guides
        self.check_interval = check_interval
        self.last_check = time.monotonic()
        self.checks = 0
        self.check_failures = 0
        # The requests whose guide is being compiled, by their id.
        self.compiling: dict[str, tuple[Add, Compilation]] = {}
        # For requests that are not streamed: the tokens of each sequence after its first one.
        self.held_tokens: dict[str, dict[int, list[int]]] = {}
        token_budget = engine.scheduler.schedule.max_num_batched_tokens
        self.step_counts = StepCounts(engine.events, token_budget)
        self.long_steps = LongSteps(engine.events, seconds_per_token, self._announce_long_step)
        self.event_stream = EventStream(engine) if event_stream is None else event_stream
        self.watched = False  # True means that a live page is open.
        # Lines were dropped because the front process did not read. It needs a snapshot.
        self.dropped_lines = False
        self.tracer: RequestTracer | None = None  # It exists from the first traced request on.
        # The values that were last sent to the front process.
        self.step_seconds = 0.0
        self.saturated = False
        self.heartbeat = Heartbeat()
        self._update_heartbeat()

    def run(self) -> None:
        """Run until the front sends Shutdown."""
        engine = self.engine
        updated_at = 0.0
        while True:
            was_idle = False  # Whether the engine was idle when one of the messages arrived.
            while (message := self.link.receive(self._receive_timeout())) is not None:
                was_idle = was_idle or engine.idle
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            self._add_compiled()
            outputs = engine.step()
            failed = any(output.finish_reason == "error" and not output.code for output in outputs)
            if failed and not self.alive():
                raise DeviceLost("the device is no longer usable in this process")
            self.send(outputs)
            if self.kv_publisher is not None:
                self.kv_publisher.flush()
            now = time.monotonic()
            is_idle = engine.idle and not self.compiling
            if self.check_interval and now - self.last_check > self.check_interval:
                self.last_check = now
                self._check()
            if was_idle or is_idle or now - updated_at > HEARTBEAT_SECONDS:
                updated_at = now
                self._update_heartbeat()
                if was_idle or is_idle:
                    self.link.send(self.heartbeat)

    def _receive_timeout(self) -> float | None:
        """Return how many seconds to wait for a message, or None to wait without a limit."""
        if not self.engine.idle:
            return 0.0
        return POLL_SECONDS if self.compiling else None

    def _handle(self, message: ToEngine) -> None:
        engine = self.engine
        if isinstance(message, Add):
            spec = message.params.structured_outputs
            if self.guides is None:
                self._add(message)
            elif spec is None:
                self._add(message, self.guides.around_reasoning(message.params, None))
            else:
                self.compiling[message.id] = message, self.guides.start(spec)
                if GuideStarted in engine.events.listeners:
                    engine.events.emit(GuideStarted(message.id, len(message.prompt)))
        elif isinstance(message, Abort):
            self._abort(message.ids)
        elif isinstance(message, WatchEvents):
            self._watch(message.on)
        elif isinstance(message, ReportRefusal):
            self._report_refusal(message.id, message.reason)
        elif isinstance(message, ChangeSettings):
            self._change_settings(message.changes)
        elif isinstance(message, Stop):
            engine.stop(message.id, message.index)
        elif isinstance(message, ClearCache):
            engine.scheduler.clear_cache()
            if self.kv_publisher is not None:
                self.kv_publisher.flush()  # An idle engine has no next step that would flush it.

    def _abort(self, request_ids: list[str]) -> None:
        num_discarded = 0
        for request_id in request_ids:
            if self.compiling.pop(request_id, None) is not None:
                self._report_refusal(request_id, COMPILATION_ABORTED)
            num_discarded += sum(map(len, self.held_tokens.pop(request_id, {}).values()))
            self.engine.abort(request_id)
        is_idle = self.engine.idle and not self.compiling
        was_saturated = self.saturated
        self.saturated = self.saturated and not is_idle
        if num_discarded or was_saturated != self.saturated:
            self.link.send(
                StepOutputs(
                    [],
                    [],
                    discarded_tokens=num_discarded,
                    step_seconds=self.step_seconds,
                    saturated=self.saturated,
                )
            )
        if is_idle:
            self._update_heartbeat()
            self.link.send(self.heartbeat)

    def _add(self, message: Add, guide: Guide | None = None) -> bool:
        """Queue a request, or refuse it."""
        if message.traced:
            if self.tracer is None:
                self.tracer = RequestTracer(self.engine, self.link.send)
            self.tracer.expected.add(message.id)
        try:
            self.engine.add(
                Request(
                    id=message.id,
                    prompt=message.prompt,
                    params=message.params,
                    arrival=message.arrival,
                    cache_salt=message.cache_salt,
                    priority=message.priority,
                    deadline=message.deadline,
                    tenant=message.tenant,
                    guide=guide,
                    submitted=message.submitted,
                    pooling=message.pooling,
                )
            )
        except InvalidRequest as error:
            self.link.send(Refused(message.id, str(error), error.param, error.code))
            return False
        finally:
            if self.tracer is not None:
                self.tracer.expected.discard(message.id)
        if message.send_at_end:
            self.held_tokens[message.id] = {}
        return True

    def _add_compiled(self) -> None:
        """Queue requests whose guide is compiled, and refuse those whose guide is invalid."""
        for request_id, (message, compilation) in list(self.compiling.items()):
            try:
                guide = compilation.poll()
            except InvalidRequest as error:
                self.link.send(Refused(request_id, str(error), error.param, error.code))
                self._report_refusal(request_id, INVALID_STRUCTURE)
            else:
                if guide is None:
                    continue
                assert self.guides is not None
                if self._add(message, self.guides.around_reasoning(message.params, guide)):
                    self.link.send(Accepted(request_id))
            del self.compiling[request_id]

    def send(self, outputs: list[Output]) -> None:
        """Send the outputs of a step, and changes of state that the front process needs."""
        admitted = self.step_counts.take_admitted()
        if self.engine.idle:
            self.event_stream.flush()
        if self.dropped_lines and not self.link.has_unsent.is_set():
            self.event_stream.add_snapshot()
        if self.held_tokens:
            outputs = [output for output in outputs if self._is_sent_now(output)]
        sent_before = (self.step_seconds, self.saturated)
        self.step_seconds = self.long_steps.longest
        self.saturated = self.engine.scheduler.saturated
        # If all requests were aborted, no later message would report these steps.
        has_last_steps = self.step_counts.has_steps and self.engine.idle
        has_new_state = (self.step_seconds, self.saturated) != sent_before
        if outputs or admitted or has_last_steps or has_new_state:
            step_tokens = self.step_counts.take_step_tokens()
            self.link.send(
                StepOutputs(
                    outputs,
                    admitted,
                    step_tokens,
                    step_seconds=self.step_seconds,
                    saturated=self.saturated,
                )
            )

    def _announce_long_step(self, seconds: float) -> None:
        """Report a long step before it is launched.

        The watchdog then does not count it as a hang, and the requests that it admits count as
        admitted.
        """
        self.step_seconds = max(seconds, self.step_seconds)
        admitted = self.step_counts.take_admitted()
        self.link.send(
            StepOutputs([], admitted, [], step_seconds=self.step_seconds, saturated=self.saturated)
        )

    def _watch(self, on: bool) -> None:
        """Start or stop sending the event stream to the front process."""
        if on != self.watched:
            self.watched = on
            self.dropped_lines = False
            if on:
                self.event_stream.open(self._send_lines)
            else:
                self.event_stream.close(self._send_lines)

    def _send_lines(self, lines: bytes, is_start: bool) -> None:
        """Send lines of the event stream, unless the front process does not read.

        Lines are dropped while the front process does not read. It gets a snapshot when it reads
        again.
        """
        if self.link.has_unsent.is_set():
            self.dropped_lines = True
        elif is_start or not self.dropped_lines:
            self.dropped_lines = False
            self.link.send(EventLines(lines, is_start))

    def _change_settings(self, changes: dict[str, Any]) -> None:
        error = ""
        try:
            change_settings(self.engine.scheduler, changes)
        except InvalidRequest as invalid:
            error = str(invalid)
        self.event_stream.flush()
        self.link.send(SettingsReply(error))

    def _report_refusal(self, request_id: str, reason: str) -> None:
        events = self.engine.events
        if RequestRefused in events.listeners:
            events.emit(RequestRefused(request_id, reason))
            self.event_stream.flush()

    def _is_sent_now(self, output: Output) -> bool:
        """Return whether an output is sent now.

        If a request is not streamed, its tokens are sent with its last output, because a message
        for each token would be most of its cost.
        """
        tokens_by_index = self.held_tokens.get(output.request_id)
        if tokens_by_index is None:
            return True
        if output.finish_reason is None:
            if output.index in tokens_by_index:
                tokens_by_index[output.index] += output.tokens
                return False
            tokens_by_index[output.index] = []
            return True
        output.tokens = tokens_by_index.pop(output.index, []) + output.tokens
        if (
            not tokens_by_index
            and output.request_id not in self.engine.scheduler.sequences_by_request
        ):
            del self.held_tokens[output.request_id]
        return True

    def _check(self) -> None:
        """Check the scheduler's invariants.

        A violation is logged and counted, and the engine continues. The operator can then decide.
        """
        scheduler = self.engine.scheduler
        self.checks += 1
        try:
            scheduler.check()
        except Exception as error:
            self.check_failures += 1
            self._update_heartbeat()
            live = scheduler.live.values()
            dump = {
                "event": "invariant_broken",
                "error": f"{type(error).__name__}: {error}",
                "scheduler": msgspec.structs.asdict(self.heartbeat),
                "sequences": [describe_sequence(seq) for seq in islice(live, MAX_DUMPED)],
            }
            log.error("%s", json.dumps(dump))

    def _update_heartbeat(self) -> None:
        """Build a new heartbeat from the counters and the scheduler's state."""
        scheduler = self.engine.scheduler
        pool = scheduler.pool
        counters = scheduler.counters
        num_available = pool.num_available
        used_and_hashed = {
            block
            for seq in scheduler.running
            for block in seq.block_table
            if pool.hashes[block] is not None
        }
        # This equals pool.num_cached, which counts blocks one by one and takes 2 ms for 32K blocks.
        num_cached = len(pool.hash_index) - len(used_and_hashed)
        guides = self.guides
        speculation = scheduler.speculation
        drafts = speculation.counters if speculation is not None else DraftCounters([])
        self.heartbeat = Heartbeat(
            steps=counters.plans,
            running=len(scheduler.decoding) + len(scheduler.prefilling),
            waiting=len(scheduler.waiting),
            blocks_used=pool.num_blocks - num_available,
            blocks_cached=num_cached,
            blocks_free=num_available - num_cached,
            queried_tokens=counters.queried_tokens,
            cached_tokens=counters.cached_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            copies=counters.copies,
            prefill_tokens=self.step_counts.prefill_tokens,
            decode_tokens=self.step_counts.decode_tokens,
            seconds={name: getattr(self.engine.host_time, name) for name in HOST_TIMES},
            recomputed_tokens=counters.recomputed_tokens,
            tiers=tier_state(scheduler.tiers) if scheduler.tiers is not None else {},
            tier_misses=dict(counters.tiers.misses),
            guides_compiled=guides.compiled if guides is not None else 0,
            guides_cached=guides.hits if guides is not None else 0,
            guide_seconds=guides.seconds if guides is not None else 0.0,
            checks=self.checks,
            check_failures=self.check_failures,
            oom_steps=counters.oom_steps,
            verifications=drafts.verifications,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
            accepted_at=list(drafts.accepted_at),
            prefill_steps=self.step_counts.prefill_steps,
            full_steps=self.step_counts.full_steps,
            prefill_seconds=self.step_counts.prefill_seconds,
            decode_seconds=self.step_counts.decode_seconds,
            rss_bytes=rss_bytes(),
            gpu_bytes=gpu_bytes(),
        )


def gpu_bytes() -> dict[str, int]:
    """Return the memory of this process on its GPU. The result is empty without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
    }


def describe_sequence(seq: Sequence) -> dict[str, Any]:
    """Return the state of a sequence for the log."""
    return {
        "request": seq.request.id,
        "index": seq.index,
        "status": seq.status.value,
        "computed": seq.computed,
        "planned": seq.planned,
        "steps_in_flight": seq.steps_in_flight,
        "epoch": seq.epoch,
        "slot": seq.slot,
        "published_blocks": seq.published_blocks,
        "block_table": seq.block_table[:MAX_DUMPED],
    }


def tier_state(tiers: TierIndex) -> dict[str, float]:
    """Return the counters of the tiers, and how many host blocks are in each state."""
    state: dict[str, float] = {
        name: count for name, count in asdict(tiers.counters).items() if name != "misses"
    }
    ready = len(tiers.ready)
    free = len(tiers.free_blocks)
    return state | {
        **{
            f"{move}_bytes": state[f"{move}s"] * tiers.block_bytes
            for move in ("store", "load", "save")
        },
        "fetch_bytes": tiers.counters.fetches * tiers.block_bytes,
        "host_blocks_ready": ready,
        "host_blocks_free": free,
        "host_blocks_filling": tiers.num_host_blocks - ready - free,
    }


class HeartbeatThread(threading.Thread):
    """Sends the latest heartbeat while the main thread computes, loads or hangs."""

    def __init__(self, link: EngineLink):
        super().__init__(daemon=True, name="heartbeat")
        self.link = link
        self.loop: EngineLoop | None = None

    def run(self) -> None:
        while True:
            next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
            while (remaining := next_heartbeat - time.monotonic()) > 0:
                if self.link.has_unsent.wait(remaining):
                    self.link.push(next_heartbeat - time.monotonic())
            self.link.send(self.loop.heartbeat if self.loop else Heartbeat())


def build(start: Start, link: EngineLink) -> LLM:
    link.send(Phase("importing"))
    from octavo.llm import LLM
    from octavo.ops.cpu.thread_pool import report_compilation

    @contextlib.contextmanager
    def on_compilation() -> Iterator[None]:
        link.send(Phase("compiling"))
        yield
        link.send(Phase("allocating"))

    report_compilation(on_compilation)
    reported = 0.0

    def progress(fraction: float) -> None:
        nonlocal reported
        if fraction >= 1:
            link.send(Phase("allocating"))
        elif fraction - reported >= 0.01:
            reported = fraction
            link.send(Phase("loading", fraction))

    link.send(Phase("loading", 0.0))
    # main() records the event stream after the steps that warm up, so the LLM must not record it.
    options = replace(start.options, record_events=None)
    llm = LLM.from_options(start.model, options, progress)
    link.send(describe(llm, start.options.tokenizer))
    return llm


def describe(llm: LLM, tokenizer: str | None) -> Loaded:
    """Return the message that describes the model to the front process."""
    metadata = llm.checkpoint.gguf_metadata if tokenizer is None else None
    gguf = None
    if metadata is not None:
        gguf = {name: field for name, field in metadata.items() if name.startswith("tokenizer.")}
    memory = llm.memory
    speculative = llm.schedule.speculative
    return Loaded(
        vocab_size=llm.config.vocab_size,
        max_model_len=llm.schedule.max_model_len,
        max_num_seqs=llm.schedule.max_num_seqs,
        max_batched_tokens=llm.schedule.max_num_batched_tokens,
        block_size=llm.cache.block_size,
        num_blocks=llm.cache.num_blocks,
        prefix_caching=llm.cache.prefix_caching,
        dtype=str(llm.model_dtype).removeprefix("torch."),
        device=str(llm.device),
        architecture=llm.config.architecture,
        memory={
            "weights": memory.weights,
            "activations": memory.activations,
            "kv": memory.kv,
            "kv_tokens": memory.kv_tokens,
            "kv_host": memory.host,
            "kv_disk": memory.disk,
        },
        tokenizer_directory=str(tokenizer or llm.checkpoint.directory) if gguf is None else None,
        tokenizer_gguf=gguf,
        kv_dtype=str(llm.runner.kv.view.dtype).removeprefix("torch."),
        kv_budget=0 if llm.cache.kv_eviction == "none" else llm.cache.kv_budget,
        sampling=llm.default_sampling,
        eos_ids=list(llm.eos_ids),
        speculative="" if speculative is None else describe_speculative(speculative),
        weights=llm.weights_summary,
        hidden_size=llm.config.hidden_size,
        pooler=llm.pooler,
    )


def smoke_test(engine: Engine) -> None:
    """Run one small request through the engine. An engine that cannot do this is not ready."""
    with dummy_run(engine):
        engine.add(Request("smoke-test", [0] * 4, SamplingParams(max_tokens=4, ignore_eos=True)))
        while not engine.idle:
            for output in engine.step():
                if output.finish_reason == "error":
                    raise OctavoError(f"the model was loaded, but cannot run: {output.error}")


def open_kv_publisher(start: Start, engine: Engine) -> KVPublisher | None:
    if start.kv_events is None or not start.kv_events.enabled:
        return None
    from octavo.serve.engine.kv_publisher import KVPublisher

    return KVPublisher(start.kv_events, engine.events)


def slowest_token(llm: LLM) -> float:
    """Return the seconds that a prompt token takes on the slowest supported machine."""
    import torch

    from octavo.memory import parameter_count

    cores = torch.get_num_threads() if llm.device.type == "cpu" else 1
    return 4 * parameter_count(llm.model) / (SLOWEST[llm.device.type] * cores)


def device_alive(llm: LLM) -> bool:
    """Return whether the device and all ranks are still usable.

    After a fatal error on a GPU, every later call in the same process fails too.
    """
    if llm.ranks is not None and llm.ranks.is_lost:
        return False
    if llm.device.type != "cuda":
        return True
    import torch

    try:
        torch.cuda.synchronize(llm.device)
    except RuntimeError:
        return False
    return True


def exit_without_rank(reason: str) -> None:
    """End this process after a rank has ended. The supervisor then restarts all ranks."""
    log.critical("%s: the engine process exits, and a new one is started", reason)
    os._exit(LOST_EXIT_CODE)  # The main thread may wait for the rank.


def configure_log(level: str) -> None:
    # The status line of `octavo serve` may be on the terminal.
    erase_line = "\r\x1b[K" if sys.stderr.isatty() else ""
    logging.basicConfig(level=level.upper(), format=erase_line + LOG_FORMAT, datefmt=LOG_TIME)


def main(end: str, stacks: int) -> int:
    """Run the engine process.

    `end` is the descriptor of its end of the channel. `stacks` is the descriptor of the file to
    which SIGUSR1 writes the stacks of all threads.
    """
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.set_inheritable(int(end), False)
    link = EngineLink(socket.socket(fileno=int(end)))
    heartbeats = HeartbeatThread(link)
    link.send(Phase("starting"))
    start = link.receive(None)
    if not isinstance(start, Start):
        return 1
    configure_log(start.log_level)
    heartbeats.start()
    try:
        llm = build(start, link)
        link.send(Phase("warming"))
        smoke_test(llm.engine)
        llm.warm_up()
        kv_publisher = open_kv_publisher(start, llm.engine)
        event_stream = llm.streams.stream_of(llm.engine)
        sources = server_sources().items()
        event_stream.about["server_sources"] = {key: source._asdict() for key, source in sources}
        if start.options.record_events is not None:
            event_stream.open(EventRecorder(start.options.record_events))
    except OctavoError as error:
        link.send(EngineFailed(str(error)))
        link.close()
        return 2
    loop = EngineLoop(
        engine=llm.engine,
        link=link,
        guides=llm.guides,
        check_interval=start.check_interval,
        seconds_per_token=slowest_token(llm),
        kv_publisher=kv_publisher,
        event_stream=event_stream,
    )
    loop.alive = lambda: device_alive(llm)
    if llm.ranks is not None:
        llm.ranks.on_loss = exit_without_rank
    heartbeats.loop = loop
    gc.collect()
    # These objects are permanent. The garbage collector would spend 50 ms or more on them.
    gc.freeze()
    return_free_memory()
    link.send(Ready())
    try:
        loop.run()
    except DeviceLost as error:
        log.critical("%s: the engine process exits, and a new one is started", error)
        os._exit(LOST_EXIT_CODE)  # A normal exit would use the device, and would hang.
    if kv_publisher is not None:
        kv_publisher.close()
    llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
