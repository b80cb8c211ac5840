"""Runs one engine in a process of its own, for `octavo bench compare`.

    python peer_worker.py ENGINE MODELS_DIRECTORY THREADS

It writes a line of JSON when the engine is ready, and one for each line that it reads:

    {"prompts": [[504, 3575], ...], "count": 128}   ->   {"seconds": 0.7, "replies": [[...], ...]}

An error becomes {"error": "..."}. What a library prints goes to stderr. The program ends with its
input.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from engines import ENGINES, PACKAGES


def seconds_since_start() -> float:
    """Return how long this process has run."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - started


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    replies = engine.generate(request["prompts"], request["count"])
    seconds = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "replies": replies, "peak_rss_bytes": peak_bytes}


def serve(name: str, models: Path, threads: int, output: TextIO) -> None:
    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=output, flush=True)

    if importlib.util.find_spec(PACKAGES[name]) is None:
        send({"missing": f"{PACKAGES[name]} is not installed in {sys.prefix}: make peers"})
        return
    try:
        engine = ENGINES[name](models, threads)
        engine.generate([[1, 2, 3, 4]], 4)
    except Exception as error:  # libraries raise anything
        send({"error": f"{type(error).__name__}: {error}"[:500]})
        return
    ready = seconds_since_start()
    send({"version": engine.version, "weights": engine.weights, "ready_s": ready})
    for line in sys.stdin:
        try:
            send(answer(engine, json.loads(line)))
        except Exception as error:  # libraries raise anything
            send({"error": f"{type(error).__name__}: {error}"[:500]})


def main() -> None:
    # Libraries print to stdout too: the protocol has a descriptor of its own.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, models, threads = sys.argv[1:]
    serve(name, Path(models), int(threads), output)


if __name__ == "__main__":
    main()
