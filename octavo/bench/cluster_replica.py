"""One replica of a simulated cluster: continuous batching, with steps of equal shape taken at once.

Between two changes of the batch, every step computes one token of each decoding sequence, and a
step is longer than the one before it by a constant. The time of such a run of steps is a sum of an
arithmetic series, so a run costs the simulation as much as one step. Steps with prompts are
simulated one by one. The times are those of octavo/core/simulate.py with depth 1 and the policy
fcfs, with these simplifications:

- A sequence reserves the KV of its whole reply at its admission, so nothing is preempted.
- The prefix cache holds segments: the least recently used segment is evicted as a whole.
- No prompt overtakes another (the option short_prompt_share is 0).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.simulate import Costs

Segment = tuple[int, int]  # (key of its content and all before it, tokens)


@dataclass(slots=True, eq=False)
class ClusterRequest:
    arrival: float
    prompt: int
    output: int
    segments: list[Segment]  # segments of prompt and reply; only full blocks count
    computed: int = 0  # prompt positions that are computed or were cached
    cached: int = 0
    reserved: int = 0  # tokens of KV that the replica keeps for it
    first_token_at: float = math.nan
    num_retries: int = 0
    is_transferred: bool = False  # its KV has come from another replica


@dataclass(frozen=True)
class ReplicaOptions:
    costs: Costs
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    kv_tokens: int = 65_536
    block_size: int = 16


class PrefixSegments:
    """The prefix cache of a replica, least recently used segment first."""

    def __init__(self) -> None:
        self.segments: OrderedDict[int, int] = OrderedDict()  # key -> tokens
        self.tokens = 0

    def match(self, request: ClusterRequest, block_size: int) -> int:
        """Return how many tokens of the prompt are cached. Only full blocks count, and the last
        token of the prompt is always computed."""
        cached_tokens = 0
        for key, tokens in request.segments:
            if key not in self.segments or cached_tokens >= request.prompt:
                break
            self.segments.move_to_end(key)
            cached_tokens += tokens
        max_cached = (request.prompt - 1) // block_size * block_size
        return min(cached_tokens // block_size * block_size, max_cached)

    def add(self, segments: list[Segment]) -> int:
        """Add segments, and return how many tokens are new."""
        added = 0
        for key, tokens in segments:
            if key in self.segments:
                self.segments.move_to_end(key)
            else:
                self.segments[key] = tokens
                added += tokens
        self.tokens += added
        return added

    def shrink_to(self, tokens: int) -> None:
        while self.tokens > tokens and self.segments:
            _, evicted = self.segments.popitem(last=False)
            self.tokens -= evicted


class ClusterReplica:
    """A replica with at most one run of steps in progress, which ends at `ends_at`."""

    def __init__(
        self,
        options: ReplicaOptions,
        add_gaps: Callable[[float, float, int], None],
        on_first_token: Callable[[ClusterRequest, float], bool],
        on_finish: Callable[[ClusterRequest, float], None],
    ):
        """Create an idle replica.

        `add_gaps(first, last, count)` counts times between tokens, evenly from first to last.
        `on_first_token` returns whether the replica also decodes the request."""
        self.options = options
        self.add_gaps = add_gaps
        self.on_first_token = on_first_token
        self.on_finish = on_finish
        self.busy_seconds = 0.0
        self.num_tokens = 0
        self.num_runs = 0  # also the version of `ends_at`
        self.clear()

    def clear(self) -> None:
        """Forget all requests and the cache, as after a crash."""
        self.waiting: deque[ClusterRequest] = deque()
        self.prefilling: list[ClusterRequest] = []
        # (steps after which it finishes, number, request)
        self.decoding: list[tuple[int, int, ClusterRequest]] = []
        self.joining: list[ClusterRequest] = []  # those that are transferred and not decoded yet
        self.cache = PrefixSegments()
        self.reserved = 0
        self.kv_entries = 0  # entries that the next step reads for decoding sequences
        self.steps_done = 0
        self.num_joined = 0
        self.chunks: list[tuple[ClusterRequest, int]] = []
        self.run_start = 0.0
        self.run_steps = 0  # 0: the replica is idle
        self.first_step = 0.0  # seconds of the first step of the run
        self.growth = 0.0  # seconds by which each step is longer than the one before it
        self.ends_at = math.inf
        self.num_runs += 1

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    @property
    def started(self) -> list[ClusterRequest]:
        return self.prefilling + [request for _, _, request in self.decoding]

    # ---- arrivals ----------------------------------------------------------------------------

    def arrive(self, request: ClusterRequest, now: float) -> None:
        self.waiting.append(request)
        if not self.run_steps:
            self._begin_run(now)
        elif self.run_steps > 1 and self._has_room(self.waiting[0]):
            self._cut_run(now)

    def _has_room(self, request: ClusterRequest) -> bool:
        running = len(self.prefilling) + len(self.decoding)
        needed = request.prompt + request.output
        return (
            running < self.options.max_num_seqs and self.reserved + needed <= self.options.kv_tokens
        )

    def _cut_run(self, now: float) -> None:
        """End the run with the step that is in progress."""
        steps = self._steps_until(now)
        if steps < self.run_steps:
            self.run_steps = steps
            self.ends_at = self.run_start + self._run_seconds(steps)
            self.num_runs += 1

    def _run_seconds(self, steps: int) -> float:
        return steps * self.first_step + self.growth * steps * (steps - 1) / 2

    def _steps_until(self, now: float) -> int:
        """Return the smallest number of steps whose end is not before `now`."""
        elapsed = now - self.run_start
        if self.growth <= 0:
            return max(math.ceil(elapsed / self.first_step - 1e-9), 1)
        half = self.growth / 2
        linear = self.first_step - half
        root = (-linear + math.sqrt(linear * linear + 4 * half * elapsed)) / (2 * half)
        return max(math.ceil(root - 1e-9), 1)

    # ---- runs of steps -----------------------------------------------------------------------

    def _begin_run(self, now: float) -> None:
        self._plan_prompts()
        costs = self.options.costs
        num_decoding = len(self.decoding)
        num_sampled = num_decoding
        prompt_tokens = 0
        pairs = 0
        for request, num_tokens in self.chunks:
            start = request.computed
            end = start + num_tokens
            prompt_tokens += num_tokens
            pairs += num_tokens * (start + end) // 2
            num_sampled += end == request.prompt
        if not num_sampled and not prompt_tokens:
            self.run_steps = 0
            self.ends_at = math.inf
            return
        self.run_start = now
        self.first_step = (
            costs.step
            + costs.prefill * prompt_tokens
            + costs.sampled * num_sampled
            + costs.kv * self.kv_entries
            + costs.pairs * pairs
        )
        self.growth = costs.kv * num_decoding
        is_single = bool(self.chunks or self.joining)
        self.run_steps = 1 if is_single else self.decoding[0][0] - self.steps_done
        self.ends_at = now + self._run_seconds(self.run_steps)
        self.num_runs += 1

    def _plan_prompts(self) -> None:
        """Choose the chunks of the next step, and admit waiting requests in order."""
        self.chunks = []
        budget = self.options.max_num_batched_tokens - len(self.decoding)
        for request in self.prefilling:
            budget -= self._add_chunk(request, budget)
        while self.waiting and budget > 0 and self._has_room(self.waiting[0]):
            request = self.waiting.popleft()
            if request.is_transferred:
                self._reserve(request)
                self._join(request)
                budget -= 1
                continue
            request.cached = self.cache.match(request, self.options.block_size)
            request.computed = request.cached
            self._reserve(request)
            self.prefilling.append(request)
            budget -= self._add_chunk(request, budget)

    def _add_chunk(self, request: ClusterRequest, budget: int) -> int:
        num_tokens = min(request.prompt - request.computed, budget)
        if num_tokens > 0:
            self.chunks.append((request, num_tokens))
        return max(num_tokens, 0)

    def _reserve(self, request: ClusterRequest) -> None:
        request.reserved = request.prompt - request.cached + request.output
        self.reserved += request.reserved
        self.cache.shrink_to(self.options.kv_tokens - self.reserved)

    def _join(self, request: ClusterRequest) -> None:
        """Let a request decode from the next step on. It has its first token."""
        self.num_joined += 1
        finishes_after = self.steps_done + request.output - 1
        heapq.heappush(self.decoding, (finishes_after, self.num_joined, request))
        self.kv_entries += request.prompt + 1
        if request.is_transferred:
            self.joining.append(request)

    def end_run(self) -> None:
        """Apply the run that has ended, and begin the next."""
        now = self.ends_at
        steps = self.run_steps
        num_decoding = len(self.decoding)
        self.busy_seconds += now - self.run_start
        num_gaps = steps * num_decoding - len(self.joining)
        if num_gaps > 0:
            last_step = self.first_step + self.growth * (steps - 1)
            self.add_gaps(self.first_step, last_step, num_gaps)
        for request in self.joining:
            gap = now - request.first_token_at
            self.add_gaps(gap, gap, 1)
        self.joining = []
        self.steps_done += steps
        self.kv_entries += steps * num_decoding
        self.num_tokens += steps * num_decoding
        while self.decoding and self.decoding[0][0] <= self.steps_done:
            _, _, request = heapq.heappop(self.decoding)
            self.kv_entries -= request.prompt + request.output
            self._finish(request, now)
        for request, num_tokens in self.chunks:
            request.computed += num_tokens
            if request.computed == request.prompt:
                self.prefilling.remove(request)
                self._end_prefill(request, now)
        self._begin_run(now)

    def _end_prefill(self, request: ClusterRequest, now: float) -> None:
        request.first_token_at = now
        self.num_tokens += 1
        covered = 0
        prompt_segments = []
        for key, tokens in request.segments:
            covered += tokens
            if covered > request.prompt:
                break
            prompt_segments.append((key, tokens))
        # Cached tokens are not counted twice.
        new_tokens = min(self.cache.add(prompt_segments), request.reserved)
        request.reserved -= new_tokens
        self.reserved -= new_tokens
        if not self.on_first_token(request, now) or request.output == 1:
            self._finish(request, now)
        else:
            self._join(request)

    def _finish(self, request: ClusterRequest, now: float) -> None:
        self.reserved -= request.reserved
        self.cache.add(request.segments)
        self.cache.shrink_to(self.options.kv_tokens - self.reserved)
        self.on_finish(request, now)
