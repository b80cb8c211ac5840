"""Asks a server's /livez again and again, in a process of its own, until standard input ends. Then
it prints what it measured.

    python -m tests.attacks.probe PORT PID

A busy machine makes every process wait for a core, which is no fault of the server. Two figures
take that into account. Linux counts for each thread how long it was ready to run without a core;
this time of the server's threads and of the probe is subtracted from the time of each answer. And
before each question the probe sleeps: how late it wakes up, less its own waiting for a core, is
the control, the delay that the machine causes without any server.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import time
from pathlib import Path

PAUSE = 0.01
PATIENCE = 60.0  # seconds for one answer
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def waited_for_a_core(pid: int | str) -> float:
    """Seconds that all threads of a process have waited so far."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            total += int((thread / "schedstat").read_text().split()[1])
    return total / 1e9


def ask(port: int) -> str | None:
    """What is wrong with the answer. None: nothing is wrong."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(REQUEST)
            answer = connection.recv(100)
    except OSError as error:
        return repr(error)
    return None if answer.startswith(b"HTTP/1.1 200") else repr(answer[:60])


def sleep_or_end() -> tuple[bool, float]:
    """Sleep for PAUSE. Returns whether standard input has ended, and how late the process woke
    up."""
    waited = waited_for_a_core("self")
    begun = time.monotonic()
    ended = bool(select.select([sys.stdin], [], [], PAUSE)[0])
    late = time.monotonic() - begun - PAUSE
    return ended, max(0.0, late - (waited_for_a_core("self") - waited))


def main(port: str, pid: str) -> None:
    print("ready", flush=True)
    seconds: list[float] = []
    controls: list[float] = []
    failures: list[str] = []
    while True:
        ended, late = sleep_or_end()
        if ended:
            break
        controls.append(late)
        waited = waited_for_a_core(pid) + waited_for_a_core("self")
        begun = time.monotonic()
        wrong = ask(int(port))
        took = time.monotonic() - begun
        waited = waited_for_a_core(pid) + waited_for_a_core("self") - waited
        seconds.append(max(0.0, took - waited))
        if wrong is not None:
            failures.append(wrong)
    print(json.dumps({"seconds": seconds, "controls": controls, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
