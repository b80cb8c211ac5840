"""The batch-invariant kernels of a GPU give a row the same bits in every batch and every chunk, and
compute what the reference computes. On a machine without a GPU they run interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.errors import InvalidRequest
from octavo.ops.kv import KV, QuantKV, compress
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import JoinedWeight
from tests.batch import make_batch, scattered_tables
from tests.conftest import DEVICE
from tests.marks import slow_after
from tests.ops.test_triton import close, random

pytest.importorskip("triton")
from triton.runtime import interpreter

from octavo.ops.triton import invariant_attention, invariant_product
from octavo.ops.triton.invariant_product import LIBRARY_ROWS, LibraryShapes
from octavo.ops.triton.invariant_triton import InvariantTritonOps
from tests.ops.test_triton_quant import FORMATS, quantized

pytestmark = pytest.mark.parity
OPS, REFERENCE = InvariantTritonOps(), ReferenceOps()
ON_GPU = DEVICE == "cuda"
HALF = torch.bfloat16 if ON_GPU else torch.float16
LENGTH = 2100 if ON_GPU else 270
BLOCK = 64 if ON_GPU else 16


def dot_in_float64(
    self: Any, first: Any, second: Any, addend: Any, precision: Any, imprecise: Any
) -> Any:
    """Compute tl.dot in float64 and round it, so that the order of its sums does not show.

    The order of the interpreter's own product, which is BLAS, depends on the place of a row in the
    tile on some CPUs. On a GPU it does not.
    """
    product = np.matmul(first.data, second.data, dtype=np.float64).astype(addend.data.dtype)
    return interpreter.TensorHandle(product + addend.data, addend.dtype.scalar)


@pytest.fixture(autouse=True)
def _order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_float64)


# ---- attention -----------------------------------------------------------------------------------


class Context:
    """One sequence in the cache, and the queries of all of its positions."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, codes: bool):
        self.table = scattered_tables([LENGTH], BLOCK)[0]
        numbers = random(len(self.table) + 1, 2, kv_heads, BLOCK, dim, seed=1)
        self.kv: KV = QuantKV(*compress(numbers, torch.int8)) if codes else numbers.to(dtype)
        self.queries = random(LENGTH, heads, dim, dtype=dtype)

    def attend(self, chunks: Sequence[tuple[int, int]], window: int) -> list[Tensor]:
        """Compute chunks (first position, end), each as an item of one step."""
        batch = make_batch(
            [([0] * (end - first), first) for first, end in chunks],
            [self.table] * len(chunks),
            BLOCK,
            DEVICE,
        )
        queries = torch.cat([self.queries[first:end] for first, end in chunks])
        output = OPS.attention(queries, self.kv, batch, 0.3, window)
        return list(output.split([end - first for first, end in chunks]))


def chunks_of(size: int, end: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, end)) for first in range(0, end, size)]


@pytest.mark.parametrize(
    "shape",
    slow_after(
        2, [(4, 2, 16, False, 0), (3, 1, 16, False, 100), (2, 1, 16, True, 0), (6, 2, 64, False, 0)]
    ),
)
def test_attention_of_a_row_has_the_same_bits_in_every_chunk_and_batch(
    shape: tuple[int, int, int, bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, dim, codes, window = shape
    if not ON_GPU:  # A short context then has several parts.
        monkeypatch.setattr(invariant_attention, "PART_KEYS", 128)
    context = Context(heads, kv_heads, dim, HALF if ON_GPU else torch.float32, codes)
    with monkeypatch.context() as patch:
        patch.setattr(invariant_attention, "MAX_PARTIALS", 0)  # one program merges all parts
        (whole,) = context.attend([(0, LENGTH)], window)
        for size in (64, 512) if ON_GPU else (100,):
            parts = torch.cat(context.attend(chunks_of(size, LENGTH), window))
            assert torch.equal(parts, whole), f"chunks of {size}"
    positions = [0, 64, 127, 128, 200, 256, LENGTH - 1]
    for position in positions:  # For a single row, each part is a program.
        (row,) = context.attend([(position, position + 1)], window)
        assert torch.equal(row[0], whole[position]), f"position {position}"
    rows = context.attend([(position, position + 1) for position in positions], window)
    assert torch.equal(torch.cat(rows), whole[positions])
    mixed = [(5, 6), (LENGTH - 7, LENGTH), (130, 131), (250, 265)]
    for (first, end), rows_of_chunk in zip(mixed, context.attend(mixed, window), strict=True):
        assert torch.equal(rows_of_chunk, whole[first:end])


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("is_split", [True, False])
def test_attention_computes_what_the_reference_computes(
    window: int, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant_attention, "PART_KEYS", 64)
    monkeypatch.setattr(invariant_attention, "MAX_PARTIALS", 4096 if is_split else 0)
    chunks = [(200, 201), (0, 1), (60, 90)]
    context = Context(3, 1, 16, torch.float32, codes=False)
    batch = make_batch(
        [([0] * (end - first), first) for first, end in chunks],
        [context.table] * len(chunks),
        BLOCK,
        DEVICE,
    )
    queries = torch.cat([context.queries[first:end] for first, end in chunks])
    assert isinstance(context.kv, Tensor)
    got = torch.cat(context.attend(chunks, window))
    close(got, REFERENCE.attention(queries, context.kv, batch, 0.3, window))


# ---- products ------------------------------------------------------------------------------------

ROWS = [1, 2, 7, 16, 17, 64, 65, 130]
if ON_GPU:
    ROWS += [100, 256, 300, 640, 777, 2048, 2100]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 100), (128, 256)])
