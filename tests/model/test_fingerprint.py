"""The same weights have the same fingerprint, and any other weights another."""

from __future__ import annotations

import torch

from octavo.model import build, registry
from octavo.model.fingerprint import _row_and_column_sums, fingerprint
from octavo.model.load import dummy_weights
from octavo.ops.reference import ReferenceOps
from tests import tiny


def make(seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    hf = dict(tiny.hf_model("llama").config.to_dict(), architectures=["LlamaForCausalLM"])
    model = build(registry.parse(hf), registry.find(hf), ReferenceOps(), dtype, "cpu")
    dummy_weights(model, seed)
    return model


def test_it_is_of_the_weights_and_of_what_is_added() -> None:
    assert fingerprint(make(), "x") == fingerprint(make(), "x") and len(fingerprint(make())) == 16
    prints = [
        fingerprint(make()),
        fingerprint(make(), "x"),
        fingerprint(make(2)),
        fingerprint(make(dtype=torch.float32)),
    ]
    assert len(set(prints)) == 4


def test_one_bit_of_one_weight_makes_another_model() -> None:
    model = make()
    before = fingerprint(model)
    for parameter in model.parameters():
        bits = parameter.data.view(-1).view(torch.uint8)
        bits[len(bits) // 3] ^= 1
        assert fingerprint(model) != before
        bits[len(bits) // 3] ^= 1
    assert fingerprint(model) == before


def test_sums_notice_a_changed_moved_or_missing_byte() -> None:
    """What a GPU computes, here on the CPU."""
    for size in (1, 4095, 4096, 3 * 4096 + 5):
        data = torch.randint(
            0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
        )
        found = {_row_and_column_sums(data), _row_and_column_sums(data[:-1])}
        for at in (0, size // 2, size - 1):
            changed = data.clone()
            changed[at] ^= 8
            found.add(_row_and_column_sums(changed))
        assert len(found) == 2 + len({0, size // 2, size - 1})
    rows = torch.arange(8192, dtype=torch.int64).to(torch.uint8)
    assert _row_and_column_sums(rows) != _row_and_column_sums(rows.flip(0)), "moved"
