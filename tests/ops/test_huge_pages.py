"""Huge pages: where an arena places its allocations, and that huge pages are requested from Linux."""

from __future__ import annotations

import gc
import mmap
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from octavo.ops.huge_pages import CACHE_LINE, CHUNK, HUGE_PAGE, Arena, advise_huge


def flags_of(address: int) -> list[str]:
    """Return Linux's flags of the mapping that contains this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_allocations_are_consecutive_cache_lines_and_never_overlap():
    arena = Arena()
    pieces = [arena.allocate(size) for size in (1, 64, 65, 1000, 0, 128)]
    assert [len(p) for p in pieces] == [1, 64, 65, 1000, 0, 128]
    starts = [p.data_ptr() for p in pieces if len(p)]
    assert [b - a for a, b in pairwise(starts)] == [64, 64, 128, 1024]
    assert starts[0] % HUGE_PAGE == 0
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    assert all((piece == i).all() for i, piece in enumerate(pieces))


def test_an_allocation_larger_than_a_chunk_has_memory_of_its_own():
    arena = Arena()
    small, large, after = arena.allocate(10), arena.allocate(CHUNK + 1), arena.allocate(10)
    assert large.data_ptr() % HUGE_PAGE == 0 and len(large) == CHUNK + 1
    assert after.data_ptr() == small.data_ptr() + CACHE_LINE


def test_an_allocation_outlives_its_arena():
    piece = Arena().allocate(1 << 20).fill_(7)
    gc.collect()
    assert (piece == 7).all()


def test_a_chunk_from_inference_mode_also_serves_callers_outside_of_it():
    arena = Arena()
    with torch.inference_mode():
        first = arena.allocate(10).fill_(1)
    second = arena.allocate(10).fill_(2)
    assert first.tolist() + second.tolist() == [1] * 10 + [2] * 10


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are a feature of Linux")
def test_huge_pages_are_requested_from_linux():
    # Memory that torch allocates may have been used before.
    mapping = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    before = flags_of(tensor.data_ptr() + HUGE_PAGE)
    if not before or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("Linux has no huge pages here, or does not report them")
    assert "hg" not in before
    assert advise_huge(tensor) is tensor
    assert "hg" in flags_of(tensor.data_ptr() + HUGE_PAGE)
    assert "hg" in flags_of(Arena().allocate(100).data_ptr())
