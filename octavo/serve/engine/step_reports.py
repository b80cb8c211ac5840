"""Collects what the engine process reports to the front process about its steps.

Both classes listen to the events of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.events import Admitted, Event, EventBus, StepFailed, StepLanded, StepPlanned

LONG_SECONDS = 5.0  # A step that may take longer is announced before it is launched.


class StepCounts:
    """Counts the tokens and seconds of steps, and notes which requests were admitted."""

    def __init__(self, events: EventBus, token_budget: int):
        self.token_budget = token_budget
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.prefill_steps = 0  # Steps that compute at least one prompt token.
        self.full_steps = 0  # Prefill steps that use all of the token budget.
        self.prefill_seconds = 0.0  # The time of prefill steps.
        self.decode_seconds = 0.0  # The time of the other steps.
        self._admitted: list[tuple[str, float]] = []
        self._step_tokens: list[int] = []
        events.subscribe(self.on_event, Admitted, StepPlanned, StepLanded)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Admitted):
            # The first sequence of a request is admitted before its forks.
            if event.seq.index == 0 and event.seq.preemptions == 0:
                self._admitted.append((event.seq.request.id, time.monotonic()))
        elif isinstance(event, StepPlanned) and event.plan.items:
            items = event.plan.items
            prefill_tokens = sum(item.num_tokens for item in items if item.start is not None)
            num_tokens = event.plan.num_tokens
            self.prefill_tokens += prefill_tokens
            self.decode_tokens += num_tokens - prefill_tokens
            # The last chunk of a prompt generates a token besides those that it computes.
            num_first_tokens = sum(item.sample for item in items if item.start is not None)
            self._step_tokens.append(num_tokens + num_first_tokens)
            self.prefill_steps += prefill_tokens > 0
            self.full_steps += prefill_tokens > 0 and num_tokens >= self.token_budget
        elif isinstance(event, StepLanded) and event.plan.items:
            if any(item.start is not None for item in event.plan.items):
                self.prefill_seconds += event.seconds
            else:
                self.decode_seconds += event.seconds

    @property
    def has_steps(self) -> bool:
        return bool(self._step_tokens)

    def take_admitted(self) -> list[tuple[str, float]]:
        """Return the requests that were admitted since the last call, and when."""
        admitted = self._admitted
        self._admitted = []
        return admitted

    def take_step_tokens(self) -> list[int]:
        """Return how many tokens each step since the last call has computed or generated."""
        step_tokens = self._step_tokens
        self._step_tokens = []
        return step_tokens


class LongSteps:
    """Estimates which steps may take long, so that the watchdog does not count them as hangs."""

    def __init__(
        self, events: EventBus, seconds_per_token: float, announce: Callable[[float], None]
    ):
        """Subscribe to the events of the engine.

        `seconds_per_token` is the time of a token on the slowest supported machine, and 0 means
        that no step takes long. `announce(seconds)` is called before a long step is launched.
        """
        self.seconds_per_token = seconds_per_token
        self.announce = announce
        self._in_flight: dict[int, float] = {}  # step number -> seconds that it may take
        events.subscribe(self.on_event, StepPlanned, StepLanded, StepFailed)

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            seconds = event.plan.num_tokens * self.seconds_per_token
            if seconds > LONG_SECONDS:
                self._in_flight[event.plan.step] = seconds
                self.announce(seconds)
        elif isinstance(event, StepLanded | StepFailed):
            self._in_flight.pop(event.plan.step, None)

    @property
    def longest(self) -> float:
        """The seconds that the longest step in flight may take."""
        return max(self._in_flight.values(), default=0.0)
