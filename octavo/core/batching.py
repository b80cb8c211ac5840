"""Batching modes: when waiting requests may be admitted.

    continuous  at any time: there is no batch to wait for
    adaptive    at any time, but steps compute only as many prompt tokens as the latency target
                allows (step_budget.py)
    window      a batch collects requests for some milliseconds, or up to a number of requests. It
                runs to its end, beside others while there are batch slots for a whole one
    static      a batch collects a number of requests and runs to its end, alone
    none        one request after another

The last three exist for comparison with continuous batching. This module reads no clock: its caller
passes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from octavo.config import ScheduleConfig
from octavo.errors import InvalidRequest
from octavo.params import check_integer, check_real
from octavo.types import Sequence

# (waiting sequences, now) -> how many of the first ones make the next batch; 0: wait for more
ChooseSize = Callable[[list[Sequence], float], int]
MODES = ("continuous", "adaptive", "window", "static", "none")
# The modes that use each option.
MODES_OF_OPTION = {
    "max_batch": ("window", "static"),
    "window_ms": ("window",),
    "target_ms": ("adaptive",),
}
# Seconds after which a static batch starts although it is not full, because the last batch may
# never be full.
STATIC_TIMEOUT = 1.0


def form_single(waiting: list[Sequence], now: float) -> int:
    return 1


def form_collected(size: int, seconds: float) -> ChooseSize:
    """A batch forms when `size` requests wait, or when the first has waited for `seconds`."""

    def form(waiting: list[Sequence], now: float) -> int:
        if len(waiting) >= size:
            return size
        first_arrival = min(seq.request.arrival for seq in waiting)
        return size if now - first_arrival >= seconds else 0

    return form


def check_batching(modes: list[str], max_batch: int, window_ms: float, target_ms: float) -> None:
    """Raise InvalidRequest for invalid options and for options that none of the modes uses."""
    for mode in modes:
        find_size_rule(ScheduleConfig(batching=mode))
    check_integer("max_batch", max_batch, 1)
    check_real("window_ms", window_ms, 0, 60_000)
    check_real("target_ms", target_ms, 0, 60_000, open_low=True)
    defaults = ScheduleConfig()
    changed = {
        "max_batch": max_batch != defaults.max_batch,
        "window_ms": window_ms != defaults.batch_window * 1e3,
        "target_ms": target_ms != defaults.latency_target * 1e3,
    }
    for name, used_by in MODES_OF_OPTION.items():
        if changed[name] and not any(mode in used_by for mode in modes):
            raise InvalidRequest(
                f"{name} has no effect here: it applies to batching {' or '.join(used_by)}", name
            )


def find_size_rule(schedule: ScheduleConfig) -> ChooseSize | None:
    """Return the mode's function. None: the mode forms no batches."""
    if schedule.batching not in MODES:
        raise InvalidRequest(
            f"unknown batching mode {schedule.batching!r}: use {', '.join(MODES)}", "batching"
        )
    if schedule.batching == "window":
        return form_collected(schedule.max_batch, schedule.batch_window)
    if schedule.batching == "static":
        return form_collected(schedule.max_batch, STATIC_TIMEOUT)
    return form_single if schedule.batching == "none" else None


class Batches:
    """The requests that may be admitted: all of them if the mode forms no batches."""

    def __init__(self, schedule: ScheduleConfig):
        self.schedule = schedule
        self.choose_size = find_size_rule(schedule)
        self.admissible: set[str] = set()  # requests of the batches that may run

    def form_next(self, waiting: list[Sequence], live_requests: Container[str], now: float) -> None:
        """Start the next batch if it is time: alone, or in mode `window` beside other batches that
        leave it enough slots."""
        assert self.choose_size is not None
        running = {request_id for request_id in self.admissible if request_id in live_requests}
        fits_beside = (
            self.schedule.batching == "window"
            and len(running) + self.schedule.max_batch <= self.schedule.max_num_seqs
        )
        if not running or fits_beside:
            candidates = [seq for seq in waiting if seq.request.id not in running]
            size = self.choose_size(candidates, now) if candidates else 0
            self.admissible = running | {seq.request.id for seq in candidates[:size]}

    def may_admit(self, seq: Sequence) -> bool:
        return self.choose_size is None or seq.request.id in self.admissible
