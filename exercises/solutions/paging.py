"""A solution of exercises/paging.py."""

from __future__ import annotations


def unused_with_paging(lengths: list[int], block_size: int) -> int:
    return sum(-length % block_size for length in lengths)


def unused_when_contiguous(lengths: list[int], limits: list[int]) -> int:
    return sum(limits) - sum(lengths)
