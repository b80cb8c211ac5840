"""Builds spans of the work of host and device in each step from the engine's events.

host    plan | launch | wait | commit | plan | launch | ...
device         ....step....                    ....step....
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from octavo.core.counters import HostTime
from octavo.core.spans import rounded
from octavo.events import Event, EventBus, StepFailed, StepLanded, StepPlanned
from octavo.types import Plan


class StepSpans:
    """Writes a line for each step that lands, with the times of host and device.

    Events say when a step was planned and when it landed. The times between them follow from the
    counters of the host, which the engine adds to before it emits an event."""

    MOVES = ("stores", "loads", "copies", "shifts", "saves", "fetches")

    def __init__(
        self,
        events: EventBus,
        clock: Callable[[], float],
        host_time: HostTime,
        write: Callable[[dict[str, Any]], None],
    ):
        self.clock = clock
        self.host_time = host_time
        self.write = write
        self.last_host_time = replace(host_time)  # the counters at the last event
        self.in_flight: dict[int, dict[str, Any]] = {}
        self.launching: dict[str, Any] | None = None  # the planned step that is not launched yet
        self.landed_at: float | None = None  # when the last step landed; None: none has
        self.commit: tuple[float, float] | None = None  # commit times of the step that landed last
        events.subscribe(self.on_event, StepPlanned, StepLanded, StepFailed)

    def on_event(self, event: Event) -> None:
        now = self.clock()
        if isinstance(event, StepPlanned):
            self._end_launch_and_commit()
            plan_seconds = self.host_time.plan - self.last_host_time.plan
            self._add_plan(event.plan, now - plan_seconds, now)
        elif isinstance(event, StepLanded):
            self._end_launch_and_commit()
            self._write_step(event, now)
        elif isinstance(event, StepFailed):
            self.in_flight.pop(event.plan.step, None)
            self.launching = None
        self.last_host_time = replace(self.host_time)

    def _end_launch_and_commit(self) -> None:
        """Record the parts of the loop that have ended since the last event."""
        if self.launching is not None:
            start = self.launching["plan"][1]
            self.launching["launch"] = _interval(
                start, self.host_time.launch - self.last_host_time.launch
            )
            self.launching = None
        if self.landed_at is not None and self.commit is None:
            self.commit = _interval(
                self.landed_at, self.host_time.commit - self.last_host_time.commit
            )

    def _add_plan(self, plan: Plan, start: float, end: float) -> None:
        prefill_tokens = sum(item.num_tokens for item in plan.items if item.start is not None)
        moved = {name: len(getattr(plan, name)) for name in self.MOVES}
        step = {
            "step": plan.step,
            "plan": _interval(start, end - start),
            "launch": None,
            "wait": None,
            "device": None,
            "commit": None,
            "prefill": prefill_tokens,
            "decode": sum(item.start is None for item in plan.items),
            "blocks": {name: count for name, count in moved.items() if count},
        }
        self.in_flight[plan.step] = step
        self.launching = step

    def _write_step(self, event: StepLanded, now: float) -> None:
        step = self.in_flight.pop(event.plan.step, None)
        if step is not None:
            waited = self.host_time.wait - self.last_host_time.wait
            step["wait"] = _interval(now - waited, waited)
            # Without a measured time, the device is busy from the launch or the landing before.
            device_start = max(step["plan"][1], self.landed_at or 0.0)
            if event.result.compute_seconds:
                device_start = max(device_start, now - event.result.compute_seconds)
            step["device"] = _interval(device_start, now - device_start)
            step["commit"] = self.commit
            self.write(step)
        self.commit = None
        self.landed_at = now


def _interval(start: float, seconds: float) -> tuple[float, float]:
    return rounded(start), rounded(start + seconds)
