"""Device-resident state of running sequences, one row each: tokens, positions, block table, sampling parameters.

Only plans change it (rows and appends) and the step itself (the token it sampled), so a step can be launched before
the host knows what the one before it produced: the next input is gathered from here, on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.runner.transfer import Upload
from octavo.types import NewRow, Plan

INT_FIELDS = ("computed", "prompt_len", "min_tokens", "top_k", "seed_low", "seed_high", "offset")
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


MOST = 2**31 - 1  # an int32 holds


def _ints(row: NewRow) -> list[int]:
    p, seed = row.params, row.seed & (2**64 - 1)
    low, high = (x - 2**32 if x >= 2**31 else x for x in (seed & 0xFFFFFFFF, seed >> 32))  # as int32
    top_k = min(p.top_k, MOST) if p.top_k > 0 else MOST
    return [row.computed, row.prompt_len, min(p.min_tokens - row.said, MOST), top_k, low, high, row.offset]


def _floats(row: NewRow) -> list[float]:
    p = row.params
    temperature = 0.0 if p.greedy else p.temperature
    return [temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty]


def _plain(row: NewRow) -> bool:
    p = row.params
    filtered = not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    return not (filtered or p.has_penalties or p.logit_bias or p.allowed_token_ids or p.min_tokens) and row.logprobs is None


class Rows:
    def __init__(self, max_rows: int, max_len: int, block_size: int, device: torch.device, evicting: bool = False):
        self.device = device
        self.evicting = evicting  # tokens may leave a row: its positions are then not the text's
        self.padding = max_rows  # a row of nobody's, for batches of a fixed size: position 0 of block 0
        max_rows += 1
        self.tokens = torch.zeros(max_rows, max_len + 1, dtype=torch.int32, device=device)
        self.table = torch.zeros(max_rows, -(-max_len // block_size), dtype=torch.int32, device=device)
        self.ints = torch.zeros(max_rows, len(INT_FIELDS), dtype=torch.int32, device=device)
        self.floats = torch.zeros(max_rows, len(FLOAT_FIELDS), device=device)
        self.host: list[NewRow | None] = [None] * max_rows  # what the host knows of each row: its parameters
        self.special: set[int] = set()  # rows that ask for more than a temperature

    @property
    def computed(self) -> Tensor:
        return self.ints[:, 0]

    def stage(self, plan: Plan, up: Upload) -> list[slice]:
        """Put the plan's changes into the step's upload."""
        rows = plan.rows
        for r in rows:
            self.host[r.row] = r
            (self.special.discard if _plain(r) else self.special.add)(r.row)
        return [
            up.ints([r.row for r in rows]),
            up.ints([_ints(r) for r in rows]),
            up.floats([_floats(r) for r in rows]),
            *self._stage_ragged([(r.row, np.frombuffer(r.tokens, np.int32)) for r in rows], up),
            *self._stage_ragged([(r.row, np.array(r.table, np.int32)) for r in rows], up),
            *(up.ints([a[k] for a in plan.appends]) for k in range(3)),
        ]

    @staticmethod
    def _stage_ragged(lists: list[tuple[int, NDArray[np.int32]]], up: Upload) -> tuple[slice, slice, slice]:
        """Arrays that go to the start of rows, as (row, column, value)."""
        lengths = [len(values) for _, values in lists]
        rows = np.repeat(np.array([row for row, _ in lists], dtype=np.int32), lengths)
        columns = np.concatenate([np.arange(n) for n in lengths]) if lists else []
        return up.ints(rows), up.ints(columns), up.ints(np.concatenate([values for _, values in lists]) if lists else [])

    def apply(self, staged: list[slice], shipped: Tensor) -> None:
        """Make the changes on the device. Appends come last: one may replace a block of a row born in the same plan."""
        rows, ints, floats, token_row, token_at, token, block_row, block_at, block, *appends = (shipped[s] for s in staged)
        if len(rows):
            self.ints[rows.long()] = ints.view(-1, len(INT_FIELDS))
            self.floats[rows.long()] = floats.view(torch.float32).view(-1, len(FLOAT_FIELDS))
            self.tokens[token_row.long(), token_at.long()] = token
            self.table[block_row.long(), block_at.long()] = block
        if len(appends[0]):
            self.table[appends[0].long(), appends[1].long()] = appends[2]
