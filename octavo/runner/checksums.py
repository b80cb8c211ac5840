"""Contents that came from disk and that nobody has added up yet: whoever loads one to the device has it added up there.

Adding up takes a reader on the host a third of its time; the device does it in microseconds, where the block lies after it was
loaded. Slots and hashes are names here. Called by the engine's thread, but for `put` and `drop`: those hold the slot's lock.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.runner.disk import PAGE, seal
from octavo.runner.transfer import Download


class Check(NamedTuple):
    """What was loaded, to be compared with what its records say."""

    seals: dict[int, tuple[bytes, int]]  # slot -> (hash, seal)
    sums: Download  # [slots, pages] of 64 bits

    def spoilt(self) -> dict[int, bytes]:
        """slot -> hash of those that differ. Waits for the device."""
        (sums,) = self.sums.wait()
        pairs = zip(self.seals.items(), sums.numpy(), strict=True)
        return {slot: h for (slot, (h, sealed)), mine in pairs if seal(mine) != sealed}


class Checksums:
    def __init__(self, kv: Tensor):
        """kv [blocks, ...], blocks of whole pages"""
        # [blocks, pages, words]
        self.pages = kv.flatten(1).view(torch.int64).unflatten(1, (-1, PAGE // 8))
        self.waiting: dict[int, tuple[bytes, int]] = {}  # slot -> (hash, seal)

    def put(self, slot: int, h: bytes, sealed: int) -> None:
        self.waiting[slot] = h, sealed

    def drop(self, slot: int) -> None:
        """Something else comes into the slot."""
        self.waiting.pop(slot, None)

    def check(self, loads: list[tuple[int, int]]) -> Check | None:
        """Add up those of the blocks just loaded, [(slot, block)], that nobody has yet."""
        found = sorted(
            ((slot, block) for slot, block in loads if slot in self.waiting), key=itemgetter(1)
        )
        if not found:
            return None
        sums = torch.empty(
            len(found), self.pages.shape[1], dtype=torch.int64, device=self.pages.device
        )
        # blocks that lie side by side: mostly all
        for _, run in groupby(enumerate(found), key=lambda at: at[1][1] - at[0]):
            (k, (_, first)), *rest = run
            torch.sum(self.pages[first : first + 1 + len(rest)], 2, out=sums[k : k + 1 + len(rest)])
        return Check({slot: self.waiting.pop(slot) for slot, _ in found}, Download(sums))
