"""The limits of a runner, and the sizes in which it captures steps as CUDA graphs.

The module is pure arithmetic, so that memory can be planned without a device.
"""

from __future__ import annotations

from typing import NamedTuple

# The token counts of graphs for any items.
MIXED_SIZES = [16, 32, 64, 128, 192, 256, 320, 384, 512]
MAX_PREFILL_ITEMS = 64  # A graph computes at most this many items as prefill.
# The token counts of graphs in which prompts piggyback on decoding sequences. On an H200, matrix
# products are efficient at these sizes: 640 tokens take less than twice the time of 320.
PIGGYBACK_SIZES = [192, 320, 640]
PIGGYBACK_DECODING = range(32, 257, 32)  # The numbers of decoding sequences in such a graph.
# A graph that verifies drafts has at most this many rows. In a larger step, drafts rarely pay.
MAX_VERIFY_ROWS = 256
# The numbers of sequences in a graph that drafts on the device.
DRAFTING_SIZES = [1, 2, 4, 8, 16, 32, 64]


class RunnerLimits(NamedTuple):
    max_slots: int  # The number of sequences that run at once.
    max_len: int  # The number of tokens of a sequence.
    max_tokens: int  # The number of tokens of a step.
    is_bounded: bool = False  # Sequences may drop blocks (octavo/core/bounded_kv.py).
    max_drafts: int = 0  # The number of drafts of one sequence that a step verifies.
    drafts_on_device: bool = False  # A drafter on the device makes the drafts of a step.


class GraphShape(NamedTuple):
    """The properties in which graphs differ."""

    decoding: int  # The number of items with one token each, which come first.
    tokens: int  # The tokens of all items. It equals `decoding` if the step only decodes.
    verifies: bool = False  # The step verifies drafts, so a sequence may have several rows.
    num_passes: int = 0  # The passes of the drafter on the device, before verification.
    draft_extend: bool = False  # The drafter on the device computes its KV (Plan.draft_extend).

    @property
    def drafting(self) -> int:
        """The sequences that the drafter on the device drafts for."""
        return self.tokens // (1 + self.num_passes)

    @property
    def items(self) -> int:
        return self.decoding + min(self.tokens - self.decoding, MAX_PREFILL_ITEMS)


def decode_sizes(max_slots: int) -> list[int]:
    """Return the sizes of decode graphs.

    Above 128 sequences, at most an eighth of the rows is padding.
    """
    sizes = [1, 2, 4, 8, 16]
    size = 16
    while size < max_slots:
        if size < 256:
            size += 16
        elif size < 512:
            size += 32
        else:
            size += size // 8
        sizes.append(size)
    return [size for size in sizes if size < max_slots] + [max_slots]


def mixed_shapes(max_slots: int, max_tokens: int) -> list[GraphShape]:
    """Return the shapes of mixed graphs, the smallest first.

    Of shapes with the same size, the one with the most decoding items comes first.
    """
    shapes = [GraphShape(0, size) for size in MIXED_SIZES]
    for size in PIGGYBACK_SIZES:
        for decoding in PIGGYBACK_DECODING:
            if decoding < size and decoding <= max_slots:
                shapes.append(GraphShape(decoding, size))
    fitting = [shape for shape in shapes if shape.tokens <= max_tokens]
    return sorted(fitting, key=lambda shape: (shape.tokens, -shape.decoding))


def verify_shapes(limits: RunnerLimits) -> list[GraphShape]:
    """Return the shapes of graphs that verify drafts, the smallest first.

    With drafts on the device, all sequences of a graph have the same number of rows. Otherwise the
    numbers may differ.
    """
    if not limits.max_drafts:
        return []
    if not limits.drafts_on_device:
        max_rows = limits.max_slots * (1 + limits.max_drafts)
        sizes = decode_sizes(min(max_rows, limits.max_tokens, MAX_VERIFY_ROWS))
        return [GraphShape(size, size, verifies=True) for size in sizes]
    shapes = []
    for num_passes in range(1, limits.max_drafts + 1):
        max_sequences = min(limits.max_tokens, MAX_VERIFY_ROWS) // (1 + num_passes)
        for size in DRAFTING_SIZES:
            if size <= min(max_sequences, limits.max_slots):
                rows = size * (1 + num_passes)
                shapes.append(GraphShape(rows, rows, verifies=True, num_passes=num_passes))
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.num_passes))


def held_logits(limits: RunnerLimits) -> int:
    """Return how many rows of logits the captured graphs hold in memory together.

    Each graph has its own rows. With a drafter on the device, each shape without drafts has two
    graphs: with and without a draft extend.
    """
    decode_rows = sum(decode_sizes(limits.max_slots))
    mixed_rows = sum(shape.items for shape in mixed_shapes(limits.max_slots, limits.max_tokens))
    graphs_of_a_shape = 2 if limits.drafts_on_device else 1
    verify_rows = sum(shape.tokens for shape in verify_shapes(limits))
    return graphs_of_a_shape * (decode_rows + mixed_rows) + verify_rows
