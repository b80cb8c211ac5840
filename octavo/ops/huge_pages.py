"""Memory in huge pages (2 MiB), for what is read often or in one go: weights and KV. Knows bytes, not what they mean.

With pages of 4 KiB a pass over 100 MB misses the TLB 25,000 times, and no prefetch crosses from one page to the next. Linux gives
huge pages to whoever asks (`madvise`, its usual setting); where it does not, this is ordinary memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 8 * HUGE  # small pieces share a chunk
LINE = 64


def huge(tensor: Tensor) -> Tensor:
    """The same tensor on the CPU, whose pages shall be huge where nobody has touched them yet."""
    first = tensor.data_ptr()
    size = tensor.nbytes
    start = first + -first % mmap.PAGESIZE
    if sys.platform == "linux" and size >= HUGE and tensor.device.type == "cpu":
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # advice: a refusal costs speed alone
        advise(start, first + size - start, mmap.MADV_HUGEPAGE)
    return tensor


def area(size: int) -> Tensor:
    """uint8 [size], from a huge page's begin on: a system copies there twice as fast as to any other address."""
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    whole = size + -size % HUGE + HUGE
    found = torch.frombuffer(
        mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )
    first = -found.data_ptr() % HUGE
    return huge(found)[first : first + size]


class Arena:
    """Pieces one after the other, in the order in which they are asked for. Each lives as long as somebody holds it; memory
    goes back by the chunk."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rest = torch.empty(0, dtype=torch.uint8)  # of the last chunk

    def take(self, size: int) -> Tensor:
        """uint8 [size], aligned to a cache line, as it comes."""
        whole = size + -size % LINE
        if whole >= CHUNK:
            return area(whole)[:size]
        with self.lock:
            if whole > len(self.rest):
                # whoever asks for it: the next may not be in that mode
                with torch.inference_mode(False):
                    self.rest = area(CHUNK)
            piece = self.rest[:size]
            self.rest = self.rest[whole:]
            return piece
