"""Observes the processes, metrics and stacks of a running server from outside.

    find_processes   front, engine and workers of a server, from the PID of any of them
    ProfileSession   samples them until the time is over
    activity_of      turns the samples into the input of octavo/bench/bottleneck.py

Nothing is installed into the server, and it is not slowed down noticeably.
"""

from __future__ import annotations

import http.client
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.bottleneck import ServerActivity
from octavo.bench.flame_graph import StackSampler
from octavo.bench.perf_counters import PerfCounters
from octavo.errors import OctavoError
from octavo.process_usage import (
    ProcessUsage,
    child_pids,
    command_line,
    read_fields,
    read_usage,
)

ENGINE_MODULE = "octavo.serve.engine.engine_process"
WORKER_MODULE = "octavo.serve.workers.worker"
LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
METRIC = re.compile(
    r"^(?:octavo|vllm):(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE
)
GPU_QUERY = ("utilization.gpu", "memory.used", "memory.total")


@dataclass(frozen=True)
class ServerProcess:
    role: str  # "front", "engine", "worker" or "process"
    pid: int


def find_processes(pid: int) -> list[ServerProcess]:
    """Return the processes of a server, the front first. For a process that is not part of a
    server, return only that process."""
    if ENGINE_MODULE in command_line(pid) or WORKER_MODULE in command_line(pid):
        pid = parent_pid(pid)
    roles = {ENGINE_MODULE: "engine", WORKER_MODULE: "worker"}
    children = [
        ServerProcess(roles[module], child)
        for child in child_pids(pid)
        for module in command_line(child)
        if module in roles
    ]
    if not any(child.role == "engine" for child in children):
        return [ServerProcess("process", pid)]
    return [ServerProcess("front", pid), *sorted(children, key=lambda child: child.role)]


def parent_pid(pid: int) -> int:
    return int(read_fields(Path(f"/proc/{pid}/status"))["PPid"])


# ---- metrics -------------------------------------------------------------------------------------


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens."""
    sockets = set()
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if match := re.match(r"socket:\[(\d+)\]", str(path.readlink())):
                    sockets.add(match[1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and fields[9] in sockets:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def fetch_metrics(port: int, api_key: str | None, timeout: float = 60.0) -> dict[str, float] | None:
    """Return the metrics of a server, or None if this port does not have them.

    A metric with labels is the sum of its values. The value of each label is also present under
    the key `metric:label value`.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection.request("GET", "/metrics", headers=headers)
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if reply.status in (401, 403):
        raise OctavoError(
            "the server's metrics need an API key: give --api-key, or set OCTAVO_API_KEY"
        )
    return parse_metrics(text) if reply.status == 200 and "engine_steps_total" in text else None


