"""The loop: plan, launch, commit, with up to `depth` steps in flight. One thread calls it; it starts none itself.

depth 1    plan 1 | launch 1 ........ wait 1 | commit 1 | plan 2 | launch 2 ...
depth 2    plan 1 | launch 1 | plan 2 | launch 2 | wait 1 | commit 1 | plan 3 | launch 3 | wait 2 | ...
           step 2 is already queued on the device while the host works on the results of step 1
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.core.scheduler import Scheduler
from octavo.errors import DeviceOutOfMemory
from octavo.types import Output, Plan, Request, StepResult

log = logging.getLogger(__name__)
NAP = 0.0005  # seconds between looks at a batch that is still forming


class Handle(Protocol):
    """A step on its way."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """What executes plans, strictly in order. A pure function of the stream of plans it was given."""

    def launch(self, plan: Plan) -> Handle: ...


@dataclass(slots=True)
class HostTime:
    """Seconds the host spent in each part of the loop. All but `wait` must hide behind the device's work."""

    steps: int = 0
    plan: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    commit: float = 0.0


class Engine:
    def __init__(
        self, scheduler: Scheduler, runner: Runner, sleep: Callable[[float], None] = time.sleep
    ):
        self.scheduler, self.runner, self.sleep = scheduler, runner, sleep
        self.depth = scheduler.schedule.depth
        self.inflight: deque[tuple[Plan, Handle, float]] = deque()  # and when it was begun
        self.time = HostTime()
        # told of each step and the seconds it took
        self.observers: list[Callable[[Plan, float], None]] = []
        if scheduler.pace is not None:
            self.observers.append(scheduler.pace.observe)
        self._landed = 0.0  # when the latest step did
        self._late: list[Output] = []  # of a step that was interrupted
        self.dealt_with = 0  # id of the last interrupt, if its requests were ended in order

    @property
    def idle(self) -> bool:
        return not (self.inflight or self.scheduler.live or self._late)

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest, and changes nothing, for one that can never run."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> list[Output]:
        return self.scheduler.abort(request_id)

    def stop(self, request_id: str, index: int) -> None:
        self.scheduler.stop(request_id, index)

    def step(self) -> list[Output]:
        """Launch the next step if there is one, then take in the oldest result that is due."""
        if self._late:
            late, self._late = self._late, []
            return late
        time, clock = self.time, self.scheduler.clock
        start = clock()
        plan = self.scheduler.plan()
        time.steps += 1
        time.plan += (planned := clock()) - start
        if plan.has_work:
            try:
                self.inflight.append((plan, self.runner.launch(plan), start))
            except BaseException as e:
                return self._fail(plan, e)
        elif not self.inflight and self.scheduler.waiting:
            self.sleep(NAP)
        time.launch += (launched := clock()) - planned
        if not self.inflight or (len(self.inflight) < self.depth and plan.has_work):
            return []
        done, handle, began = self.inflight.popleft()
        try:
            result = handle.wait()
        except BaseException as e:
            return self._fail(done, e)
        time.wait += (waited := clock()) - launched
        for observe in self.observers:
            observe(done, waited - max(began, self._landed))
        self._landed = waited
        outputs = self.scheduler.commit(done, result)
        time.commit += clock() - waited
        return outputs

    def _fail(self, plan: Plan, e: BaseException) -> list[Output]:
        """A step that raises ends the requests in it and nothing else; one that is too large for the device's memory is tried
        again in smaller ones. An interrupt goes on to whoever runs the loop. What breaks off in the scheduler itself is not
        for here: its books may be half-written, and the engine is lost (LLM makes a new one, a server a new process)."""
        if isinstance(e, DeviceOutOfMemory):
            log.warning("step %d: %s; its requests are tried again in smaller steps", plan.step, e)
            return self.scheduler.shrink(plan, str(e), e.code)
        outputs = self.scheduler.fail(plan, f"{type(e).__name__}: {e}")
        if not isinstance(e, Exception):
            self._late += outputs
            self.dealt_with = id(e)
            raise e
        log.exception("step %d failed; its requests end with an error", plan.step, exc_info=e)
        return outputs
