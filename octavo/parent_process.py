"""Ends a child process together with its parent. No torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends.

    A thread ends with its process at the latest. This is possible only on Linux. On other systems
    the closed socket or pipe ends the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # The parent died before the call.
            os._exit(1)
