"""The engine loop: plan, launch, commit, with up to `depth` steps in flight.

One thread calls the engine. The engine starts no thread.

depth 1    plan 1 | launch 1 ........ wait 1 | commit 1 | plan 2 | launch 2 ...
depth 2    plan 1 | launch 1 | plan 2 | launch 2 | wait 1 | commit 1 | plan 3 | launch 3 | ...
           step 2 is queued on the device while the host works on the results of step 1
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from octavo.core.counters import HostTime
from octavo.core.scheduler import Scheduler
from octavo.errors import DeviceOutOfMemory
from octavo.events import StepCommitted, StepFailed, StepLanded, StepPlanned, StepTimestamps
from octavo.types import Output, Plan, Request, StepResult

log = logging.getLogger(__name__)
POLL_SECONDS = 0.0005  # how long step() sleeps if nothing can run, while a batch forms


class Handle(Protocol):
    """A launched step."""

    def wait(self) -> StepResult: ...


class StepRunner(Protocol):
    """Executes plans strictly in order. Sampled tokens depend only on the sequence of plans.
    Disk events and measured times may differ between runs."""

    def launch(self, plan: Plan) -> Handle: ...


class StepInFlight(NamedTuple):
    plan: Plan
    handle: Handle
    started_at: float
    planned_at: float
    launched_at: float


class Engine:
    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, sleep: Callable[[float], None] = time.sleep
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.sleep = sleep
        self.depth = scheduler.schedule.depth
        self.in_flight: deque[StepInFlight] = deque()
        self.host_time = HostTime()
        self.events = scheduler.events
        self._last_landing = 0.0
        # Outputs of an interrupted step. The next step() returns them.
        self._late_outputs: list[Output] = []
        # The last interrupt that was handled without damage to the scheduler's state.
        self.handled_interrupt: BaseException | None = None

    @property
    def idle(self) -> bool:
        return not (self.in_flight or self.scheduler.live or self._late_outputs)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, and changes nothing, if it can never run."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> list[Output]:
        return self.scheduler.abort(request_id)

    def stop(self, request_id: str, index: int) -> None:
        self.scheduler.stop(request_id, index)

    def step(self) -> list[Output]:
        """Plan and launch the next step if there is work. Then commit the oldest step in flight,
        unless a step was launched and fewer than `depth` are in flight."""
        if self._late_outputs:
            late_outputs = self._late_outputs
            self._late_outputs = []
            return late_outputs
        host_time = self.host_time
        clock = self.scheduler.clock
        started_at = clock()
        plan = self.scheduler.plan()
        planned_at = clock()
        host_time.plans += 1
        host_time.plan += planned_at - started_at
        handle: Handle | None = None
        if plan.has_work:
            if StepPlanned in self.events.listeners:
                self.events.emit(StepPlanned(plan, self.scheduler.token_budget))
            try:
                handle = self.runner.launch(plan)
            except BaseException as error:
                return self._fail(plan, error)
        elif not self.in_flight and self.scheduler.waiting:
            self.sleep(POLL_SECONDS)
        launched_at = clock()
        if handle is not None:
            self.in_flight.append(StepInFlight(plan, handle, started_at, planned_at, launched_at))
        host_time.launch += launched_at - planned_at
        if not self.in_flight or (len(self.in_flight) < self.depth and plan.has_work):
            return []
        step = self.in_flight.popleft()
        try:
            result = step.handle.wait()
        except BaseException as error:
            return self._fail(step.plan, error)
        landed_at = clock()
        host_time.wait += landed_at - launched_at
        # A step begins when it is planned or, with several in flight, when the one before it lands.
        seconds = landed_at - max(step.started_at, self._last_landing)
        self._last_landing = landed_at
        if StepLanded in self.events.listeners:
            self.events.emit(StepLanded(step.plan, result, seconds))
        outputs = self.scheduler.commit(step.plan, result)
        committed_at = clock()
        host_time.commit += committed_at - landed_at
        if StepCommitted in self.events.listeners:
            before_wait = (step.started_at, step.planned_at, step.launched_at)
            times = StepTimestamps(*before_wait, launched_at, landed_at, committed_at)
            self.events.emit(StepCommitted(step.plan, result, times))
        return outputs

    def _fail(self, plan: Plan, error: BaseException) -> list[Output]:
        """Handle an error of the runner: end the requests of the failed step, and no others.

        The sequences of a step that exceeded the device's memory are computed again in smaller
        steps. An interrupt is raised again for the caller of step(). An error inside the scheduler
        is not handled: the scheduler's state may be inconsistent, and the engine must be
        replaced."""
        if StepFailed in self.events.listeners:
            self.events.emit(StepFailed(plan, error))
        if isinstance(error, DeviceOutOfMemory):
            log.warning(
                "step %d ran out of device memory (%d tokens): its sequences are recomputed in "
                "smaller steps",
                plan.step,
                plan.num_tokens,
            )
            return self.scheduler.retry_smaller(plan, str(error), error.code)
        outputs = self.scheduler.fail(plan, f"{type(error).__name__}: {error}")
        if not isinstance(error, Exception):
            self._late_outputs += outputs
            self.handled_interrupt = error
            raise error
        log.exception("step %d failed; its requests end with an error", plan.step, exc_info=error)
        return outputs