def parse_metrics(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for match in METRIC.finditer(text):
        value = float(match["value"])
        values[match["name"]] = values.get(match["name"], 0.0) + value
        for label in re.findall(r'="([^"]*)"', match["labels"] or ""):
            values[f"{match['name']}:{label}"] = value
    return values


def find_metrics_port(pid: int, api_key: str | None) -> int | None:
    for port in listening_ports(pid):
        if fetch_metrics(port, api_key) is not None:
            return port
    return None


# ---- GPU -----------------------------------------------------------------------------------------


def read_gpu() -> dict[str, float]:
    """Return the utilisation (0 to 1) and the memory of the first GPU, or nothing without one."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
        utilisation, used, total = (float(part) for part in line.splitlines()[0].split(","))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return {}
    return {
        "gpu_utilisation": utilisation / 100,
        "gpu_used_bytes": used * 2**20,
        "gpu_total_bytes": total * 2**20,
    }


# ---- a session -----------------------------------------------------------------------------------


@dataclass
class ProfileSample:
    seconds: float  # time since the start
    usage: dict[int, ProcessUsage]  # by PID
    metrics: dict[str, float]
    gpu: dict[str, float]


@dataclass
class ServerProfile:
    """The observations of a server."""

    processes: list[ServerProcess]
    samples: list[ProfileSample] = field(default_factory=list)
    counters: dict[int, dict[str, int]] = field(default_factory=dict)  # perf counters by PID
    stacks: dict[int, Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # what could not be observed

    @property
    def seconds(self) -> float:
        return self.samples[-1].seconds - self.samples[0].seconds

    def growth(self, pid: int, name: str) -> float:
        """Return the increase of a total of a process, such as cpu_seconds, over all samples."""
        usages = [sample.usage[pid] for sample in self.samples if pid in sample.usage]
        return float(getattr(usages[-1], name) - getattr(usages[0], name)) if usages else 0.0

    def last(self, pid: int) -> ProcessUsage | None:
        usages = [sample.usage[pid] for sample in self.samples if pid in sample.usage]
        return usages[-1] if usages else None


class ProfileSession:
    def __init__(
        self,
        pid: int,
        seconds: float,
        api_key: str | None = None,
        interval: float = 1.0,
        with_stacks: bool = True,
    ):
        if read_usage(pid) is None:
            raise OctavoError(
                f"/proc has no process {pid}: check that it runs on this machine, under your user"
            )
        self.seconds = seconds
        self.interval = interval
        self.api_key = api_key
        self.with_stacks = with_stacks
        self.profile = ServerProfile(find_processes(pid))
        self.port: int | None = None
        front = self.profile.processes[0]
        if front.role == "front":
            self.port = find_metrics_port(front.pid, api_key)
            if self.port is None:
                self.profile.problems.append(
                    "the server's /metrics cannot be read, so there is no breakdown of steps"
                )

    def run(self, advance: Callable[[float], None] = lambda seconds: None) -> ServerProfile:
        """Observe until the time is over, or until the process ends."""
        profile = self.profile
        counters = {process.pid: PerfCounters(process.pid) for process in profile.processes}
        samplers = self._start_samplers()
        start = time.perf_counter()
        try:
            while True:
                sample = self._sample(time.perf_counter() - start)
                if sample is None:
                    profile.problems.append("the process ended before the time was over")
                    break
                profile.samples.append(sample)
                advance(sample.seconds)
                if sample.seconds >= self.seconds:
                    break
                time.sleep(min(self.interval, max(self.seconds - sample.seconds, 0.0)))
        except BaseException:
            for sampler in samplers.values():
                sampler.stop()
            raise
        for pid, counter in counters.items():
            profile.counters[pid] = counter.read()
            counter.close()
        problems = {counter.problem for counter in counters.values() if counter.problem is not None}
        profile.problems += sorted(problems)
        self._finish_samplers(samplers)
        return profile

    def _start_samplers(self) -> dict[int, StackSampler]:
        if not self.with_stacks:
            return {}
        samplers = {}
        try:
            for process in self.profile.processes:
                if process.role != "worker":
                    samplers[process.pid] = StackSampler(process.pid, self.seconds)
        except OctavoError as error:
            self.profile.problems.append(f"there is no flame graph: {error}")
        return samplers

    def _finish_samplers(self, samplers: dict[int, StackSampler]) -> None:
        for pid, sampler in samplers.items():
            try:
                self.profile.stacks[pid] = sampler.finish()
            except OctavoError as error:
                self.profile.problems.append(f"there is no flame graph of {pid}: {error}")

    def _sample(self, seconds: float) -> ProfileSample | None:
        usage = {process.pid: read_usage(process.pid) for process in self.profile.processes}
        live_usage = {
            pid: process_usage for pid, process_usage in usage.items() if process_usage is not None
        }
        if self.profile.processes[0].pid not in live_usage:
            return None
        metrics = None if self.port is None else fetch_metrics(self.port, self.api_key)
        return ProfileSample(seconds, live_usage, metrics or {}, read_gpu())


# ---- interpretation ------------------------------------------------------------------------------


def activity_of(profile: ServerProfile) -> ServerActivity | None:
    """Return what the server did, or None without its metrics."""
    with_metrics = [sample for sample in profile.samples if sample.metrics]
    if len(with_metrics) < 2:
        return None
    first = with_metrics[0]
    last = with_metrics[-1]

    def increase(name: str) -> float:
        return last.metrics.get(f"{name}_total", 0.0) - first.metrics.get(f"{name}_total", 0.0)

    def mean(name: str) -> float:
        values = [sample.metrics.get(name, 0.0) for sample in with_metrics]
        return sum(values) / len(values)

    cpu: dict[str, float] = {}
    for process in profile.processes:
        used = profile.growth(process.pid, "cpu_seconds")
        cpu[process.role] = cpu.get(process.role, 0.0) + used
    prefill_steps = int(increase("engine_prefill_steps"))
    full_steps = int(increase("engine_full_steps"))
    full_tokens = None
    if full_steps and full_steps >= 0.9 * increase("engine_steps"):
        tokens = increase("prefill_tokens") + increase("decode_tokens")
        full_tokens = round(tokens / max(increase("engine_steps"), 1))
    return ServerActivity(
        seconds=max(last.seconds - first.seconds, 1e-9),
        device="cuda" if "gpu_memory_bytes" in last.metrics else "cpu",
        front_cpu_seconds=cpu.get("front", 0.0),
        worker_cpu_seconds=cpu.get("worker", 0.0),
        engine_cpu_seconds=cpu.get("engine", 0.0),
        plan_seconds=increase("engine_plan_seconds"),
        launch_seconds=increase("engine_launch_seconds"),
        wait_seconds=increase("engine_wait_seconds"),
        commit_seconds=increase("engine_commit_seconds"),
        steps=int(increase("engine_steps")),
        prefill_steps=prefill_steps,
        full_steps=full_steps,
        prefill_seconds=increase("prefill_step_seconds"),
        decode_seconds=increase("decode_step_seconds"),
        prefill_tokens=int(increase("prefill_tokens")),
        decode_tokens=int(increase("decode_tokens")),
        preemptions=int(increase("num_preemptions")),
        waiting=mean("num_requests_waiting"),
        kv_usage=mean("kv_cache_usage_perc"),
        loop_lag_seconds=mean("event_loop_lag_seconds"),
        token_budget=full_tokens,
    )


def csv_rows(profile: ServerProfile) -> list[dict[str, Any]]:
    """Return the samples as rows: one for each process at each time."""
    rows = []
    roles = {process.pid: process.role for process in profile.processes}
    for sample in profile.samples:
        for pid, usage in sample.usage.items():
            row: dict[str, Any] = {"seconds": round(sample.seconds, 2), "role": roles[pid]}
            rows.append(row | vars(usage) | sample.gpu)
    return rows
