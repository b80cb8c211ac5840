"""The link between the device's memory and the host's, for blocks of KV: copies on a stream of their own, page-locked memory, and
how long a step's copies take. Knows streams and events, no threads and no disk.

A store is two copies: into a staging buffer on the step's own stream, at the speed of device memory, and from there to the host
on another stream, while the step computes. A load waits for the store that filled its slot and then runs on the step's stream.
"""

from __future__ import annotations

import time
from contextlib import suppress

import torch
from torch import Tensor

from octavo.errors import NotEnoughMemory


class Stage:
    """The way from the device to page-locked memory, in two halves: one is filled while the other drains."""

    def __init__(self, kv: Tensor, host: Tensor, row: list[int], staging: int):
        """`kv` [blocks, ...] and `host` [rows, ...] hold the same kind of block; `row` says where each slot's is, at any time.
        `staging`: bytes of both halves."""
        self.kv = kv
        self.host = host
        self.row = row
        self.half = max(staging // 2 // kv[0].nbytes, 1)  # blocks
        self.buffers = [
            torch.empty((self.half, *kv.shape[1:]), dtype=kv.dtype, device=kv.device)
            for _ in range(2)
        ]
        self.drained = [torch.cuda.Event() for _ in range(2)]  # the half may be filled again
        self.stream = torch.cuda.Stream(kv.device)
        self.stored: dict[int, torch.cuda.Event] = {}  # slot -> its content is there
        self.turn = 0

    def store(self, stores: list[tuple[int, int]]) -> None:
        main = torch.cuda.current_stream()
        for first in range(0, len(stores), self.half):
            part = stores[first : first + self.half]
            buffer = self.buffers[self.turn]
            drained = self.drained[self.turn]
            self.turn = 1 - self.turn
            main.wait_event(drained)
            for k, (block, _) in enumerate(part):
                buffer[k].copy_(self.kv[block], non_blocking=True)
            self.stream.wait_stream(main)
            stored = torch.cuda.Event()
            with torch.cuda.stream(self.stream):
                for k, (_, slot) in enumerate(part):
                    self.host[self.row[slot]].copy_(buffer[k], non_blocking=True)
                    self.stored[slot] = stored
                drained.record()
                stored.record()

    def await_stores(self, slots: list[int]) -> None:
        """The step's stream waits; the host does not."""
        main = torch.cuda.current_stream()
        for event in {self.stored[slot] for slot in slots if slot in self.stored}:
            main.wait_event(event)


class Lap:
    """How long a step's loads and the rest of it take on the device, known when the step is over."""

    def __init__(self, device: torch.device):
        self.events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            if device.type == "cuda"
            else []
        )
        self.times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """Called at the start, after the loads and at the end."""
        if self.events:
            self.events[len(self.times)].record()
        self.times.append(time.perf_counter())

    def seconds(self) -> tuple[float, float]:
        """(loads, the rest)"""
        if self.events:
            start, loaded, end = self.events
            end.synchronize()
            return start.elapsed_time(loaded) / 1e3, loaded.elapsed_time(end) / 1e3
        start_s, loaded_s, end_s = self.times
        return loaded_s - start_s, end_s - loaded_s


def page_lock(memory: Tensor) -> None:
    """The GPU can read and write it by itself. Exactly this much: torch's own allocator takes the next power of two."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        # CUDA tells the next kernel of this too: let it be one that nobody needs
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise NotEnoughMemory(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory cannot be page-locked (CUDA error {code})"
        )


def page_unlock(memory: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
