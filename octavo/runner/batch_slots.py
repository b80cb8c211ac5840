"""Device-resident state of running sequences, one row each: tokens, positions, block table, sampling parameters.

Only plans change it (rows and appends) and the step itself (the token it sampled), so a step can be launched before
the host knows what the one before it produced: the next input is gathered from here, on the device.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch
from torch import Tensor

from octavo.runner.transfer import Upload
from octavo.types import NewSlot, Plan

INT_FIELDS = ("computed", "prompt_len", "min_tokens", "top_k", "seed_low", "seed_high", "offset")
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


MOST = 2**31 - 1  # an int32 holds
LEAST = 1e-6  # penalty: less would be no different, and what is divided by it perhaps no number


def _ints(row: NewSlot) -> list[int]:
    p = row.params
    seed = row.seed & (2**64 - 1)
    # as int32
    low, high = (x - 2**32 if x >= 2**31 else x for x in (seed & 0xFFFFFFFF, seed >> 32))
    top_k = min(p.top_k, MOST) if p.top_k > 0 else MOST
    return [
        row.computed,
        row.prompt_len,
        min(p.min_tokens - row.dropped_output_tokens, MOST),
        top_k,
        low,
        high,
        row.dropped_tokens,
    ]


def _floats(row: NewSlot) -> list[float]:
    p = row.params
    temperature = 0.0 if p.greedy else p.temperature
    repetition = max(p.repetition_penalty, LEAST)
    return [temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, repetition]


def _plain(row: NewSlot) -> bool:
    p = row.params
    filtered = not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    return (
        not (filtered or p.has_penalties or p.logit_bias or p.allowed_token_ids or p.min_tokens)
        and row.num_logprobs is None
    )


class Rows:
    """One array [rows, columns] of int32, so that a step's changes are one copy and one scatter; the rest are views of it:

    ints | floats | table | tokens        each begins on 16 bytes
    """

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        block_size: int,
        device: torch.device,
        evicting: bool = False,
    ):
        self.device = device
        self.evicting = evicting  # tokens may leave a row: its positions are then not the text's
        # a row of nobody's, for batches of a fixed size: position 0 of block 0
        self.padding = max_rows
        max_rows += 1
        blocks = -(-max_len // block_size)
        self._floats = len(INT_FIELDS)
        self._table = _aligned(len(INT_FIELDS) + len(FLOAT_FIELDS))
        self._tokens = _aligned(self._table + blocks)
        self.columns = _aligned(self._tokens + max_len + 1)
        state = torch.zeros(max_rows, self.columns, dtype=torch.int32, device=device)
        self.flat = state.view(-1)
        self.ints = state[:, : self._floats]
        self.floats = state.view(torch.float32)[:, self._floats : self._floats + len(FLOAT_FIELDS)]
        self.table = state[:, self._table : self._table + blocks]
        self.tokens = state[:, self._tokens : self._tokens + max_len + 1]
        # what the host knows of each row: its parameters
        self.host: list[NewSlot | None] = [None] * max_rows
        self.special: set[int] = set()  # rows that ask for more than a temperature

    @property
    def computed(self) -> Tensor:
        return self.ints[:, 0]

    def stage(self, plan: Plan, up: Upload) -> tuple[slice, slice]:
        """Put the plan's changes into the step's upload: where, and what."""
        tables: dict[int, array[int]] = {}
        places: list[int] = []  # where each run of values begins
        values: list[array[int] | array[float]] = []
        for r in plan.new_slots:
            self.host[r.slot] = r
            (self.special.discard if _plain(r) else self.special.add)(r.slot)
            first = r.slot * self.columns
            table = tables[r.slot] = array("i", r.block_table)
            places += (first, first + self._floats, first + self._table, first + self._tokens)
            values += (array("i", _ints(r)), array("f", _floats(r)), table, r.tokens)
        grown = array("q")
        blocks = array("i")
        for row, at, block in plan.block_appends:
            if row in tables and at < len(tables[row]):
                # of a row born in the same plan: no place may be written to twice
                tables[row][at] = block
            else:
                grown.append(row * self.columns + self._table + at)
                blocks.append(block)
        if not values:
            return up.longs(grown), up.ints(blocks)
        lengths = np.array([len(run) for run in values])
        before = np.cumsum(lengths) - lengths  # values that stand before each run
        where = np.repeat(np.array(places) - before, lengths) + np.arange(lengths.sum())
        return up.longs(np.concatenate([where, grown])), up.ints(
            np.frombuffer(b"".join([*values, blocks]), np.int32)
        )

    def apply(self, staged: tuple[slice, slice], shipped: Tensor) -> None:
        """Make the changes on the device."""
        where, values = (shipped[s] for s in staged)
        if len(values):
            self.flat[where.view(torch.int64)] = values


def _aligned(columns: int) -> int:
    return -(-columns // 4) * 4
