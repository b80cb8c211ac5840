"""Copies KV blocks between device and host memory, and measures the time of a step's copies.

A store is two copies. The first is into a staging buffer, on the step's stream and at the speed of
device memory. The second is from there to the host, on another stream and while the step computes.
A load waits for the store that filled its host block, and then runs on the step's stream. This
module uses CUDA streams and events, no threads and no disk.
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
        """Allocate the staging buffer.

        The blocks of kv [blocks, ...] and host_buffers [buffers, ...] have the same shape.
        `buffer_of` has the current buffer of each host block, and its owner updates it.
        `staging_bytes` is the size of both halves together.
        """
        self.kv = kv
        self.host_buffers = host_buffers
        self.buffer_of = buffer_of
        self.half_blocks = max(staging_bytes // 2 // kv[0].nbytes, 1)
        self.staging_buffers = [
            torch.empty((self.half_blocks, *kv.shape[1:]), dtype=kv.dtype, device=kv.device)
            for _ in range(2)
        ]
        # After its event, a half is empty and may be filled again.
        self.drained = [torch.cuda.Event() for _ in range(2)]
        self.stream = torch.cuda.Stream(kv.device)
        # host block -> the event after which its content is complete
        self.stored: dict[int, torch.cuda.Event] = {}
        self.next_half = 0

    def store(self, stores: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to the host."""
        step_stream = torch.cuda.current_stream()
        for start in range(0, len(stores), self.half_blocks):
            pairs = stores[start : start + self.half_blocks]
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
    """Measures the time of a step's loads, and the time of the rest of the step, on the device."""

    def __init__(self, device: torch.device):
        self.events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self.times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """Record the time. Call this at the start, after the loads and at the end of the step."""
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
    """Page-lock host memory, so that the GPU can access it.

    Exactly the bytes of `memory` are locked. torch's allocator would round the size up to a power
    of two.
    """
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