def test_a_row_of_a_product_has_the_same_bits_for_every_number_of_rows(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight = random(outputs, inputs, seed=1, dtype=dtype)
    bias = random(outputs, seed=2, dtype=dtype)
    hidden = random(max(ROWS), inputs, seed=3, dtype=dtype)
    residual = random(max(ROWS), outputs, seed=4, dtype=dtype)
    want = OPS.linear(hidden[:1], weight, bias, residual[:1].clone())
    close(want, REFERENCE.linear(hidden[:1], weight, bias, residual[:1]))
    for rows in ROWS:
        got = OPS.linear(hidden[:rows], weight, bias, residual[:rows].clone())
        assert torch.equal(got[:1], want), rows
        last = OPS.linear(hidden[rows - 1 : rows], weight, bias, residual[rows - 1 : rows].clone())
        assert torch.equal(got[-1:], last), rows
        plain = OPS.logits(hidden[:rows], weight)
        assert torch.equal(plain[:1], OPS.logits(hidden[:1], weight)), rows


WITHOUT_KERNELS = "fp8-g128-a16-f32"
WITH_KERNELS = [name for name in FORMATS if name != WITHOUT_KERNELS]


@pytest.mark.parametrize(
    "name", slow_after(3, dict.fromkeys(["int8", "int4-g64", "int8-a8", "fp8", *WITH_KERNELS]))
)
def test_a_row_of_a_quantised_product_has_the_same_bits_for_every_number_of_rows(name: str) -> None:
    weight = OPS.pack(quantized(name, 70, 256))
    hidden = random(max(ROWS), 256, seed=3, dtype=HALF)
    want = OPS.linear(hidden[:1], weight)
    for rows in ROWS:
        assert torch.equal(OPS.linear(hidden[:rows], weight)[:1], want), rows


def test_a_format_without_kernels_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match=f"no kernel for weights of the format {WITHOUT_KERNELS}"
    ):
        OPS.pack(quantized(WITHOUT_KERNELS, 70, 256))


def test_a_joined_weight_is_computed_part_by_part() -> None:
    parts = JoinedWeight([quantized("int8", 32, 128), quantized("int4-g64", 32, 128)])
    weight = OPS.pack(parts)
    hidden = random(20, 128, seed=3, dtype=HALF)
    want = torch.cat([OPS.linear(hidden, part) for part in weight.parts], 1)
    assert torch.equal(OPS.linear(hidden, weight), want)
    assert torch.equal(OPS.linear(hidden[:1], weight), want[:1])


class AgreeingShapes(LibraryShapes):
    """Every number of rows agrees, because the kernel replaces the library."""

    def rows(self, weight: Tensor) -> tuple[int, ...]:
        return LIBRARY_ROWS[:4]


@pytest.mark.parametrize("with_addends", [False, True])
def test_blocks_of_the_library_are_padded_and_joined(
    with_addends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def library_product(hidden: Tensor, weight: Tensor, output: Tensor) -> None:
        sizes.append(len(hidden))
        output.copy_(invariant_product.kernel_product(hidden, weight))

    monkeypatch.setattr(invariant_product, "library_product", library_product)
    weight, bias = random(23, 32, seed=1), random(23, seed=2)
    hidden, residual = random(240, 32, seed=3), random(240, 23, seed=4)
    added = [bias if with_addends else None, residual if with_addends else None]
    want = invariant_product.kernel_product(
        hidden, weight, *(None if each is None else each.clone() for each in added)
    )
    shapes = AgreeingShapes()
    for rows, expected in {
        63: [],
        64: [64],
        70: [80],
        112: [112],
        140: [112, 64],
        240: [112, 112, 64],
    }.items():
        sizes.clear()
        residual_rows = None if added[1] is None else added[1][:rows].clone()
        got = invariant_product.linear(hidden[:rows], weight, added[0], residual_rows, shapes)
        assert torch.equal(got, want[:rows])
        assert sizes == expected


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 14336), (2048, 1024), (50257, 768)]
)
def test_the_library_reproduces_the_kernel_on_this_gpu(outputs: int, inputs: int) -> None:
    """If it does not, results are still the same, but products of many rows are slower."""
    weight = random(outputs, inputs, seed=1, dtype=torch.bfloat16)
    agreeing = invariant_product.agreeing_rows(weight)
    candidates = [rows for rows in LIBRARY_ROWS if rows * outputs <= 2**26]
    assert list(agreeing) == candidates
