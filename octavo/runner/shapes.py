"""The sizes that steps are captured in. Arithmetic alone: what they take of memory is planned before there is a device."""

from __future__ import annotations

from typing import NamedTuple

MIXED_SIZES = [16, 32, 64, 128, 192, 256, 320, 384, 512]  # tokens
MIXED_ITEMS = 64  # that are not taken for decoding
# tokens, in which products waste little on an H200: 640 take less than twice the time of 320
BESIDE_SIZES = [192, 320, 640]
BESIDE_ROWS = range(32, 257, 32)  # that decode


class Shape(NamedTuple):
    """Of a graph: all that varies between them."""

    decoding: int  # items of one token, which come first
    tokens: int  # of all items: as many, where the step only decodes

    @property
    def items(self) -> int:
        return self.decoding + min(self.tokens - self.decoding, MIXED_ITEMS)


def decode_sizes(most: int) -> list[int]:
    """Rows a graph is captured for: at most an eighth of them is padding above 128 rows."""
    sizes = [1, 2, 4, 8, 16]
    size = 16
    while size < most:
        size += 16 if size < 256 else 32 if size < 512 else size // 8
        sizes.append(size)
    return [s for s in sizes if s < most] + [most]


def mixed_shapes(max_rows: int, max_tokens: int) -> list[Shape]:
    """The smallest first; of equals the one that takes most for decoding."""
    shapes = [Shape(0, size) for size in MIXED_SIZES]
    shapes += [
        Shape(rows, size)
        for size in BESIDE_SIZES
        for rows in BESIDE_ROWS
        if rows < min(size, max_rows + 1)
    ]
    return sorted(
        (s for s in shapes if s.tokens <= max_tokens), key=lambda s: (s.tokens, -s.decoding)
    )


def held_rows(max_rows: int, max_tokens: int) -> int:
    """Rows of logits that stay in memory once all graphs are captured: each has its own."""
    return sum(decode_sizes(max_rows)) + sum(
        shape.items for shape in mixed_shapes(max_rows, max_tokens)
    )
