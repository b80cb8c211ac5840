"""Asks a server's /livez again and again, from a process of its own, until its standard input ends; then prints what it saw.

    python -m tests.attacks.probe PORT PID

A busy machine makes everybody wait for a core. That is no fault of the server, so the time in which the server's threads or
the probe itself were ready to run and had no core is taken off each answer's time. Linux counts it for each thread.
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
        with contextlib.suppress(OSError):  # it has ended
            total += int((thread / "schedstat").read_text().split()[1])
    return total / 1e9


def ask(port: int) -> str | None:
    """What is wrong with the answer; None: nothing."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(REQUEST)
            answer = connection.recv(100)
    except OSError as error:
        return repr(error)
    return None if answer.startswith(b"HTTP/1.1 200") else repr(answer[:60])


def main(port: str, pid: str) -> None:
    print("ready", flush=True)
    seconds: list[float] = []
    failures: list[str] = []
    while not select.select([sys.stdin], [], [], PAUSE)[0]:
        waited = waited_for_a_core(pid) + waited_for_a_core("self")
        begun = time.monotonic()
        wrong = ask(int(port))
        took = time.monotonic() - begun
        waited = waited_for_a_core(pid) + waited_for_a_core("self") - waited
        seconds.append(max(0.0, took - waited))
        if wrong is not None:
            failures.append(wrong)
    print(json.dumps({"seconds": seconds, "failures": failures}))


if __name__ == "__main__":
    main(*sys.argv[1:])
