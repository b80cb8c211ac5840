"""A server to attack, the normal traffic beside the attack, and what must be true during and after
it.

    with withstands(target, peak_mib=200):
        ... attack ...

checks that the engine did not restart, that requests beside the attack got the same tokens as from
an idle server, that /livez answered quickly, that no KV block, request, descriptor or memory is
left over, and that the front's memory stayed bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.attacks import processes
from tests.serve.running import ROOT, Running, events, server

ALICE, BOB, ADMIN = "alice-0123456789abcdef", "bob-0123456789abcdef", "admin-0123456789abcdef"
MEMORY_LIMIT_MIB = (
    2048  # for each process of the server: an attack that succeeds must not take the machine
)
LIVEZ_SECONDS = 0.1
KEYS = f"""
[[keys]]
name = "alice"
key = "{ALICE}"
[[keys]]
name = "bob"
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
[[keys]]
name = "admin"
key = "{ADMIN}"
admin = true
"""

BLOCKS = ("used", "cached", "free", "total")
OPEN = ("num_requests_open", "num_requests_running", "num_requests_waiting", "open_streams")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["b", "c"]}, "d": {"type": "boolean"}},
    "required": ["a", "d"],
    "additionalProperties": False,
}
# Requests of good clients. Their replies depend on nothing but the request.
NORMAL: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "once upon a time", "max_tokens": 60, "ignore_eos": True, "temperature": 0}),
    (COMPLETIONS, {"prompt": "seeds", "max_tokens": 40, "ignore_eos": True, "seed": 7, "n": 2}),
    (CHAT, {"messages": HELLO, "max_tokens": 40, "ignore_eos": True, "seed": 3}),
    (CHAT, {"messages": HELLO, "max_tokens": 60, "seed": 5, "guided_json": SCHEMA}),
]  # fmt: skip


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}"


class Target:
    def __init__(self, running: Running):
        self.running = running
        self.port = running.port
        self.pid = running.process.pid
        running.http.headers["authorization"] = f"Bearer {ADMIN}"
        self.expected = [self.reply(running.http, *request) for request in NORMAL]

    @staticmethod
    def reply(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
        """The texts of a streamed reply, by choice. Raises unless the stream is whole."""
        reply = http.post(path, json={**body, "stream": True})
        assert reply.status_code == 200, (reply.status_code, reply.text)
        texts: dict[int, str] = {}
        for event in events(reply.text):
            assert "error" not in event, event
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + piece
        return texts

    def post(self, path: str, body: Any, key: str = ALICE, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with httpx.Client(base_url=self.running.url, timeout=120) as http:
            return http.post(path, content=content, headers=headers, **options)

    # ---- what it takes ---------------------------------------------------------------------------

    def front_mib(self) -> float:
        return processes.status_mib(self.pid, "VmRSS")

    def all_mib(self) -> float:
        return sum(processes.status_mib(pid, "VmRSS") for pid in processes.tree(self.pid))

    def descriptors(self) -> int:
        return sum(processes.descriptors(pid) for pid in processes.tree(self.pid))

    def settled(self, seconds: float = 30) -> dict[str, float]:
        """The metrics once the engine is ready, nothing is open, and every block is accounted
        for."""
        self.running.wait(seconds=seconds)
        end = time.monotonic() + seconds
        while True:
            found = self.running.metrics()
            blocks = {name: found[f"octavo:kv_blocks_{name}"] for name in BLOCKS}
            left = {name: found[f"octavo:{name}"] for name in OPEN}
            whole = blocks["cached"] + blocks["free"] == blocks["total"]
            if whole and blocks["used"] == 0 and not any(left.values()):
                break
            assert time.monotonic() < end, ("work or blocks are left over", blocks, left)
            time.sleep(0.05)
        assert found["octavo:invariant_failures_total"] == 0
        return found


@contextlib.contextmanager
def target_server(folder: Path, **config: Any) -> Iterator[Target]:
    """A server with keys, which takes templates from requests, under a memory limit."""
    (folder / "keys.toml").write_text(KEYS)
    options = {
        "request_templates": True,
        "check_interval": 1.0,
        "memory_limit_mib": MEMORY_LIMIT_MIB,
    }
    with server(folder, keys_file=str(folder / "keys.toml"), **{**options, **config}) as running:
        yield Target(running)


# ---- beside the attack ---------------------------------------------------------------------------


@dataclass
class Traffic:
    """Good clients, each in a thread, which repeat their requests and compare the replies."""

    target: Target
    done: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Traffic:
        for first in range(2):
            thread = threading.Thread(target=self._repeat, args=(first,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a good client's request never ended"

    def _repeat(self, which: int) -> None:
        headers = {"authorization": f"Bearer {(ALICE, BOB)[which % 2]}"}
        while not self._over.is_set():
            # a new connection each time: it must be possible to open one
            with httpx.Client(
                base_url=self.target.running.url, timeout=100, headers=headers
            ) as http:
                for _ in range(2):
                    self._one(http, which % len(NORMAL))
                    which += 1

    def _one(self, http: httpx.Client, which: int) -> None:
        begun = time.monotonic()
        try:
            found = Target.reply(http, *NORMAL[which])
            if found != self.target.expected[which]:
                self.wrong.append(f"{NORMAL[which]} got {found}")
        except Exception as error:
            self.wrong.append(f"{NORMAL[which]} failed: {error!r}")
        self.slowest = max(self.slowest, time.monotonic() - begun)
        self.done += 1


@dataclass
class Measured:
    """What a probe measured, in seconds, sorted."""

    answers: list[float]  # of /livez
    controls: list[float]  # delays that the machine causes without the server
    failures: list[str]


class Probe:
    """Asks /livez from a process of its own (tests/attacks/probe.py)."""

    def __init__(self, target: Target):
        argv = [sys.executable, "-m", "tests.attacks.probe", str(target.port), str(target.pid)]
        self.process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def stop(self) -> Measured:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        found = json.loads(self.process.stdout.readline())
        self.process.stdout.close()
        self.process.wait(10)
        return Measured(sorted(found["seconds"]), sorted(found["controls"]), found["failures"])


class LagReader:
    """Reads the server's own figure of how late its event loop runs, as long as it is entered."""

    INTERVAL = 1.0  # seconds; the figure is the worst of the last two seconds

    def __init__(self, target: Target):
        self.target = target
        self.worst = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> LagReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _read(self) -> None:
        headers = {"authorization": f"Bearer {ADMIN}"}
        with httpx.Client(base_url=self.target.running.url, timeout=60, headers=headers) as http:
            while not self._over.wait(self.INTERVAL):
                with contextlib.suppress(httpx.HTTPError):
                    for line in http.get("/metrics").text.splitlines():
                        if line.startswith("octavo:event_loop_lag_seconds"):
                            self.worst = max(self.worst, float(line.rsplit(" ", 1)[1]))


