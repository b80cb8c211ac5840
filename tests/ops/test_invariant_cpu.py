"""The batch-invariant operators of a CPU give a row the same bits for every number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.ops.cpu.cpu_features import instruction_set
from octavo.ops.reference import ReferenceOps
from tests.marks import slow_after
from tests.ops.test_reference import draw

if isinstance(instruction_set(), str):
    pytest.skip("the CPU kernels cannot run here", allow_module_level=True)
from octavo.ops.cpu.invariant_cpu import ROW_BLOCK, InvariantCpuOps

OPS = InvariantCpuOps()


@pytest.mark.parametrize(
    "shape", slow_after(3, [(70, 96), (257, 64), (576, 1536), (4096, 2048), (49152, 576)])
)
def test_a_product_has_the_same_bits_for_every_number_of_rows(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    weight, bias = draw(outputs, inputs, seed=1), draw(outputs, seed=2)
    hidden = draw(ROW_BLOCK, inputs, seed=3)
    packed = OPS.pack(weight)
    want = torch.cat([OPS.linear(row[None], packed, bias) for row in hidden])
    torch.testing.assert_close(want, ReferenceOps().linear(hidden, weight, bias), atol=1e-2, rtol=0)
    large = outputs * inputs > 2**18
    numbers = [5, 16, 63, 200, ROW_BLOCK] if large else range(1, ROW_BLOCK + 1)
    for rows in numbers:
        assert torch.equal(OPS.linear(hidden[:rows], packed, bias), want[:rows]), rows
        assert torch.equal(OPS.linear(hidden[-rows:], packed, bias), want[-rows:]), rows


def test_more_rows_than_a_block_are_computed_in_blocks() -> None:
    weight, bias = draw(70, 96, seed=1), draw(70, seed=2)
    hidden, residual = draw(ROW_BLOCK + 3, 96, seed=3), draw(ROW_BLOCK + 3, 70, seed=4)
    packed = OPS.pack(weight)
    got = OPS.linear(hidden, packed, bias, residual.clone())
    for row in (0, ROW_BLOCK - 1, ROW_BLOCK, ROW_BLOCK + 2):
        one = slice(row, row + 1)
        assert torch.equal(got[one], OPS.linear(hidden[one], packed, bias, residual[one].clone()))


def test_a_tied_head_has_the_bits_of_a_packed_weight() -> None:
    weight, hidden = draw(301, 64, seed=1), draw(9, 64, seed=2)
    want = OPS.linear(hidden, OPS.pack(weight))
    assert torch.equal(OPS.logits(hidden, weight), want)
    assert torch.equal(OPS.logits(hidden[4:5], weight), want[4:5])


WEIGHTS = {width: draw(width, seed=1) for width in (32, 100, 576, 2048)}
ROW_WISE: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda rows: OPS.rms_norm(rows, WEIGHTS[rows.shape[1]], 1e-5),
    "layer_norm": lambda rows: OPS.layer_norm(
        rows, WEIGHTS[rows.shape[1]], WEIGHTS[rows.shape[1]], 1e-5
    ),
    "silu_mul": lambda rows: OPS.silu_mul(rows),
    "gelu_mul": lambda rows: OPS.gelu_mul(rows),
    "gelu": lambda rows: OPS.gelu(rows),
    "log_softmax": lambda rows: rows.log_softmax(1),
}


@pytest.mark.parametrize("width", WEIGHTS)
@pytest.mark.parametrize("name", ROW_WISE)
def test_the_other_operators_compute_each_row_on_its_own(name: str, width: int) -> None:
    operator = ROW_WISE[name]
    hidden = draw(700, width, seed=5)
    want = operator(hidden.clone())
    for rows in (1, 2, 3, 5, 7, 8, 16, 33, 64, 100, 255, 256, 512):
        for first in (0, 1, 17):
            part = slice(first, first + rows)
            assert torch.equal(operator(hidden[part].clone()), want[part]), (rows, first)
