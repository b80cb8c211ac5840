"""Who wrote what where in KV, to find blocks that two sequences use at once. For debugging: it waits for the device each step.

Beside each KV slot lies a mark: a hash of the token, its position and all tokens before it. A step first compares the marks
of everything its items are about to read with what the tokens of their rows make them, then writes its own.

    mark(p) = sum over i <= p of (token[i] + 1) * weight[i]        modulo 2^64, so a running sum is all that is needed
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import KVCorrupted
from octavo.runner.batch_slots import Rows
from octavo.types import Item, Plan


class Canary:
    def __init__(self, num_blocks: int, block_size: int, max_len: int, device: torch.device):
        self.size = block_size
        # [block, offset]
        self.marks = torch.zeros(num_blocks + 1, block_size, dtype=torch.int64, device=device)
        dice = torch.Generator().manual_seed(0)
        weights = (
            torch.randint(-(2**63), 2**63 - 1, (max_len + 1,), generator=dice, dtype=torch.int64)
            | 1
        )
        self.weights = weights.to(device)
        self.writer = [0] * (num_blocks + 1)  # Sequence.id of who wrote to it last

    def step(self, plan: Plan, rows: Rows) -> None:
        """After the plan's changes to the rows and before its forward. Raises KVCorrupted."""
        if plan.copies:
            old, new = (
                torch.tensor([c[k] for c in plan.copies], device=self.marks.device)
                for k in range(2)
            )
            self.marks[new] = self.marks[old]
            for source, target in plan.copies:
                self.writer[target] = self.writer[source]
        found = [self._check(item, rows) for item in plan.items]
        for item, (blocks, offsets, marks) in zip(plan.items, found, strict=True):
            self.marks[blocks, offsets] = marks
            for block in set(blocks.tolist()):
                self.writer[block] = item.seq_id

    def _check(self, item: Item, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Compare what the item reads. Blocks, offsets and marks [item.num] of what it writes."""
        start = int(rows.computed[item.slot])
        at = torch.arange(start + item.num_tokens, device=self.marks.device)
        want = ((rows.tokens[item.slot, : len(at)].long() + 1) * self.weights[: len(at)]).cumsum(0)
        blocks = rows.table[item.slot, at // self.size].long()
        offsets = at % self.size
        wrong = (self.marks[blocks, offsets] != want)[:start].nonzero()
        if len(wrong):
            p = int(wrong[0, 0])
            block = int(blocks[p])
            raise KVCorrupted(
                f"sequence {item.seq_id} in row {item.slot} would read position {p} from block {block}, which holds something else: "
                f"sequence {self.writer[block]} wrote to it last ({len(wrong)} of {start} positions are wrong)"
            )
        return blocks[start:], offsets[start:], want[start:]
