"""What plans change in the rows' state: every part of it, in one scatter, and nothing else."""

from __future__ import annotations

from array import array

import torch

from octavo.params import SamplingParams
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.transfer import Upload
from octavo.types import Plan, SlotFill


def slot_fill(row: int, tokens: list[int], table: list[int], **params: float) -> SlotFill:
    return SlotFill(
        row,
        0,
        row,
        array("i", tokens),
        0,
        table,
        len(tokens),
        2**40 + row,
        frozenset(),
        SamplingParams(**params),
    )  # type: ignore[arg-type]


def apply(state: BatchSlots, plan: Plan) -> None:
    up = Upload()
    up.ints([7])  # something else, of odd size, is sent before
    prepared = state.prepare(plan, up)
    state.apply(prepared, up.send(torch.device("cpu")))


def test_a_plan_changes_its_rows_and_no_others() -> None:
    state = BatchSlots(3, 30, 4, torch.device("cpu"))
    state.flat.fill_(-5)
    apply(
        state,
        Plan(
            1, slot_fills=[slot_fill(1, [11, 12, 13, 14, 15], [8, 9], temperature=0.5, top_p=0.25)]
        ),
    )
    assert state.tokens[1, :6].tolist() == [11, 12, 13, 14, 15, -5]
    assert state.block_table[1, :3].tolist() == [8, 9, -5]
    assert state.ints[1, :2].tolist() == [0, 5] and int(state.computed[1]) == 0
    assert state.floats[1, :2].tolist() == [0.5, 0.25]
    changed = state.flat.view(4, -1) != -5
    assert changed.any(1).tolist() == [False, True, False, False]
    assert int(changed.sum()) == 5 + 2 + 7 + 6


def test_a_block_given_later_in_the_plan_replaces_the_one_a_new_row_came_with() -> None:
    state = BatchSlots(3, 30, 4, torch.device("cpu"))
    apply(
        state,
        Plan(
            1,
            slot_fills=[slot_fill(0, [1] * 8, [8, 9])],
            table_updates=[(0, 1, 20), (0, 2, 21), (2, 0, 22)],
        ),
    )
    assert state.block_table[0, :4].tolist() == [8, 20, 21, 0] and state.block_table[
        2, :2
    ].tolist() == [22, 0]


def test_a_plan_without_changes_ships_nothing() -> None:
    state, up = BatchSlots(3, 30, 4, torch.device("cpu")), Upload()
    prepared = state.prepare(Plan(1), up)
    assert len(up.send(torch.device("cpu"))) == 0
    state.apply(prepared, torch.zeros(0, dtype=torch.int32))
    assert not state.flat.any()


def test_every_part_begins_on_sixteen_bytes() -> None:
    for length in (1, 30, 33):
        state = BatchSlots(2, length, 4, torch.device("cpu"))
        assert (
            all(
                view.storage_offset() % 4 == 0
                for view in (state.block_table, state.tokens, state.ints)
            )
            and state.columns % 4 == 0
        )
