"""Verifies on the device the KV that was read from disk, when it is loaded.

On the host, checksums would take a third of the time of a reader thread. The device computes them
in microseconds, on the block that it has just loaded. The engine's thread calls all functions of
this module except `expect` and `forget`. A thread that calls these two holds the host block's lock.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.runner.disk import PAGE_BYTES, checksum_of_sums
from octavo.runner.transfer import Download


class Expected(NamedTuple):
    hash: bytes
    checksum: int


class Verification(NamedTuple):
    """Checksums of loaded blocks that are copied to the host and compared with the records."""

    expected: dict[int, Expected]  # by host block
    sums: Download  # [host blocks, pages] int64

    def corrupt(self) -> dict[int, bytes]:
        """Return host block -> hash of the blocks that differ. Waits for the device."""
        (sums,) = self.sums.wait()
        pairs = zip(self.expected.items(), sums.numpy(), strict=True)
        return {
            host_block: expected.hash
            for (host_block, expected), page_sums in pairs
            if checksum_of_sums(page_sums) != expected.checksum
        }


class Checksums:
    def __init__(self, kv: Tensor):
        """Create the object. A block of kv [blocks, ...] must be a whole number of pages."""
        words = kv.flatten(1).view(torch.int64)
        self.pages = words.unflatten(1, (-1, PAGE_BYTES // 8))  # [blocks, pages, words]
        self.unverified: dict[int, Expected] = {}  # by host block

    def expect(self, host_block: int, content_hash: bytes, checksum: int) -> None:
        """Store the checksum of a record that was read into the host block."""
        self.unverified[host_block] = Expected(content_hash, checksum)

    def forget(self, host_block: int) -> None:
        """Drop the checksum, because the host block gets another content."""
        self.unverified.pop(host_block, None)

    def verify(self, loads: list[tuple[int, int]]) -> Verification | None:
        """Start to verify loaded (host block, device block) pairs.

        Pairs without an expected checksum are ignored. Returns None if no pair has one.
        """
        loaded = [(host, block) for host, block in loads if host in self.unverified]
        if not loaded:
            return None
        loaded.sort(key=itemgetter(1))
        num_pages = self.pages.shape[1]
        sums = torch.empty(len(loaded), num_pages, dtype=torch.int64, device=self.pages.device)
        # One kernel for each run of adjacent blocks, which is mostly a single run.
        for _, run in groupby(enumerate(loaded), key=lambda entry: entry[1][1] - entry[0]):
            entries = list(run)
            index, (_, first_block) = entries[0]
            count = len(entries)
            pages = self.pages[first_block : first_block + count]
            torch.sum(pages, 2, out=sums[index : index + count])
        expected = {host_block: self.unverified.pop(host_block) for host_block, _ in loaded}
        return Verification(expected, Download(sums))
