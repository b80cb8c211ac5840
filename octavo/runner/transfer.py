"""Copies host values to the device and results back, without waiting in between.

There is one copy in each direction per step. Every copy takes a pinned buffer from torch's caching
host allocator, which reuses a buffer only after the copy that reads it has run. So the host never
overwrites values that the device has not read yet.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


class Upload:
    """Collects small arrays and sends them in one copy. A slice locates each array in the copy."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.int32]] = []
        self._size = 0

    def ints(self, values: ArrayLike) -> slice:
        return self._add(np.asarray(values, dtype=np.int32).reshape(-1))

    def floats(self, values: ArrayLike) -> slice:
        return self._add(np.asarray(values, dtype=np.float32).reshape(-1).view(np.int32))

    def longs(self, values: ArrayLike) -> slice:
        """Add int64 values, aligned to 8 bytes as `.view(torch.int64)` requires."""
        if self._size % 2:
            self.ints([0])
        return self._add(np.asarray(values, dtype=np.int64).reshape(-1).view(np.int32))

    def _add(self, array: NDArray[np.int32]) -> slice:
        self._arrays.append(array)
        self._size += len(array)
        return slice(self._size - len(array), self._size)

    def send(self, device: torch.device) -> Tensor:
        """Return all arrays as one int32 tensor on the device.

        Index the tensor with the slices, and view floats as `.view(torch.float32)`.
        """
        host = torch.empty(self._size, dtype=torch.int32, pin_memory=device.type == "cuda")
        if self._arrays:
            np.concatenate(self._arrays, out=host.numpy())
        return host.to(device, non_blocking=True)


def copy_async(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


class Download:
    """Results on their way to the host. `wait` returns them after they have arrived.

    `copy(target, source)` copies without waiting.
    """

    def __init__(self, *tensors: Tensor, copy: Callable[[Tensor, Tensor], None] = copy_async):
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._host = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors
            ]
            for host, tensor in zip(self._host, tensors, strict=True):
                copy(host, tensor)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = list(tensors)

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._host
