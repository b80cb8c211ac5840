"""Finds the bottleneck of a server from its activity in a period. Pure arithmetic.

    idle      there is too little load to limit anything
    host      the API server, or the scheduler of the engine, keeps the device waiting
    memory    the KV pool is full: requests wait or are preempted
    prefill   most of the time goes into prompts
    decode    most of the time goes into generating tokens

A server has one bound at a time. The rules below are tried in this order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BUSY_CORE = 0.7  # share of one core at which an event loop counts as busy
IDLE_ENGINE = 0.7  # share of the time below which the engine waits for work
NO_LOAD = 0.05
LAG_SECONDS = 0.2  # delay of the event loop that clients feel
FULL_POOL = 0.95
HOST_SHARE = 0.4  # share of a step that the host may take before it is the bound
PREFILL_SHARE = 0.5
STARVED = 0.7  # share of a core that an engine on a CPU gets while it computes
FULL_STEPS = 0.5  # share of prefill steps that are full before the token budget is the cause


@dataclass(frozen=True)
class ServerActivity:
    """Seconds and counts of a server in one period."""

    seconds: float
    device: str  # "cpu" or "cuda"
    front_cpu_seconds: float
    worker_cpu_seconds: float  # sum over the front's worker processes
    engine_cpu_seconds: float
    plan_seconds: float
    launch_seconds: float
    wait_seconds: float
    commit_seconds: float
    steps: int
    prefill_steps: int
    full_steps: int
    prefill_seconds: float
    decode_seconds: float
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    # Means over the samples of the period.
    waiting: float
    kv_usage: float
    loop_lag_seconds: float
    token_budget: int | None = None

    @property
    def busy_seconds(self) -> float:
        """The time in which the engine was in a step."""
        return self.plan_seconds + self.launch_seconds + self.wait_seconds + self.commit_seconds

    @property
    def host_seconds(self) -> float:
        """The time of steps in which only the host worked. On a CPU, the launch is the
        computation, so its time does not count."""
        host = self.plan_seconds + self.commit_seconds
        return host + (self.launch_seconds if self.device == "cuda" else 0.0)


class Bound(NamedTuple):
    kind: str
    reason: str  # what was measured
    advice: str
    process: str | None = None  # the process whose stacks show more: "front" or "engine"

    def text(self) -> str:
        return f"bound: {self.kind}. {self.reason} {self.advice}"


def find_bound(activity: ServerActivity) -> Bound:
    """Return what limits the server."""
    for rule in (front_bound, idle_bound, memory_bound, engine_host_bound):
        bound = rule(activity)
        if bound is not None:
            return bound
    return device_bound(activity)


def find_starvation(activity: ServerActivity) -> str | None:
    """Return a remark if other programs take the cores that a CPU engine computes on."""
    core_share = activity.engine_cpu_seconds / max(activity.busy_seconds, 1e-9)
    if activity.device != "cpu" or activity.busy_seconds < 0.2 * activity.seconds:
        return None
    if core_share >= STARVED:
        return None
    return (
        f"The engine got {core_share:.0%} of a core while it was in steps: other programs on this "
        "machine take the cores, and every figure above is slower than the engine."
    )


def front_bound(activity: ServerActivity) -> Bound | None:
    engine_share = activity.busy_seconds / activity.seconds
    core_share = activity.front_cpu_seconds / activity.seconds
    worker_share = activity.worker_cpu_seconds / activity.seconds
    if engine_share >= IDLE_ENGINE:
        return None
    idle = f"the engine was idle for {1 - engine_share:.0%} of the time."
    if core_share >= BUSY_CORE:
        return Bound(
            "host",
            f"The API server used {core_share:.0%} of a core, and {idle}",
            "Its time goes into tokenizing, templates, HTTP and text: the flame graph shows which. "
            "Start several servers behind `octavo route`.",
            "front",
        )
    if worker_share >= BUSY_CORE:
        return Bound(
            "host",
            f"The worker processes of the API server used {worker_share:.0%} of a core, and {idle}",
            "They tokenize long texts and compile schemas: send shorter prompts or token ids.",
        )
    if activity.loop_lag_seconds >= LAG_SECONDS:
        return Bound(
            "host",
            f"The event loop of the API server was blocked for {activity.loop_lag_seconds:.1f} s "
            f"at a time, and {idle}",
            "The flame graph shows what blocks it, for example a slow tokenizer.",
            "front",
        )
    return None


def idle_bound(activity: ServerActivity) -> Bound | None:
    engine_share = activity.busy_seconds / activity.seconds
    if engine_share >= NO_LOAD and (engine_share >= 0.5 or activity.waiting >= 1):
        return None
    return Bound(
        "idle",
        f"The engine was in a step for {engine_share:.0%} of the time, and no request waited.",
        "Nothing limits the server: send more requests at once.",
    )


def memory_bound(activity: ServerActivity) -> Bound | None:
    is_full = activity.kv_usage >= FULL_POOL and activity.waiting >= 1
    if not (is_full or activity.preemptions):
        return None
    return Bound(
        "memory",
        f"The KV pool was {activity.kv_usage:.0%} full, {activity.waiting:.0f} requests waited and "
        f"{activity.preemptions} sequences were preempted.",
        "Give the pool more memory (--gpu-memory-utilization, --num-blocks), halve KV "
        "(--kv-cache-dtype int8), or keep it in host memory (--kv-host-gib).",
    )


def engine_host_bound(activity: ServerActivity) -> Bound | None:
    share = activity.host_seconds / max(activity.busy_seconds, 1e-9)
    if share < HOST_SHARE:
        return None
    return Bound(
        "host",
        f"The scheduler and the launch of kernels took {share:.0%} of the engine's time: the "
        "device waits for the host.",
        "Use CUDA graphs (without --enforce-eager) and two steps in flight (--depth 2), or a "
        "faster core.",
        "engine",
    )


def device_bound(activity: ServerActivity) -> Bound:
    steps_seconds = max(activity.prefill_seconds + activity.decode_seconds, 1e-9)
    share = activity.prefill_seconds / steps_seconds
    if share < PREFILL_SHARE:
        pure_steps = max(activity.steps - activity.prefill_steps, 1)
        rows = activity.decode_tokens / max(activity.steps, 1)
        return Bound(
            "decode",
            f"Decode steps took {1 - share:.0%} of the time of steps, with {rows:.1f} sequences in "
            f"a step and {1e3 * activity.decode_seconds / pure_steps:.1f} ms each.",
            "More requests at once use the same reads of weights; quantised weights and "
            "speculative decoding read less for each token.",
        )
    full_share = activity.full_steps / max(activity.prefill_steps, 1)
    if full_share >= FULL_STEPS and activity.waiting >= 1:
        budget = f" of {activity.token_budget:,}" if activity.token_budget else ""
        return Bound(
            "prefill",
            f"Prompts took {share:.0%} of the time of steps, and {full_share:.0%} of these steps "
            f"used up the token budget{budget} while requests waited.",
            "Raise --max-num-batched-tokens: larger steps compute prompts with fewer passes over "
            "the weights.",
        )
    return Bound(
        "prefill",
        f"Prompts took {share:.0%} of the time of steps.",
        "Let prompts share a prefix (the prefix cache computes it once), shorten them, or lower "
        "--max-num-batched-tokens to protect streams that decode.",
    )
