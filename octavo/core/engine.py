"""The loop: plan, launch, commit, with up to `depth` steps in flight. One thread calls it; it starts none itself.

depth 1    plan 1 | launch 1 ........ wait 1 | commit 1 | plan 2 | launch 2 ...
depth 2    plan 1 | launch 1 | plan 2 | launch 2 | wait 1 | commit 1 | plan 3 | launch 3 | wait 2 | ...
           step 2 is already queued on the device while the host works on the results of step 1
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from octavo.core.scheduler import Scheduler
from octavo.types import Output, Plan, Request, StepResult

log = logging.getLogger(__name__)


class Handle(Protocol):
    """A step on its way."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """What executes plans, strictly in order. A pure function of the stream of plans it was given."""

    def launch(self, plan: Plan) -> Handle: ...


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler, self.runner = scheduler, runner
        self.depth = scheduler.schedule.depth
        self.inflight: deque[tuple[Plan, Handle]] = deque()

    @property
    def idle(self) -> bool:
        return not (self.inflight or self.scheduler.live)

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequest, and changes nothing, for one that can never run."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> list[Output]:
        return self.scheduler.abort(request_id)

    def stop(self, request_id: str, index: int) -> None:
        self.scheduler.stop(request_id, index)

    def step(self) -> list[Output]:
        """Launch the next step if there is one, then take in the oldest result that is due."""
        plan = self.scheduler.plan()
        if plan.work:
            try:
                self.inflight.append((plan, self.runner.launch(plan)))
            except Exception as e:
                return self._fail(plan, e)
        if self.inflight and (len(self.inflight) >= self.depth or not plan.work):
            done, handle = self.inflight.popleft()
            try:
                result = handle.wait()
            except Exception as e:
                return self._fail(done, e)
            return self.scheduler.commit(done, result)
        return []

    def _fail(self, plan: Plan, e: Exception) -> list[Output]:
        """A step that raises ends the requests in it and nothing else."""
        log.exception("step %d failed; its requests end with an error", plan.step, exc_info=e)
        return self.scheduler.fail(plan, f"{type(e).__name__}: {e}")
