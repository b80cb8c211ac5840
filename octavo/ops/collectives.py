"""Communication between the ranks of tensor parallelism: one sum and one concatenation.

Every rank calls the same functions in the same order with tensors of the same shape, and every rank
receives the same bits. The ranks are processes, and one of these objects belongs to each rank.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

LOOPBACK = "127.0.0.1"  # all ranks run on one machine


class Collectives(Protocol):
    rank: int
    size: int  # the number of ranks

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors. The memory of `partial` is overwritten."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """part [R, W] of each rank -> [R, size * W], in the order of the ranks"""
        ...


class SingleRank:
    """The only rank of a model that is not divided."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return part


class RankGroup:
    """The ranks of one model, connected by gloo on CPUs and by NCCL on GPUs.

    The group is an object, not torch's default group, so one process may have several engines.
    """

    def __init__(self, store_path: str, rank: int, size: int, device: str, timeout: float):
        """Connect to the other ranks, which open the same store.

        `timeout` bounds in seconds how long a collective waits for the slowest rank.
        """
        self.rank = rank
        self.size = size
        store = torch.distributed.FileStore(store_path, size)
        self._group = open_group(store, rank, size, device, timedelta(seconds=timeout))
        # NCCL connects in the first collective, and needs the store for it.
        self.all_reduce(torch.zeros(1, device=device))

    def all_reduce(self, partial: Tensor) -> Tensor:
        total = partial.contiguous()
        self._group.allreduce([total]).wait()
        return total

    def all_gather(self, part: Tensor) -> Tensor:
        rows, width = part.shape
        gathered = part.new_empty(self.size * rows, width)
        self._group._allgather_base(gathered, part.contiguous()).wait()
        return gathered.view(self.size, rows, width).transpose(0, 1).flatten(1)

    def abort(self) -> None:
        """Let collectives that wait for another rank fail. Another thread may call it."""
        self._group.abort()


def open_group(
    store: torch.distributed.Store, rank: int, size: int, device: str, timeout: timedelta
) -> Any:
    """Return torch's process group for the device. Both kinds have the same methods."""
    if device == "cuda":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = torch.distributed.ProcessGroupGloo
    gloo_options = gloo._Options()
    gloo_options._timeout = timeout
    gloo_options._devices = [gloo.create_device(hostname=LOOPBACK)]
    return gloo(store, rank, size, gloo_options)
