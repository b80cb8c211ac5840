"""The state of running sequences on the device.

Each sequence holds one batch slot with its tokens, positions, block table and sampling parameters.
A slot is changed only by plans (slot_fills, table_updates and drafts) and by the step itself, which
writes the tokens that it sampled. The inputs of a step are gathered from the slots on the device.
A step can therefore be launched before the results of the previous step are on the host.
"""

from __future__ import annotations

import math
from array import array
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from octavo.ops import LOGIT_UNITS_PER_TEMPERATURE, SamplingColumns
from octavo.ops.fused_spec import SlotMemory
from octavo.runner.transfer import Upload
from octavo.types import Plan, SlotFill


class IntColumn(IntEnum):
    """Columns of BatchSlots.ints."""

    COMPUTED = 0
    PROMPT_LEN = 1
    MIN_TOKENS = 2
    TOP_K = 3
    SEED_LOW = 4
    SEED_HIGH = 5
    DROPPED_TOKENS = 6  # The position in the text minus the position in the KV cache.
    MAX_DISTANCE = 7  # The form of min-p in octavo.ops.SamplingColumns.


class FloatColumn(IntEnum):
    """Columns of BatchSlots.floats."""

    TEMPERATURE = 0
    TOP_P = 1
    PRESENCE_PENALTY = 2
    FREQUENCY_PENALTY = 3
    REPETITION_PENALTY = 4


MAX_INT32 = 2**31 - 1
# Dividing by a smaller repetition penalty might overflow, and would not change the result.
MIN_REPETITION_PENALTY = 1e-6


def int_values(fill: SlotFill) -> list[int]:
    """Return a slot's integers, in the order of IntColumn."""
    params = fill.params
    seed = fill.seed & (2**64 - 1)
    return [
        fill.computed,
        fill.prompt_len,
        min(params.min_tokens - fill.dropped_output_tokens, MAX_INT32),
        min(params.top_k, MAX_INT32) if params.top_k > 0 else MAX_INT32,
        _as_int32(seed & 0xFFFFFFFF),
        _as_int32(seed >> 32),
        fill.dropped_tokens,
        max_distance(params.min_p),
    ]


def max_distance(min_p: float) -> int:
    """Return the distance from the likeliest token at which a token is min_p times as likely."""
    if min_p <= 0:
        return MAX_INT32
    return min(int(-math.log(min_p) * LOGIT_UNITS_PER_TEMPERATURE), MAX_INT32)


