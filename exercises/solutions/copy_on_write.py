"""A solution of exercises/copy_on_write.py."""

from __future__ import annotations


def blocks_held(prompt: int, generated: int, n: int, block_size: int) -> int:
    shared = (prompt - 1) // block_size
    own_positions = prompt + generated - shared * block_size
    own = -(-own_positions // block_size)
    return shared + n * own
