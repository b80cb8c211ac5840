"""Settings of the operating system for the front process and its child processes."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress

M_MMAP_THRESHOLD = -3
TRIM_SECONDS = 30.0


def return_large_blocks(threshold: int = 256 * 2**10) -> None:
    """Return blocks above this size to the system as soon as they are freed.

    By default glibc raises the threshold to the largest block that was ever freed, up to 32 MiB,
    and keeps smaller blocks in its heap. This function has no effect on other C libraries.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, threshold)


def return_free_memory(interval: float = TRIM_SECONDS) -> None:
    """Start a thread that returns the free memory of the heap to the system at intervals.

    By default glibc returns only the free memory at the end of the heap. A small block there keeps
    all free memory before it, and the process grows with every peak of the load. A call takes one
    or two milliseconds. This function has no effect on other C libraries.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return

    def trim_forever() -> None:
        while True:
            time.sleep(interval)
            malloc_trim(0)

    threading.Thread(target=trim_forever, daemon=True, name="malloc_trim").start()
