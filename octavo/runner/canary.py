"""The KV canary finds blocks that two sequences use at once.

It is for debugging, because it waits for the device in each step. Each KV position has a mark: a
hash of its token, its position and all tokens before it. A step first compares the marks of all
positions that its items read with marks computed from the tokens of their slots. Then it writes the
marks of its own positions.

    mark(p) = sum over i <= p of (token[i] + 1) * weight[i]     modulo 2^64

All marks of a sequence are one running sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import KVCorrupted
from octavo.runner.batch_slots import BatchSlots
from octavo.types import Item, Plan


class Canary:
    def __init__(self, num_blocks: int, block_size: int, max_len: int, device: torch.device):
        self.block_size = block_size
        # [block, offset]
        self.marks = torch.zeros(num_blocks + 1, block_size, dtype=torch.int64, device=device)
        generator = torch.Generator().manual_seed(0)
        weights = torch.randint(
            -(2**63), 2**63 - 1, (max_len + 1,), generator=generator, dtype=torch.int64
        )
        self.weights = (weights | 1).to(device)
        # The Sequence.id of the last writer of each block.
        self.last_writers = [0] * (num_blocks + 1)

    def check_step(self, plan: Plan, batch_slots: BatchSlots) -> None:
        """Check a plan after its changes to the slots and before its forward pass.

        Raises KVCorrupted if an item would read KV that another sequence has written.
        """
        if plan.copies:
            device = self.marks.device
            sources = torch.tensor([source for source, _ in plan.copies], device=device)
            targets = torch.tensor([target for _, target in plan.copies], device=device)
            self.marks[targets] = self.marks[sources]
            for source, target in plan.copies:
                self.last_writers[target] = self.last_writers[source]
        writes = [self._check_item(item, batch_slots) for item in plan.items]
        for item, (blocks, offsets, marks) in zip(plan.items, writes, strict=True):
            self.marks[blocks, offsets] = marks
            for block in set(blocks.tolist()):
                self.last_writers[block] = item.seq_id

    def _check_item(self, item: Item, batch_slots: BatchSlots) -> tuple[Tensor, Tensor, Tensor]:
        """Compare the marks of the positions that the item reads.

        Returns blocks, offsets and marks [num_tokens] of the positions that it writes.
        """
        start = int(batch_slots.computed[item.slot])
        end = start + item.num_tokens
        positions = torch.arange(end, device=self.marks.device)
        tokens = batch_slots.tokens[item.slot, :end].long()
        expected = ((tokens + 1) * self.weights[:end]).cumsum(0)
        blocks = batch_slots.block_table[item.slot, positions // self.block_size].long()
        offsets = positions % self.block_size
        wrong = (self.marks[blocks, offsets] != expected)[:start].nonzero()
        if len(wrong):
            position = int(wrong[0, 0])
            block = int(blocks[position])
            raise KVCorrupted(
                f"sequence {item.seq_id} in batch slot {item.slot} would read position {position} "
                f"from block {block}, which holds something else: sequence "
                f"{self.last_writers[block]} wrote to it last ({len(wrong)} of {start} positions "
                "are wrong)"
            )
        return blocks[start:], offsets[start:], expected[start:]
