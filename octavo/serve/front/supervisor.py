"""Keeps an engine process running: starts it, follows its heartbeat, starts it again when it dies or hangs.

Knows processes and phases; what the engine's news mean is its listener's business (client.py).
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
from typing import Any

import msgspec

from octavo.errors import ModelError
from octavo.serve.channel.messages import (
    Failed,
    Heartbeat,
    Loaded,
    News,
    Phase,
    Ready,
    Shutdown,
    Start,
    ToEngine,
    ToFront,
    View,
)
from octavo.serve.channel.sockets import FrontLink
from octavo.serve.serve_config import ServeConfig

log = logging.getLogger(__name__)
ENGINE = (sys.executable, "-m", "octavo.serve.engine.engine_process")
FIRST_BACKOFF = 0.1
LAST_BACKOFF = 30.0
HEALTHY = 60.0  # seconds after which an engine's death counts as the first again
GRACE = 3.0  # seconds an engine has to end by itself


class Supervisor:
    def __init__(
        self,
        config: ServeConfig,
        on_message: Callable[[ToFront], None],
        on_loss: Callable[[], None],
        work: Callable[[], Mapping[str, Any]],
        command: Sequence[str] = ENGINE,
    ):
        self.config = config
        self.command = command
        # `work`: what the engine has been asked for
        self.on_message = on_message
        self.on_loss = on_loss
        self.work = work
        self.phase = "starting"
        self.since = time.monotonic()
        self.fraction: float | None = None
        self.began = time.monotonic()
        self.starts = 0
        self.loaded: Loaded | None = None
        self.heartbeat = Heartbeat()
        self.progress = time.monotonic()  # when the engine last did something, or had nothing to do
        self.until = 0.0  # when the step under way should be over, where the engine has told of it
        self.stalled = False
        # seconds from an engine's end to the next one's being ready, the last time
        self.recovery = 0.0
        self._lost: float | None = None  # when the engine ended, until the next is ready
        self.dumps: list[dict[str, Any]] = []  # the last few, for whoever asks
        self.process: asyncio.subprocess.Process | None = None
        self._link: FrontLink | None = None
        self._stopping = False

    # ---- what others ask -------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.phase == "ready" and not self.stalled

    @property
    def restarting(self) -> bool:
        return self.starts > 1 or self.phase == "down"

    def state(self) -> dict[str, Any]:
        state = (
            "stalled"
            if self.stalled
            else "ready"
            if self.phase == "ready"
            else "restarting"
            if self.restarting
            else "starting"
        )
        found = {
            "state": state,
            "phase": self.phase,
            "elapsed_s": round(time.monotonic() - self.since, 3),
        }
        if self.fraction is not None:
            found["progress"] = round(self.fraction, 3)
        return found

    def send(self, message: ToEngine, told: Callable[[], None] | None = None) -> None:
        """`told` is called when the message has left; never, if the engine is lost before."""
        if self._link is not None:
            self._link.send(message, told)

    def _asked(self) -> float:
        """How many requests the engine is to have. One that computes on a device of its own takes nothing from the front when
        it begins: it always counts as at work, and nothing is held back from it."""
        return (
            math.inf
            if self.loaded is not None and self.loaded.device != "cpu"
            else len(self.work())
        )

    # ---- the process's life ----------------------------------------------------------------------

    async def run(self) -> None:
        """Until stop(). Raises ModelError if the first engine says that the model cannot be served, or fails itself."""
        backoff = FIRST_BACKOFF
        while not self._stopping:
            self.starts += 1
            self.failure: str | None = None
            begun = time.monotonic()
            try:
                code = await self._live()
            except OSError as error:  # no descriptor or no memory to start one with, just now
                if self.starts == 1:
                    raise
                self.failure = str(error)
                code = -1
            if self._stopping:
                return
            if self.starts == 1 and (
                self.failure is not None or (self.loaded is None and code > 0)
            ):
                raise ModelError(
                    self.failure
                    or "the engine process failed before the model was loaded: see above"
                )
            if time.monotonic() - begun > HEALTHY:
                backoff = FIRST_BACKOFF
            log.error(
                "the engine process ended (%s); starting it again in %.1f s",
                self.failure or f"exit {code}",
                backoff,
            )
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, LAST_BACKOFF)

    async def _live(self) -> int:
        """One engine process, from start to end."""
        self._enter("starting")
        self.until = 0.0
        link: FrontLink | None = None
        try:
            link = self._link = FrontLink(self._take, self._asked)
            with tempfile.TemporaryFile() as stacks:
                given = (link.other.fileno(), stacks.fileno())
                self.process = await asyncio.create_subprocess_exec(
                    *self.command,
                    *map(str, given),
                    pass_fds=given,
                    start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL,
                )
                link.given()
                link.send(Start(self.config.model, self.config.engine, self.config.check_interval))
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
            if self._lost is None:
                self._lost = time.monotonic()
            try:
                self.on_loss()
            except Exception:  # whatever it is, an engine must be started again
                log.exception("what the engine worked on could not be ended")

    def _take(self, message: ToFront) -> None:
        now = time.monotonic()
        if isinstance(message, Heartbeat):
            if message.steps != self.heartbeat.steps or not self.work():
                self.progress = now
            self.heartbeat = message
        elif isinstance(message, Phase):
            self._enter(message.name, message.fraction)
        elif isinstance(message, Failed):
            self.failure = message.message
        elif not isinstance(message, View):
            self.progress = now
            if isinstance(message, News):
                # beyond that nobody waits for it
                self.until = now + min(message.patience, self.config.request_timeout)
            if isinstance(message, Loaded):
                self.loaded = message
            if isinstance(message, Ready):
                self._enter("ready")
                if self._lost is not None:
                    self.recovery = now - self._lost
                    self._lost = None
                    log.warning("the engine is ready again, after %.1f s", self.recovery)
        self.on_message(message)

    def _enter(self, phase: str, fraction: float | None = None) -> None:
        now = time.monotonic()
        if phase != self.phase:
            self.since = now
        self.phase = phase
        self.fraction = fraction
        self.progress = now

    # ---- the watchdog ----------------------------------------------------------------------------

    async def _watch(self, stacks: Any) -> None:
        """No step for a while though there is work: first write down where it hangs, then end it."""
        dumped = killed = False
        while True:
            await asyncio.sleep(min(self.config.stall_dump / 5, 0.5))
            idle = time.monotonic() - max(self.progress, self.until)
            if self.phase != "ready" or idle < self.config.stall_dump:
                self.stalled = dumped = False
                continue
            self.stalled = True
            if not dumped:
                dumped = True
                await self._dump(stacks, idle)
            if idle >= self.config.stall_kill and not killed:
                killed = True
                log.error("no step for %.0f s: ending the engine process", idle)
                self._kill()

    async def _dump(self, stacks: Any, idle: float) -> None:
        # faulthandler writes from the signal handler: it needs neither the GIL nor the main
        # thread
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(0.2)
        size = os.fstat(stacks.fileno()).st_size
        text = os.pread(stacks.fileno(), size, 0).decode(errors="replace")
        dump = {
            "event": "engine_stalled",
            "seconds": round(idle, 1),
            "scheduler": msgspec.structs.asdict(self.heartbeat),
            "requests": [str(one) for one in list(self.work().values())[:64]],
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

    async def stop(self) -> None:
        self._stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        if self.phase == "ready":
            self.send(Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), GRACE)
        self._kill()
        await process.wait()
