"""Which rows of a step with drafts are kept."""

from __future__ import annotations

import torch

from octavo.runner.verification import is_kept, lay_out_rows
from octavo.types import Item


def make_item(slot: int, num_drafts: int) -> Item:
    return Item(slot, 0, slot, None, 1 + num_drafts, True, 9 + num_drafts, num_drafts=num_drafts)


def test_rows_are_kept_up_to_the_first_difference_of_their_own_sequence() -> None:
    layout = torch.from_numpy(lay_out_rows([make_item(5, 3), make_item(2, 0), make_item(7, 2)]))
    slots, offsets = layout.view(2, -1)
    assert slots.tolist() == [5, 5, 5, 5, 2, 7, 7, 7]
    assert offsets.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    # The last row of a sequence has no draft behind it: what is compared there means nothing.
    differs = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1])
    assert is_kept(differs, offsets).tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    differs = torch.tensor([1, 0, 0, 0, 0, 1, 1, 0])
    assert is_kept(differs, offsets).tolist() == [1, 0, 0, 0, 1, 1, 0, 0]
