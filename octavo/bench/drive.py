"""Gives requests to an engine as clients would, and records when each token arrives.

    jobs -> drive(engine) -> DriveReport

A number of clients send one job after another: each sends its next job when its last one has
ended. With as many clients as jobs, all jobs are sent at once.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from octavo.core.engine import Engine
from octavo.core.simulate import percentile
from octavo.errors import OctavoError
from octavo.params import SamplingParams
from octavo.types import Output, Request


@dataclass(frozen=True)
class Job:
    """One request. Its reply has exactly `output` tokens."""

    prompt: list[int]
    output: int
    # Tokens that the request asks for. If it is larger than `output`, the client ends the reply:
    # to the engine, it ends as unexpectedly as with an end-of-sequence token.
    max_tokens: int | None = None
    after: int = 0  # The job is sent when all jobs together have generated this many tokens.
    group: str = ""  # selects jobs for separate figures


@dataclass
class DriveReport:
    """Times in seconds. The lists have one entry for each job."""

    seconds: float = 0.0
    sent_at: list[float] = field(default_factory=list)
    token_times: list[list[float]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    most_running: int = 0  # the most sequences that ran at once
    groups: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.replies))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def first_tokens(self, group: str = "") -> list[float]:
        """Return the seconds from the arrival of each job of a group to its first token."""
        return [
            times[0] - sent
            for times, sent, job_group in zip(
                self.token_times, self.sent_at, self.groups, strict=True
            )
            if job_group == group
        ]

    def gaps(self, group: str = "") -> list[float]:
        """Return the seconds between two tokens of one reply, for all jobs of a group."""
        return [
            later - earlier
            for times, job_group in zip(self.token_times, self.groups, strict=True)
            if job_group == group
            for earlier, later in pairwise(times)
        ]

    def median_first_token(self, group: str = "") -> float:
        return statistics.median(self.first_tokens(group))

    def longest_gap(self, group: str = "") -> float:
        return max(self.gaps(group))

    def gap_percentile(self, q: float, group: str = "") -> float:
        return percentile(self.gaps(group), q)


class Driver:
    def __init__(self, engine: Engine, jobs: list[Job], clients: int, temperature: float):
        self.engine = engine
        self.jobs = jobs
        self.temperature = temperature
        self.idle_clients = clients
        self.pending = deque(range(len(jobs)))
        self.generated = 0
        self.report = DriveReport(
            sent_at=[0.0] * len(jobs),
            token_times=[[] for _ in jobs],
            replies=[[] for _ in jobs],
            groups=[job.group for job in jobs],
        )

    def run(self) -> DriveReport:
        start = time.perf_counter()
        while self.pending or not self.engine.idle:
            self._send()
            outputs = self.engine.step()
            now = time.perf_counter()
            self.report.most_running = max(
                self.report.most_running, len(self.engine.scheduler.running)
            )
            for output in outputs:
                self._record(output, now)
        self.report.seconds = time.perf_counter() - start
        expected = sum(job.output for job in self.jobs)
        if self.report.tokens != expected:
            raise OctavoError(
                f"{self.report.tokens} of {expected} tokens arrived, so the run does not count"
            )
        return self.report

    def _send(self) -> None:
        while self.pending and self.idle_clients:
            job_index = self.pending[0]
            job = self.jobs[job_index]
            if job.after > self.generated and not self.engine.idle:
                return
            self.pending.popleft()
            self.idle_clients -= 1
            params = SamplingParams(
                temperature=self.temperature,
                max_tokens=job.max_tokens or job.output,
                ignore_eos=True,
                detokenize=False,
                seed=job_index,
            )
            self.report.sent_at[job_index] = time.perf_counter()
            self.engine.add(Request(str(job_index), job.prompt, params))

    def _record(self, output: Output, now: float) -> None:
        if output.error is not None:
            raise OctavoError(f"a request failed ({output.error}), so the run does not count")
        job_index = int(output.request_id)
        reply = self.report.replies[job_index]
        num_missing = self.jobs[job_index].output - len(reply)
        reply += output.tokens[:num_missing]
        self.report.token_times[job_index] += [now] * len(output.tokens[:num_missing])
        self.generated += len(output.tokens[:num_missing])
        if output.finish_reason is None and len(output.tokens) >= num_missing:
            self.engine.stop(output.request_id, output.index)
            self.idle_clients += 1
        elif output.finish_reason is not None:
            self.idle_clients += 1


def drive(
    engine: Engine, jobs: list[Job], clients: int | None = None, temperature: float = 0.0
) -> DriveReport:
    """Run all jobs. Raises OctavoError if a token is missing."""
    return Driver(engine, jobs, clients or len(jobs), temperature).run()
