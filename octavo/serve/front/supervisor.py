"""Starts the engine process, and restarts it if it dies or hangs.

This module handles processes and phases. The module engine_client.py handles the messages of
the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import msgspec

from octavo.errors import ModelError
from octavo.serve.channel.messages import (
    EngineFailed,
    EventLines,
    Heartbeat,
    Loaded,
    Phase,
    Ready,
    Shutdown,
    Start,
    StepOutputs,
    ToEngine,
    ToFront,
)
from octavo.serve.channel.sockets import FrontLink
from octavo.serve.serve_config import ServeConfig

log = logging.getLogger(__name__)
ENGINE = (sys.executable, "-m", "octavo.serve.engine.engine_process")
FIRST_BACKOFF = 0.1
LAST_BACKOFF = 30.0
HEALTHY_SECONDS = 60.0  # An engine process that ran for this long resets the backoff.
STOP_SECONDS = 3.0  # The engine process has this time to end after a Shutdown message.


class Supervisor:
    PARTS = ("weights", "kv_cache")  # The parts that wake() can wake, under vLLM's names.

    def __init__(
        self,
        config: ServeConfig,
        on_message: Callable[[ToFront], None],
        on_loss: Callable[[], None],
        open_requests: Callable[[], Mapping[str, Any]],
        command: Sequence[str] = ENGINE,
    ):
        """Create the supervisor.

        `on_message` is called with each message of the engine, and `on_loss` when its process has
        ended. `open_requests` returns the open requests of the engine by id.
        """
        self.config = config
        self.command = command
        self.on_message = on_message
        self.on_loss = on_loss
        self.open_requests = open_requests
        self.phase = "starting"
        self.phase_started = time.monotonic()
        self.fraction: float | None = None
        self.starts = 0
        self.loaded: Loaded | None = None
        self.heartbeat = Heartbeat()
        # The last time when the engine made progress or was idle.
        self.last_progress_at = time.monotonic()
        # The time by which the current step should end, as estimated by the engine.
        self.step_deadline = 0.0
        self.stalled = False
        # The seconds that the latest recovery took, from the end of one engine process until the
        # next one was ready.
        self.recovery = 0.0
        self._lost_at: float | None = None  # The time of the failure, during a recovery.
        self.dumps: list[dict[str, Any]] = []  # The latest dumps, which /v1/dumps returns.
        self.process: asyncio.subprocess.Process | None = None
        self._link: FrontLink | None = None
        self._stopping = False
        # 0 means that an engine process runs. vLLM defines the other levels.
        self.sleep_level = 0
        self._asleep: set[str] = set()  # The parts that wake() has not woken.
        self._awake = asyncio.Event()

    # ---- state and messages ----------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.phase == "ready" and not self.stalled

    @property
    def restarting(self) -> bool:
        return self.starts > 1 or self.phase == "down"

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "state": self._state_name(),
            "phase": self.phase,
            "elapsed_s": round(time.monotonic() - self.phase_started, 3),
        }
        if self.fraction is not None:
            state["progress"] = round(self.fraction, 3)
        return state

    def _state_name(self) -> str:
        if self.stalled:
            return "stalled"
        if self.phase in ("ready", "sleeping"):
            return self.phase
        return "restarting" if self.restarting else "starting"

    def send(self, message: ToEngine, on_sent: Callable[[], None] | None = None) -> None:
        """Send a message, and call `on_sent` afterwards. It is not called if the engine is lost."""
        if self._link is not None:
            self._link.send(message, on_sent)

    def _requested(self) -> float:
        """Return the number of open requests, or infinity if the engine counts as busy.

        An engine on a GPU does not compete with the front process for cores. It always counts as
        busy, so that it receives each message at once.
        """
        if self.loaded is not None and self.loaded.device != "cpu":
            return math.inf
        return len(self.open_requests())

    # ---- the engine process ----------------------------------------------------------------------

    async def run(self) -> None:
        """Run engine processes until stop() is called.

        Raises ModelError if the first one reports that it cannot serve the model, or ends before
        the model is loaded.
        """
        backoff = FIRST_BACKOFF
        while not self._stopping:
            self.starts += 1
            self.failure: str | None = None
            started = time.monotonic()
            try:
                code = await self._run_engine()
            except OSError as error:  # There are too few file descriptors or too little memory.
                if self.starts == 1:
                    raise
                self.failure = str(error)
                code = -1
            if self._stopping:
                return
            if self.sleep_level:
                self._lost_at = None
                self._enter("sleeping")
                await self._awake.wait()
                continue
            failed_to_load = self.failure is not None or (self.loaded is None and code > 0)
            if self.starts == 1 and failed_to_load:
                raise ModelError(
                    self.failure
                    or "the engine process failed before the model was loaded: see the log above"
                )
            if time.monotonic() - started > HEALTHY_SECONDS:
                backoff = FIRST_BACKOFF
            log.error(
                "the engine process has ended (%s): a new one starts in %.1f s",
                self.failure or f"exit {code}",
                backoff,
            )
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, LAST_BACKOFF)

    async def _run_engine(self) -> int:
        """Run one engine process from its start to its end. Returns its exit code."""
        self._enter("starting")
        self.step_deadline = 0.0
        link: FrontLink | None = None
        try:
            link = self._link = FrontLink(self._receive, self._requested)
            with tempfile.TemporaryFile() as stacks:
                descriptors = (link.engine_end.fileno(), stacks.fileno())
                self.process = await asyncio.create_subprocess_exec(
                    *self.command,
                    *map(str, descriptors),
                    pass_fds=descriptors,
                    start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL,
                )
                link.close_engine_end()
                link.send(
                    Start(
                        model=self.config.model,
                        options=self.config.engine,
                        check_interval=self.config.check_interval,
                        kv_events=self.config.kv_events_config,
                        log_level=self.config.log_level,
                    )
                )
                watch = asyncio.create_task(self._watch(stacks))
                try:
                    return await self.process.wait()
                finally:
                    watch.cancel()
                    self._kill()
        finally:
            self._link = None
            if link is not None:
                link.close()
            self._enter("down")
            self.stalled = False
            if self._lost_at is None:
                self._lost_at = time.monotonic()
            try:
                self.on_loss()
            except Exception:  # The next engine must be started all the same.
                log.exception("cannot end the requests of an engine that has ended")

    def _receive(self, message: ToFront) -> None:
        now = time.monotonic()
        if isinstance(message, Heartbeat):
            if message.steps != self.heartbeat.steps or not self.open_requests():
                self.last_progress_at = now
            self.heartbeat = message
        elif isinstance(message, Phase):
            self._enter(message.name, message.fraction)
        elif isinstance(message, EngineFailed):
            self.failure = message.message
        elif not isinstance(message, EventLines):
            self.last_progress_at = now
            if isinstance(message, StepOutputs):
                # A request ends after request_timeout at the latest, so a longer step is useless.
                self.step_deadline = now + min(message.step_seconds, self.config.request_timeout)
            if isinstance(message, Loaded):
                self.loaded = message
            if isinstance(message, Ready):
                self._enter("ready")
                if self._lost_at is not None:
                    self.recovery = now - self._lost_at
                    self._lost_at = None
                    log.warning("the engine is ready again after %.1f s", self.recovery)
        self.on_message(message)

    def _enter(self, phase: str, fraction: float | None = None) -> None:
        now = time.monotonic()
        if phase != self.phase:
            self.phase_started = now
        self.phase = phase
        self.fraction = fraction
        self.last_progress_at = now

    # ---- the watchdog ----------------------------------------------------------------------------

    async def _watch(self, stacks: BinaryIO) -> None:
        """Watch whether the engine completes steps while it has requests.

        If it hangs, the watchdog first logs the state of the engine, and later kills the process.
        """
        dumped = False
        killed = False
        interval = min(self.config.stall_dump / 5, 0.5)
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(interval)
            # If this process did not run, the engine may not have run either: both were stopped.
            overslept = time.monotonic() - slept_at - interval
            if overslept > interval:
                self.last_progress_at += overslept
            stalled_seconds = time.monotonic() - max(self.last_progress_at, self.step_deadline)
            if self.phase != "ready" or stalled_seconds < self.config.stall_dump:
                self.stalled = False
                dumped = False
                continue
            self.stalled = True
            if not dumped:
                dumped = True
                await self._dump(stacks, stalled_seconds)
            if stalled_seconds >= self.config.stall_kill and not killed:
                killed = True
                log.error(
                    "the engine has completed no step for %.0f s: its process is killed",
                    stalled_seconds,
                )
                self._kill()

    async def _dump(self, stacks: BinaryIO, stalled_seconds: float) -> None:
        # The engine's faulthandler writes the stacks in the signal handler. It needs neither the
        # interpreter lock nor the main thread.
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(0.2)
        size = os.fstat(stacks.fileno()).st_size
        text = os.pread(stacks.fileno(), size, 0).decode(errors="replace")
        dump = {
            "event": "engine_stalled",
            "seconds": round(stalled_seconds, 1),
            "scheduler": msgspec.structs.asdict(self.heartbeat),
            "requests": [str(request) for request in list(self.open_requests().values())[:64]],
            "stacks": text.splitlines(),
        }
        self.dumps = [*self.dumps[-3:], dump]
        log.error("%s", json.dumps(dump))

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def sleep(self, level: int) -> None:
        """End the engine process, and start no other until wake() is called."""
        self.sleep_level = level
        self._asleep = set(self.PARTS)
        self._awake.clear()
        process = self.process
        assert process is not None
        self.send(Shutdown())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        self._kill()
        while self.phase != "sleeping":
            await asyncio.sleep(0.01)

    async def wake(self, parts: Sequence[str]) -> None:
        """Wake parts of the engine. The process starts when the last part is woken.

        In that case this method returns when the engine is ready.
        """
        self._asleep -= set(parts)
        if self._asleep or not self.sleep_level:
            return
        self.sleep_level = 0
        self._awake.set()
        while not self.ready and not self._stopping:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop the engine process without starting another one."""
        self._stopping = True
        self._awake.set()
        process = self.process
        if process is None or process.returncode is not None:
            return
        if self.phase == "ready":
            self.send(Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
        self._kill()
        await process.wait()