def _as_int32(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits


def float_values(fill: SlotFill) -> list[float]:
    """Return a slot's floats, in the order of FloatColumn."""
    params = fill.params
    return [
        0.0 if params.greedy else params.temperature,
        params.top_p,
        params.presence_penalty,
        params.frequency_penalty,
        max(params.repetition_penalty, MIN_REPETITION_PENALTY),
    ]


def needs_full_sampler(fill: SlotFill) -> bool:
    """Return whether sampling needs more than Ops.choose. A step then runs the full sampler."""
    params = fill.params
    changes_logits = (
        params.has_penalties
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
        or params.logits_processors
    )
    return bool(changes_logits or fill.num_logprobs is not None)


class BatchSlots:
    """The batch slots as one int32 array [slots, columns].

    All changes of a step are one copy and one scatter. The other tensors are views of the array:

    ints | floats | block_table | tokens        each view begins at a multiple of 16 bytes
    """

    def __init__(
        self,
        max_slots: int,
        max_len: int,
        block_size: int,
        device: torch.device,
        is_bounded: bool = False,
    ):
        self.device = device
        # True means that sequences may drop blocks. Positions in the KV cache then differ from
        # positions in the text.
        self.is_bounded = is_bounded
        # Batches of a fixed size are padded with this slot, which uses position 0 of block 0.
        self.padding_slot = max_slots
        num_slots = max_slots + 1
        num_blocks = -(-max_len // block_size)
        num_ints = len(IntColumn)
        num_floats = len(FloatColumn)
        self._floats_at = num_ints
        self._table_at = _aligned(num_ints + num_floats)
        self._tokens_at = _aligned(self._table_at + num_blocks)
        self.columns = _aligned(self._tokens_at + max_len + 1)
        state = torch.zeros(num_slots, self.columns, dtype=torch.int32, device=device)
        self.flat = state.view(-1)
        self.ints = state[:, :num_ints]
        self.floats = state.view(torch.float32)[:, num_ints : num_ints + num_floats]
        self.block_table = state[:, self._table_at : self._table_at + num_blocks]
        self.tokens = state[:, self._tokens_at : self._tokens_at + max_len + 1]
        self.computed = self.ints[:, IntColumn.COMPUTED]
        self.sampling = SamplingColumns(
            temperature=self.floats[:, FloatColumn.TEMPERATURE],
            top_p=self.floats[:, FloatColumn.TOP_P],
            top_k=self.ints[:, IntColumn.TOP_K],
            max_distance=self.ints[:, IntColumn.MAX_DISTANCE],
            seed_low=self.ints[:, IntColumn.SEED_LOW],
            seed_high=self.ints[:, IntColumn.SEED_HIGH],
        )
        self.memory = SlotMemory(
            tokens=self.tokens,
            computed=self.computed,
            dropped=self.ints[:, IntColumn.DROPPED_TOKENS],
            block_table=self.block_table,
            sampling=self.sampling,
        )
        # The latest SlotFill of each slot.
        self.slot_fills: list[SlotFill | None] = [None] * num_slots
        self.full_sampler_slots: set[int] = set()  # needs_full_sampler() is true for these.

    def table_index(self, slot: int, logical_block: int) -> int:
        """Return the index into `flat` of an entry of a slot's block table."""
        return slot * self.columns + self._table_at + logical_block

    def fill_of(self, slot: int) -> SlotFill:
        """Return the latest SlotFill of a slot in the current step."""
        fill = self.slot_fills[slot]
        assert fill is not None, f"no plan has filled slot {slot}"
        return fill

    def token_index(self, slot: int, position: int) -> int:
        """Return the index into `flat` of a token."""
        return slot * self.columns + self._tokens_at + position

    def prepare(self, plan: Plan, upload: Upload) -> tuple[slice, slice]:
        """Add the plan's changes to the step's upload.

        Returns the slice of the indices into `flat`, and the slice of the values.
        """
        tables: dict[int, array[int]] = {}
        run_starts: list[int] = []  # The index of each contiguous run of values.
        runs: list[array[int] | array[float]] = []
        for fill in plan.slot_fills:
            self.slot_fills[fill.slot] = fill
            if needs_full_sampler(fill):
                self.full_sampler_slots.add(fill.slot)
            else:
                self.full_sampler_slots.discard(fill.slot)
            start = fill.slot * self.columns
            table = array("i", fill.block_table)
            tables[fill.slot] = table
            run_starts += (
                start,
                start + self._floats_at,
                start + self._table_at,
                start + self._tokens_at,
            )
            runs += (
                array("i", int_values(fill)),
                array("f", float_values(fill)),
                table,
                fill.tokens,
            )
        single_indices = array("q")
        single_values = array("i")
        for slot, logical_block, block in plan.table_updates:
            if slot in tables and logical_block < len(tables[slot]):
                # The plan also fills the slot, and an index must not be written twice.
                tables[slot][logical_block] = block
            else:
                single_indices.append(self.table_index(slot, logical_block))
                single_values.append(block)
        for index, drafts in plan.drafts.items():
            item = plan.items[index]
            first_index = self.token_index(item.slot, item.max_kv_len - len(drafts))
            single_indices.extend(range(first_index, first_index + len(drafts)))
            single_values.extend(drafts)
        if not runs:
            return upload.longs(single_indices), upload.ints(single_values)
        lengths = np.array([len(run) for run in runs])
        values_before = np.cumsum(lengths) - lengths
        indices = np.repeat(np.array(run_starts) - values_before, lengths)
        indices += np.arange(lengths.sum())
        values = np.frombuffer(b"".join([*runs, single_values]), np.int32)
        return upload.longs(np.concatenate([indices, single_indices])), upload.ints(values)

    def apply(self, prepared: tuple[slice, slice], uploaded: Tensor) -> None:
        """Apply the prepared changes on the device."""
        indices, values = (uploaded[part] for part in prepared)
        if len(values):
            self.flat[indices.view(torch.int64)] = values


def _aligned(columns: int) -> int:
    return -(-columns // 4) * 4
