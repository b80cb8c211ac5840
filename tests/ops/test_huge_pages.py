"""Huge pages: where pieces of an arena lie, and that Linux was asked."""

from __future__ import annotations

import gc
import mmap
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from octavo.ops.huge_pages import CHUNK, HUGE, LINE, Arena, huge


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_pieces_follow_one_another_on_cache_lines_and_never_overlap():
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 64, 65, 1000, 0, 128)]
    assert [len(p) for p in pieces] == [1, 64, 65, 1000, 0, 128]
    starts = [p.data_ptr() for p in pieces if len(p)]
    assert [b - a for a, b in pairwise(starts)] == [64, 64, 128, 1024]
    assert starts[0] % HUGE == 0
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    assert all((piece == i).all() for i, piece in enumerate(pieces))


def test_a_piece_larger_than_a_chunk_has_memory_of_its_own_and_leaves_the_chunk_alone():
    arena = Arena()
    small, large, after = arena.take(10), arena.take(CHUNK + 1), arena.take(10)
    assert large.data_ptr() % HUGE == 0 and len(large) == CHUNK + 1
    assert after.data_ptr() == small.data_ptr() + LINE


def test_a_piece_outlives_its_arena():
    piece = Arena().take(1 << 20).fill_(7)
    gc.collect()
    assert (piece == 7).all()


def test_a_chunk_begun_in_inference_mode_serves_who_is_in_none():
    arena = Arena()
    with torch.inference_mode():
        first = arena.take(10).fill_(1)
    second = arena.take(10).fill_(2)
    assert first.tolist() + second.tolist() == [1] * 10 + [2] * 10


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_linux_is_asked_for_huge_pages():
    # torch's own may have been somebody's before
    fresh = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(fresh, dtype=torch.uint8)
    before = flags_of(tensor.data_ptr() + HUGE)
    if not before or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has none, or does not tell")
    assert "hg" not in before
    assert huge(tensor) is tensor
    assert "hg" in flags_of(tensor.data_ptr() + HUGE)
    assert "hg" in flags_of(Arena().take(100).data_ptr())
