"""What the processes of a server take: memory and file descriptors, read from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MIB = 2**20


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def role(pid: int) -> str:
    """engine, worker or front, by the command line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "gone"
    for name in ("engine_process", "worker"):
        if f".{name}\0" in command:
            return name.removesuffix("_process")
    return "front"


def status_mib(pid: int, field: str) -> float:
    """VmRSS, VmHWM and the like."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    return 0.0


def reset_peak(pid: int) -> None:
    """Let VmHWM begin again at what is resident now."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
