"""A server under normal load with every attack mixed in, for a long time: nothing may change but
the clock.

    python -m tests.soak --minutes 60 --out soak

Checks that replies that are determined stay those of an idle server, that the memory of the front,
the engine and the workers does not grow after a warm-up, that no request hangs, that every KV block
is accounted for, that descriptors come back, and that the engine never starts again. Writes
OUT.json with all samples and OUT.svg with a picture of the memory. The exit status is 1 if anything
was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.bench.picture import Axis, Series, draw, points
from tests.attacks import (
    bodies,
    connections,
    keys,
    processes,
    streams,
    structures,
    templates,
    websockets,
)
from tests.attacks.target import Target, target_server
from tests.serve.running import free_port
from tests.soak.load import Load
from tests.soak.trend import Trend, fit

ENGINE = {
    "max_model_len": 512,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 16,
    "swap_space": 1 / 1024,
    "scheduling_policy": "priority",
}
CLIENTS = 8
SAMPLE_SECONDS = 2.0
PROGRESS_SECONDS = 5.0
WARM_UP = 0.25  # of the whole time
JUDGED_SECONDS = 1200.0  # a shorter run is all warm-up, and its memory is shown and not judged
MAX_GROWTH_MIB = 16.0  # over the whole time, beyond what may be noise
MAX_DESCRIPTORS = 8  # above the beginning
ROLES = ("front", "engine", "worker")


def attacks(rpc_port: int) -> dict[str, Callable[[Target], None]]:
    """Small forms of every attack."""
    late = list(streams.LATE.values())
    return {
        "structures": lambda t: structures.send(t, structures.worst().items()),
        "structures again": lambda t: structures.send_repeatedly(t, rounds=1),
        "pongs": lambda t: websockets.flood(t, "pongs", 2),
        "pings": lambda t: websockets.flood(t, "pings", 2),
        "fragments": lambda t: websockets.flood(t, "empty fragments", 2),
        "messages": lambda t: websockets.flood(t, "empty messages", 2),
        "idle connections": lambda t: connections.hold_idle(t, 5200, 5, 2),
        "kept connections": lambda t: connections.keep_alive(t, 500),
        "wrong keys": lambda t: keys.guess(t, 30, 1),
        "wrong keys by RPC": lambda t: keys.guess_by_rpc(t, rpc_port, 10),
        "misused keys": keys.misuse,
        "large bodies": lambda t: bodies.send(t, random.sample(list(bodies.LARGE), 2)),
        "bodies at once": lambda t: bodies.send(t, ["objects"], at_once=4),
        "unfinished bodies": lambda t: bodies.unfinished(t, 20, 3),
        "late bytes": lambda t: streams.interrupt(t, random.choice(late), 0, tokens=200),
        "pipelined": lambda t: streams.pipelined(t, 200),
        "half closed": streams.half_close,
        "templates": lambda t: templates.send(t, random.sample(templates.ALL, 5)),
    }


class Attacker:
    """Runs attacks one after another, in a random order, until stopped."""

    def __init__(self, target: Target, rpc_port: int, seed: int):
        self.target = target
        self.known = attacks(rpc_port)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._generator = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Attacker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(300)
        if self._thread.is_alive():
            self.wrong.append("an attack never ended")

    def _run(self) -> None:
        while not self._over.is_set():
            order = list(self.known)
            self._generator.shuffle(order)
            for name in order:
                if self._over.is_set():
                    return
                try:
                    self.known[name](self.target)
                except Exception as error:
                    self.wrong.append(f"{name}: {error!r}"[:500])
                self.counts[name] += 1


def sample(target: Target, begun: float) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(ROLES, 0.0)
    count = 0
    for pid in processes.tree(target.pid):
        role = processes.role(pid)
        if role in found:
            found[role] += processes.status_mib(pid, "VmRSS")
            count += processes.descriptors(pid)
    return {"seconds": time.monotonic() - begun, "descriptors": count, **found}


def run(target: Target, rpc_port: int, seconds: float, seed: int) -> dict[str, Any]:
    """Load and attacks for so long. Returns what was seen, with everything that was wrong."""
    before = target.settled()
    descriptors = target.descriptors()
    samples: list[dict[str, Any]] = []
    begun = time.monotonic()
    shown = 0.0
    load = Load(target, CLIENTS, seed)
    attacker = Attacker(target, rpc_port, seed)
    with load, attacker:
        while (passed := time.monotonic() - begun) < seconds:
            samples.append(sample(target, begun))
            if passed - shown > PROGRESS_SECONDS:
                shown = passed
                show(passed, seconds, samples[-1], load, attacker)
            time.sleep(SAMPLE_SECONDS)
    wrong = [*load.wrong, *attacker.wrong]
    after = target.settled(60)
    if after["octavo:engine_starts_total"] != before["octavo:engine_starts_total"]:
        wrong.append("the engine was started again")
    wrong += descriptors_left(target, descriptors)
    trends = trends_of(samples, seconds)
    for role, trend in trends.items():
        if trend.growth > MAX_GROWTH_MIB and seconds >= JUDGED_SECONDS:
            wrong.append(f"the memory of the {role} grows: {trend} MiB")
    return {
        "seconds": seconds,
        "requests": dict(load.counts),
        "attacks": dict(attacker.counts),
        "preemptions": after["octavo:num_preemptions_total"],
        "trends": {role: trend._asdict() for role, trend in trends.items()},
        "wrong": wrong,
        "samples": samples,
    }


def descriptors_left(target: Target, before: int) -> list[str]:
    """What is wrong with the descriptors, some seconds after everybody has left."""
    end = time.monotonic() + 40
    while (now := target.descriptors()) > before + MAX_DESCRIPTORS:
        if time.monotonic() > end:
            return [f"descriptors are left over: {now}, and {before} at the beginning"]
        time.sleep(0.5)
    return []


def trends_of(samples: list[dict[str, Any]], seconds: float) -> dict[str, Trend]:
    warm = [one for one in samples if one["seconds"] >= WARM_UP * seconds]
    return {role: fit([s["seconds"] for s in warm], [s[role] for s in warm]) for role in ROLES}


def show(
    passed: float, seconds: float, now: dict[str, Any], load: Load, attacker: Attacker
) -> None:
    memory = "  ".join(f"{role} {now[role]:.0f}" for role in ROLES)
    print(
        f"{passed / 60:6.1f} of {seconds / 60:.0f} min  requests {load.counts.total():,d}  probes {load.counts['probe']:,d}  "
        f"attacks {attacker.counts.total():,d}  MiB: {memory}  descriptors {now['descriptors']}  "
        f"wrong {len(load.wrong) + len(attacker.wrong)}",
        flush=True,
    )


def report(found: dict[str, Any], out: Path) -> None:
    """Print the result and write the two files."""
    out.with_suffix(".json").write_text(json.dumps(found, indent=1))
    series = [
        Series(role, [(one["seconds"] / 60, one[role]) for one in found["samples"]])
        for role in ROLES
    ]
    x = Axis("minutes")
    y = Axis("resident memory, MiB", starts_at_zero=True)
    picture = points(
        "Memory under load and attacks", series, x, y, connected=True, width=900, mark_size=1
    )
    draw(out.with_suffix(".svg"), picture)
    print(
        f"\n{found['seconds'] / 60:.0f} minutes: {sum(found['requests'].values()):,d} requests,",
        end=" ",
    )
    print(f"{sum(found['attacks'].values()):,d} attacks, {found['preemptions']:.0f} preemptions")
    for role, trend in found["trends"].items():
        print(f"{role:8s} {trend['mean']:7.1f} MiB, {Trend(**trend)} MiB")
    counts = Counter(found["wrong"])
    for text, count in counts.most_common(20):
        print(f"WRONG {count} times: {text}")
    print("nothing was wrong" if not counts else f"{counts.total()} things were wrong")
    print(f"written: {out.with_suffix('.json')}, {out.with_suffix('.svg')}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--out", type=Path, default=Path("soak"), help="name of the files, without an ending"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    port = free_port()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        target_server(Path(folder), engine=ENGINE, grpc_port=port) as target,
    ):
        found = run(target, port, options.minutes * 60, options.seed)
    report(found, options.out)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
