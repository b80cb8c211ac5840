"""How host values reach the device and results come back, without ever waiting in between.

One copy each way a step. Pinned buffers come fresh from torch's caching host allocator, which reuses one only after the
copy that reads it has run: the host can never overwrite what the device has yet to read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


class Upload:
    """Collects small arrays, ships them in one copy, hands out device views of its parts."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int32]] = []
        self._size = 0

    def ints(self, values: ArrayLike) -> slice:
        return self._add(np.asarray(values, dtype=np.int32).reshape(-1))

    def floats(self, values: ArrayLike) -> slice:
        return self._add(np.asarray(values, dtype=np.float32).reshape(-1).view(np.int32))

    def longs(self, values: ArrayLike) -> slice:
        """On 8 bytes, as `.view(torch.int64)` wants it."""
        if self._size % 2:
            self.ints([0])
        return self._add(np.asarray(values, dtype=np.int64).reshape(-1).view(np.int32))

    def _add(self, part: NDArray[np.int32]) -> slice:
        self._parts.append(part)
        self._size += len(part)
        return slice(self._size - len(part), self._size)

    def ship(self, device: torch.device) -> Tensor:
        """All parts as one int32 tensor on the device; index it with the slices. Floats: `.view(torch.float32)`."""
        host = torch.empty(self._size, dtype=torch.int32, pin_memory=device.type == "cuda")
        if self._parts:
            np.concatenate(self._parts, out=host.numpy())
        return host.to(device, non_blocking=True)


def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


class Download:
    """Results on their way to the host; `wait` returns them once they are there. `by` copies (to, from), without waiting."""

    def __init__(self, *tensors: Tensor, by: Callable[[Tensor, Tensor], None] = copy):
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                by(host, tensor)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = list(tensors)

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._host
