"""Reads hardware counters of other processes with Linux perf events: cycles, instructions, cache
misses.

Virtual machines and containers often have no counters. `PerfCounters.problem` has the reason then.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from pathlib import Path

SYSCALLS = {"x86_64": 298, "aarch64": 241}  # perf_event_open
HARDWARE = 0
COUNTERS = {"cycles": 0, "instructions": 1, "cache_references": 2, "cache_misses": 3}
ATTRIBUTE_SIZE = 128
FLAGS_AT = 40  # the position of the flags in perf_event_attr
INHERIT = 1 << 1  # threads that start later count too
EXCLUDE_KERNEL = 1 << 5
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


class PerfCounters:
    """Counts events of a process from the creation of this object. `close` frees the counters."""

    def __init__(self, pid: int):
        self.files: dict[str, list[int]] = {name: [] for name in COUNTERS}
        self.problem: str | None = None
        number = SYSCALLS.get(platform.machine())
        if number is None:
            self.problem = f"perf counters are not known on {platform.machine()}"
            return
        self.libc = ctypes.CDLL(None, use_errno=True)
        try:
            threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:
            self.problem = f"process {pid} has ended"
            return
        for name, config in COUNTERS.items():
            for thread in threads:
                self._open(name, config, thread, number)
                if self.problem is not None:
                    return

    def _open(self, name: str, config: int, thread: int, number: int) -> None:
        attribute = bytearray(ATTRIBUTE_SIZE)
        struct.pack_into("IIQ", attribute, 0, HARDWARE, ATTRIBUTE_SIZE, config)
        struct.pack_into("Q", attribute, FLAGS_AT, INHERIT | EXCLUDE_KERNEL)
        buffer = (ctypes.c_char * ATTRIBUTE_SIZE).from_buffer(attribute)
        descriptor = self.libc.syscall(number, buffer, thread, -1, -1, 0)
        if descriptor >= 0:
            self.files[name].append(descriptor)
            return
        error = ctypes.get_errno()
        if error == 3:  # ESRCH: the thread has ended
            return
        self.problem = describe_error(error)

    def read(self) -> dict[str, int]:
        """Return the totals so far, or nothing if there are no counters."""
        if self.problem is not None:
            return {}
        return {
            name: sum(struct.unpack("Q", os.read(file, 8))[0] for file in files)
            for name, files in self.files.items()
        }

    def close(self) -> None:
        for files in self.files.values():
            for file in files:
                os.close(file)
            files.clear()


def describe_error(error: int) -> str:
    """Return why perf_event_open failed, and what to do."""
    if error == 2:  # ENOENT
        return (
            "this machine has no hardware counters: virtual machines often hide them. Profile on "
            "the host, or ask for a machine with a virtual PMU"
        )
    if error in (1, 13):  # EPERM, EACCES
        level = PARANOID.read_text().strip() if PARANOID.exists() else "unknown"
        return (
            f"the kernel does not allow hardware counters (perf_event_paranoid is {level}): run as "
            "root, or `sysctl kernel.perf_event_paranoid=1`; containers need the capability PERFMON"
        )
    return f"hardware counters cannot be opened: {os.strerror(error)}"
