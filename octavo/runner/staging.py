"""Copies of KV blocks between device and host memory: a stream of their own, page-locked memory,
and a timer of a step's copies. It uses streams and events, no threads and no disk.

A store is two copies: into a staging buffer on the step's own stream, at the speed of device
memory, and from there to the host on another stream, while the step computes. A load waits for the
store that filled its host block and then runs on the step's stream.
"""

from __future__ import annotations

import time
from contextlib import suppress

import torch
from torch import Tensor

from octavo.errors import NotEnoughMemory


class StoreStaging:
    """The staging buffer, in two halves: one is filled while the other drains."""

    def __init__(self, kv: Tensor, host_buffers: Tensor, buffer_of: list[int], staging_bytes: int):
        """kv [blocks, ...] and host_buffers [buffers, ...] hold the same kind of block. `buffer_of`
        is the current buffer of each host block, at any time. `staging_bytes` is for both
        halves."""
        self.kv = kv
        self.host_buffers = host_buffers
        self.buffer_of = buffer_of
        self.half_blocks = max(staging_bytes // 2 // kv[0].nbytes, 1)
        self.staging_buffers = [
            torch.empty((self.half_blocks, *kv.shape[1:]), dtype=kv.dtype, device=kv.device)
            for _ in range(2)
        ]
        self.drained = [torch.cuda.Event() for _ in range(2)]  # the half may be filled again
        self.stream = torch.cuda.Stream(kv.device)
        self.stored: dict[int, torch.cuda.Event] = {}  # host block -> its content is complete
        self.next_half = 0

    def store(self, stores: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to the host."""
        step_stream = torch.cuda.current_stream()
        for first in range(0, len(stores), self.half_blocks):
            pairs = stores[first : first + self.half_blocks]
            staging = self.staging_buffers[self.next_half]
            drained = self.drained[self.next_half]
            self.next_half = 1 - self.next_half
            step_stream.wait_event(drained)
            for index, (block, _) in enumerate(pairs):
                staging[index].copy_(self.kv[block], non_blocking=True)
            self.stream.wait_stream(step_stream)
            stored = torch.cuda.Event()
            with torch.cuda.stream(self.stream):
                for index, (_, host_block) in enumerate(pairs):
                    target = self.host_buffers[self.buffer_of[host_block]]
                    target.copy_(staging[index], non_blocking=True)
                    self.stored[host_block] = stored
                drained.record()
                stored.record()

    def wait_for_stores(self, host_blocks: list[int]) -> None:
        """Make the step's stream wait for these stores. The host does not wait."""
        step_stream = torch.cuda.current_stream()
        for event in {self.stored[block] for block in host_blocks if block in self.stored}:
            step_stream.wait_event(event)


class StepTimer:
    """Measures how long a step's loads and the rest of it take on the device."""

    def __init__(self, device: torch.device):
        self.events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self.times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """Called at the start, after the loads and at the end."""
        if self.events:
            self.events[len(self.times)].record()
        self.times.append(time.perf_counter())

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of the loads and of the rest. Waits for the end of the step."""
        if self.events:
            start, loaded, end = self.events
            end.synchronize()
            return start.elapsed_time(loaded) / 1e3, loaded.elapsed_time(end) / 1e3
        start_time, loaded_time, end_time = self.times
        return loaded_time - start_time, end_time - loaded_time


def page_lock(memory: Tensor) -> None:
    """Page-lock host memory, so that the GPU can access it. Exactly this size is locked; torch's
    allocator would round it up to a power of two."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        # CUDA reports the error at the next kernel launch too, so a kernel without effect is
        # launched.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        gib = memory.nbytes / 2**30
        raise NotEnoughMemory(
            f"{gib:.1f} GiB of host memory cannot be page-locked (CUDA error {code}): "
            "lower swap_space (--kv-host-gib)"
        )


def page_unlock(memory: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
