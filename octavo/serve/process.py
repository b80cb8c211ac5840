"""What the system is asked for on behalf of the front and its child processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
M_MMAP_THRESHOLD = -3


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the front dies, however it dies. Only Linux offers
    this; elsewhere the closed socket ends the process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # the front died before the call
            os._exit(1)


def return_large_blocks(threshold: int = 256 * 2**10) -> None:
    """Let blocks above this size go back to the system as soon as they are freed. By default glibc
    raises the threshold to the largest block that was ever freed, up to 32 MiB, and keeps what is
    below in its heap. Other C libraries are left alone."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, threshold)