def idle_probe(target: Target, seconds: float = 0.5) -> float:
    """The longest answer of a server under normal traffic alone."""
    probe = Probe(target)
    with Traffic(target):
        time.sleep(seconds)
    return probe.stop().answers[-1]


# ---- what must be true ---------------------------------------------------------------------------


@contextlib.contextmanager
def withstands(target: Target, peak_mib: float = 100, left_mib: float = 40) -> Iterator[None]:
    """`peak_mib`: by how much the front may grow during the attack; `left_mib`: how much all
    processes may keep."""
    idle = idle_probe(target)
    before = target.settled()
    starts = before["octavo:engine_starts_total"]
    memory = target.all_mib()
    front = target.front_mib()
    descriptors = target.descriptors()
    processes.reset_peak(target.pid)
    probe = Probe(target)
    try:
        with LagReader(target) as lag, Traffic(target) as traffic:
            yield
    finally:
        measured = probe.stop()
    assert target.running.process.poll() is None, "the server ended"
    after = target.settled()
    assert after["octavo:engine_starts_total"] == starts, "the engine was started again"
    assert not traffic.wrong, (len(traffic.wrong), traffic.done, traffic.wrong[:3])
    assert traffic.done >= 2
    assert not measured.failures, (len(measured.failures), measured.failures[:3])
    check_answers(measured, idle, lag.worst)
    print(f"{traffic.done} good requests, the slowest {traffic.slowest:.1f} s")
    peak = processes.status_mib(target.pid, "VmHWM") - front
    assert peak <= peak_mib, f"the front grew by {peak:.0f} MiB"
    check_left_over(target, memory + left_mib, descriptors)


def check_answers(measured: Measured, idle: float, lag: float) -> None:
    """All answers of /livez but one came within 100 ms, within three times the longest answer
    without the attack, or as late as the machine wakes a process that sleeps."""
    control = measured.controls[-1]
    bound = max(LIVEZ_SECONDS, 3 * idle) + control
    report = (
        f"{len(measured.answers)} answers of /livez, the longest "
        f"{', '.join(f'{1000 * answer:.0f}' for answer in measured.answers[-3:])} ms; "
        f"{1000 * idle:.0f} ms without the attack; a sleeping process wakes up to "
        f"{1000 * control:.0f} ms late; the event loop was up to {1000 * lag:.0f} ms late, "
        "waiting for a core included"
    )
    print(report)
    assert measured.answers[-2] <= bound, report


def check_left_over(
    target: Target, memory_mib: float, descriptors: int, seconds: float = 10
) -> None:
    """Within some seconds memory and descriptors are back where they were."""
    end = time.monotonic() + seconds
    slack = 4  # kept-alive connections of the good clients
    while target.descriptors() > descriptors + slack or target.all_mib() > memory_mib:
        found = (target.descriptors(), descriptors, target.all_mib(), memory_mib)
        assert time.monotonic() < end, ("descriptors or memory are left over", found)
        time.sleep(0.1)
