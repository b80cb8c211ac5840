"""Reads the resource usage of a process from /proc: CPU time, memory, faults and switches.

It works for any process of the same user, on any thread, without a library.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessUsage:
    """Totals since the start of a process, and its memory now."""

    pid: int
    cpu_seconds: float  # sum over all threads, in user mode and in the kernel
    system_seconds: float  # the part of it in the kernel
    rss_bytes: int  # resident memory
    peak_rss_bytes: int
    minor_faults: int  # pages that were mapped without reading a disk
    major_faults: int  # pages that were read from a disk
    threads: int
    voluntary_switches: int  # a thread waited for something
    involuntary_switches: int  # another thread took the core


def read_usage(pid: int) -> ProcessUsage | None:
    """Return the resource use of a process, or None if it does not exist or is not accessible."""
    folder = Path(f"/proc/{pid}")
    try:
        status = read_fields(folder / "status")
        # The status file of a process counts only the switches of its first thread.
        threads = [read_fields(path / "status") for path in (folder / "task").iterdir()]
        # The name of a process, in parentheses, may contain spaces.
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if status.get("State", "Z").split()[0] == "Z":
        return None
    return ProcessUsage(
        pid=pid,
        cpu_seconds=(int(stat[11]) + int(stat[12])) / TICKS,
        system_seconds=int(stat[12]) / TICKS,
        rss_bytes=field_value(status, "VmRSS") * 1024,
        peak_rss_bytes=field_value(status, "VmHWM") * 1024,
        minor_faults=int(stat[7]),
        major_faults=int(stat[9]),
        threads=field_value(status, "Threads"),
        voluntary_switches=sum(
            field_value(thread, "voluntary_ctxt_switches") for thread in threads
        ),
        involuntary_switches=sum(
            field_value(thread, "nonvoluntary_ctxt_switches") for thread in threads
        ),
    )


def read_fields(path: Path) -> dict[str, str]:
    return dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)


def field_value(fields: dict[str, str], name: str) -> int:
    return int(fields.get(name, "0").split()[0])


def cpu_time_of_cores() -> tuple[float, float]:
    """Return the seconds in which the cores were busy, and those of all cores together, both since
    the machine started. Time that a hypervisor took away counts as busy."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, idle, waiting, interrupts, soft_interrupts, stolen = map(int, fields)
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    return busy / TICKS, (busy + idle + waiting) / TICKS


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes() -> int:
    """Return the resident memory of this process without mapped files."""
    return field_value(read_fields(Path("/proc/self/status")), "RssAnon") * 1024


def child_pids(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    pids = []
    try:
        for path in Path(f"/proc/{pid}/task").iterdir():
            pids += [int(child) for child in (path / "children").read_text().split()]
    except OSError:
        return []
    return sorted(pids)


def command_line(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in raw.split(b"\0") if part]
