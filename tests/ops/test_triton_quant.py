"""Products with packed weights equal products with the dequantised weights, for every format, shape
and number of rows.

Without a GPU the kernels run interpreted, in float16: the interpreter does not round to bfloat16 as
a GPU does."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from octavo.model import quant
from octavo.model.dequant import CODED
from octavo.ops.fp8_linear import round_activations
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import JoinedWeight, QuantWeight, WeightFormat, rounds_activations
from tests.conftest import DEVICE
from tests.marks import slow_after
from tests.ops.test_reference import draw

pytest.importorskip("triton")
from octavo.ops.triton import TritonOps
from octavo.ops.triton import quant as quant_ops
from octavo.ops.triton.quant import wide_gemm
from octavo.ops.triton.quant.activation_gemm import Rounded, round_rows
from octavo.ops.triton.quant.dequantize import Dense
from octavo.ops.triton.quant.hopper_gemm import TILES, Hopper, fastest_hopper_tiling
from octavo.ops.triton.quant.quant_gemm import Gemm, plan_splits
from octavo.ops.triton.quant.quant_gemv import Gemv

pytestmark = pytest.mark.parity
TRITON, REFERENCE = TritonOps(), ReferenceOps()
# The formats of fp8 checkpoints.
FP8_FORMATS = {
    str(weight_format): weight_format
    for weight_format in (
        WeightFormat(8, group, False, True, rounds, True, static)
        for group, rounds, static in (
            (0, True, False),
            (0, True, True),
            (128, True, False),
            (128, False, False),
        )
    )
}
# The formats of fp8 checkpoints and of GGUF files.
STORED_FORMATS = {
    str(weight_format): weight_format for weight_format in CODED.values()
} | FP8_FORMATS
FORMATS = [*quant.FORMATS, *sorted(set(STORED_FORMATS) - set(quant.FORMATS))]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# The largest relative error of a product whose result has 16 bits.
ROUNDING = 6e-3 if DEVICE == "cuda" else 1e-3
# (outputs, inputs): rows
ROWS = {(70, 100): (1, 3, 17, 64), (33, 576): (1, 2, 16, 33), (144, 257): (1, 5, 130)}
if DEVICE == "cuda":
    ROWS[512, 1024] = (1, 16, 17, 64, 130, 300, 1030)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(*shape, seed=seed).to(DEVICE, dtype)


def quantized(name: str, outputs: int, inputs: int) -> QuantWeight:
    weight_format = (STORED_FORMATS | quant.FORMATS)[name]
    with torch.device(DEVICE):
        weight = QuantWeight.empty(weight_format, outputs, inputs)
    if name in quant.FORMATS:
        quant.fill(weight, random(outputs, inputs, seed=1))
    elif weight_format.is_float:
        rows = random(outputs, inputs, seed=1)
        source = QuantWeight.empty(
            weight_format._replace(static_activations=False), outputs, inputs
        )
        quant.fill(source.to(DEVICE), rows)
        weight.codes.copy_(source.codes)
        weight.scale.copy_(source.scale)
        if weight.input_scale is not None:
            weight.input_scale.copy_(torch.linspace(0.002, 0.006, outputs)[:, None])
    else:  # These formats only come from files. With 8 bits and minima they use at most 32 codes.
        max_code = 32 if weight_format.asymmetric and weight_format.bits == 8 else 256
        generator = torch.Generator(DEVICE).manual_seed(1)
        weight.codes.random_(0, max_code, generator=generator)
        weight.scale.normal_(0, 2 / max_code, generator=generator)
        if weight.least is not None:
            weight.least.copy_(
                -max_code
                / 32
                * weight.scale.float()
                * torch.rand(weight.scale.shape, generator=generator, device=DEVICE)
            )
    return weight


def error(got: Tensor, x: Tensor, weight: QuantWeight, bias: Tensor | None = None) -> float:
    """Return the relative error, compared with the product of x and the dequantised weight in float64."""
    want = x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    return float((got.double() - want).norm() / want.norm())


def exactness(weight: QuantWeight) -> float:
    """Return the largest error of a float32 product. Tensor cores add products of e4m3 numbers with
    about 14 bits."""
    return 5e-4 if DEVICE == "cuda" and rounds_activations(weight.format) else 2e-6


def rounded(x: Tensor, weight: QuantWeight) -> Tensor:
    """Round x as a product does whose activations have 8 bits."""
    if rounds_activations(weight.format):
        static_scale = None if weight.input_scale is None else weight.input_scale.amax()
        group_size = weight.format.group_size or x.shape[1]
        codes, scale = round_activations(x, group_size, static_scale)
        return codes.float() * scale.repeat_interleave(group_size, 1)[:, : x.shape[1]]
    if not weight.format.quantizes_activations or len(x) <= quant_ops.EXACT_ROWS:
        return x
    unit = x.float().abs().amax(1, keepdim=True) / 127
    return (x.float() / unit + 0.5).floor() * unit


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("name", slow_after(4, FORMATS))
def test_linear(name: str, shape: tuple[int, int]) -> None:
    weight = quantized(name, *shape)
    packed_weight, bias = TRITON.pack(weight), random(shape[0], seed=2, dtype=HALF)
    for rows in ROWS[shape]:
        x = random(rows, shape[1], dtype=HALF)
        b = bias if rows % 2 else None
        assert (
            error(TRITON.linear(x, packed_weight, b), rounded(x, weight), weight, b) < ROUNDING
        ), rows


@pytest.mark.parametrize("name", FORMATS)
def test_linear_in_float32(name: str) -> None:
    weight = quantized(name, 70, 300)
    packed_weight = TRITON.pack(weight)
    for rows in (1, 5, 20):
        x = random(rows, 300)
        assert error(TRITON.linear(x, packed_weight), rounded(x, weight), weight) < exactness(
            weight
        ), rows


@pytest.mark.parametrize("name", ["fp8", "fp8-f32", "fp8-static-f32", "fp8-g128-f32"])
@pytest.mark.parametrize("inputs", [100, 300])
def test_activations_are_rounded_as_the_reference_rounds_them(inputs: int, name: str) -> None:
    """Codes and scales are equal. A row with a NaN gives NaN, and a row of zeros gives zeros."""
    weight = quantized(name, 70, inputs)
    packed_weight = TRITON.pack(weight)
    x = (
        random(7, inputs, dtype=HALF)
        * torch.tensor([1, 1e-3, 30, 1, 0, 1, 1], device=DEVICE)[:, None]
    )
    x = x.to(HALF)
    x[5, 3] = float("nan")
    static_scale = None if weight.input_scale is None else weight.input_scale.amax()
    codes, scale = round_activations(x, weight.format.group_size or inputs, static_scale)
    words, got_scale = round_rows(x, packed_weight)
    finite = [0, 1, 2, 3, 4, 6]
    assert torch.equal(got_scale[finite], scale[finite])
    pairs = words.view(torch.uint8).view(7, -1, 32, 2).transpose(2, 3).flatten(1)[:, :inputs]
    got = pairs[finite].view(torch.float8_e4m3fn).float()
    assert torch.equal(got, codes[finite].float())
    output = TRITON.linear(x, packed_weight)
    assert output[5].isnan().all() and output[finite].isfinite().all() and not output[4].any()
    for row in finite:  # each row has its own magnitude
        want = REFERENCE.linear(x[row : row + 1], weight)[0].float()
        difference = (output[row].float() - want).norm()
        assert difference <= ROUNDING * want.norm(), row


@pytest.mark.parametrize("name", ["fp8", "fp8-g128-f32"])
def test_splits_of_a_tile_of_rounded_activations_are_joined(name: str) -> None:
    weight, tiling = quantized(name, 70, 1500), Rounded(Gemm(16, 64, 2, 2, 8))
    packed_weight, x = TRITON.pack(weight), random(20, 1500, dtype=HALF)
    bias, add = random(70, seed=2, dtype=HALF), random(20, 70, seed=3, dtype=HALF)
    assert plan_splits(20, packed_weight, tiling.tile)[1] > 1
    got = quant_ops.linear(x, packed_weight, bias, add.clone(), tiling).float()
    want = REFERENCE.linear(x, weight, bias, add).float()
    assert (got - want).norm() <= ROUNDING * want.norm()
    assert not packed_weight.locks.any()


def test_large_products_have_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete wave of large tiles would leave multiprocessors idle."""
    monkeypatch.setattr(wide_gemm, "MULTIPROCESSORS", 132)
    products = {(8192, 28672): (128, 128), (256, 4096): (64, 128), (65, 2048): (64, 64)}
    for (rows, outputs), expected in products.items():
        tile = wide_gemm.fastest_tile(rows, outputs, 4096, wide_gemm.TILES)
        assert (tile.rows, tile.outputs) == expected


@pytest.mark.parametrize("name", ["int8-a8", "fp8", "fp8-static-f32", "fp8-g128-f32"])
@pytest.mark.parametrize("with_addends", [False, True])
def test_products_of_many_rows_with_tma(name: str, with_addends: bool) -> None:
    weight = quantized(name, 72, 300)
    packed_weight = TRITON.pack(weight)
    for rows in (70, 300) if DEVICE == "cuda" else (70,):
        x = random(rows, 300, dtype=HALF)
        bias = random(72, seed=2, dtype=HALF) if with_addends else None
        residual = random(rows, 72, seed=3, dtype=HALF) if with_addends else None
        got = quant_ops.linear(
            x, packed_weight, bias, None if residual is None else residual.clone(), Rounded(None)
        )
        want = rounded(x, weight).double() @ weight.dequantize().double().T
        if bias is not None and residual is not None:
            want += bias.double() + residual.double()
        assert float((got.double() - want).norm() / want.norm()) < ROUNDING, rows


@pytest.mark.parametrize("name", FORMATS)
def test_embedding(name: str) -> None:
    """Exactly the rows of the weight, whatever their order."""
    weight = quantized(name, 70, 100)
    ids = torch.tensor([3, 69, 0, 3, 17], device=DEVICE)
    packed_weight = TRITON.pack(weight)
    assert torch.equal(TRITON.embedding(ids, packed_weight), weight.dequantize()[ids])
    assert torch.equal(
        TRITON.embedding(ids, packed_weight, 1.7), REFERENCE.embedding(ids, weight, 1.7)
    )


@pytest.mark.parametrize("rows", [1, 5])
def test_a_joined_weight_of_several_formats_is_one_product(rows: int) -> None:
    """A bias and a residual are added."""
    parts = [
        quantized(name, outputs, 96)
        for name, outputs in (("int4-g32-asym-f32", 40), ("int8-g16-f32", 24))
    ]
    joined, x, bias, add = (
        JoinedWeight(parts),
        random(rows, 96),
        random(64, seed=2),
        random(rows, 64, seed=3),
    )
    want = REFERENCE.linear(x, joined, bias, add)
    torch.testing.assert_close(
        TRITON.linear(x, TRITON.pack(joined), bias, add.clone()), want, atol=1e-4, rtol=1e-5
    )


# Tilings that the tables may contain.
TILINGS = [
    Gemv(2, 1),
    Gemv(8, 2),
    Gemm(16, 64, 1, 2, 1),
    Gemm(16, 64, 2, 3, 8, scale_sums=True),
    Gemm(32, 128, 4, 2, 16),
    Dense(),
    Dense(chunk=10_000),
]


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(
    "name",
    slow_after(
        4,
        [
            "int8",
            "fp8-a16",
            "int4-g64",
            "int8-g16-asym-f32",
            "int8-g32",
            "int4-g128",
            "int4-g32-asym",
            "int4-g32-asym-f32",
            "int8-g16-f32",
        ],
    ),
)
def test_every_tiling_gives_the_same_product(name: str, tiling: quant_ops.Tiling) -> None:
    weight = quantized(name, 40, 600)
    x = random(1 if isinstance(tiling, Gemv) else 20, 600, dtype=HALF)
    packed_weight = TRITON.pack(weight)
    got = quant_ops.linear(x, packed_weight, tiling=tiling)
    assert error(got, x, weight) < (6e-3 if DEVICE == "cuda" else 1e-3)
    # A second product is equal: the locks that programs share were reset.
    assert torch.equal(got, quant_ops.linear(x, packed_weight, tiling=tiling))


def test_splits_of_a_tile_reset_their_locks() -> None:
    weight, tiling = TRITON.pack(quantized("int4-g128", 70, 1500)), Gemm(16, 64, 1, 2, 8)
    assert plan_splits(3, weight, tiling)[1] > 1
    quant_ops.linear(random(3, 1500, dtype=HALF), weight, tiling=tiling)
    assert not weight.locks.any()


@pytest.mark.parametrize("name", ["int8", "int8-a8", "fp8", "fp8-g128-f32", "int4-g128"])
@pytest.mark.parametrize("rows", [5, 40])
def test_a_row_does_not_depend_on_the_others(rows: int, name: str) -> None:
    weight = TRITON.pack(quantized(name, 70, 300))
    x, other = random(rows, 300, dtype=HALF), random(rows, 300, seed=3, dtype=HALF) * 100
    other[2] = x[2]
    assert torch.equal(TRITON.linear(x, weight)[2], TRITON.linear(other, weight)[2])


@pytest.mark.parametrize(("name", "max_share"), [("int8", 0.53), ("fp8", 0.53), ("int4-g128", 0.27), ("int4-g32", 0.285),
                                           ("int4-g32-asym-f32", 0.376), ("int8-g16-f32", 0.626)])  # fmt: skip
def test_memory(name: str, max_share: float) -> None:
    """The memory of a packed weight, as a part of its memory in 16 bits."""
    weight = TRITON.pack(quantized(name, 512, 2048))
    assert weight.words.nbytes + weight.info.nbytes <= max_share * 512 * 2048 * 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["int8", "fp8", "fp8-g128-f32", "fp8-a16", "int4-g128", "int4-g32-asym"]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(28672, 1024), (4096, 4096), (1000, 2048)])
def test_products_of_a_models_size_are_right_every_time(
    outputs: int, inputs: int, name: str
) -> None:
    """On a busy device, tensor cores may still read registers that a kernel overwrites. Small products
    do not show this bug."""
    weight = quantized(name, outputs, inputs)
    packed_weight = TRITON.pack(weight)
    for rows in (16, 32, 64, 100, 256, 384):
        x = random(rows, inputs, dtype=HALF)
        want = rounded(x, weight)
        assert max(error(quant_ops.linear(x, packed_weight), want, weight) for _ in range(3)) < 6e-3


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile"),
    [(256, 28672, 4096, (256, 128, 1)), (256, 4096, 14336, (256, 128, 4)), (128, 28672, 4096, (128, 128, 1)),
     (128, 4096, 4096, (128, 64, 4)), (2048, 4096, 4096, (256, 128, 1)), (100, 4096, 128, (128, 64, 1))],
)  # fmt: skip
def test_tiles_of_many_rows_leave_no_multiprocessor_idle(
    rows: int, outputs: int, inputs: int, tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are large if there are enough of them. A few tiles are split over the inputs, each split
    by a program."""
    monkeypatch.setattr(
        importlib.import_module("octavo.ops.triton.quant.hopper_gemm"), "MULTIPROCESSORS", 132
    )
    tiling = fastest_hopper_tiling(rows, outputs, inputs)
    assert (tiling.rows, tiling.outputs, tiling.split) == tile


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2, 8])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", ["int8", "fp8-a16", "int4-g128"])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 4096), (28672, 1024)])
def test_products_of_many_rows(
    outputs: int, inputs: int, name: str, tile: Hopper, split: int
) -> None:
    """Products with and without a bias and a residual, of whole tiles and partial ones. Splits reset
    their locks."""
    weight, tiling = quantized(name, outputs, inputs), tile._replace(split=split)
    packed_weight, bias = TRITON.pack(weight), random(outputs, seed=2, dtype=HALF)
    for rows in (65, 128, 200, 256, 300):
        x, add = random(rows, inputs, dtype=HALF), random(rows, outputs, seed=3, dtype=HALF)
        got = quant_ops.linear(x, packed_weight, tiling=tiling)
        assert error(got, x, weight) < 6e-3
        assert (
            error(quant_ops.linear(x, packed_weight, bias, tiling=tiling), x, weight, bias) < 6e-3
        )
        assert (
            error(
                quant_ops.linear(x, packed_weight, bias, add.clone(), tiling),
                x,
                weight,
                bias.float() + add.float(),
            )
            < 6e-3
        )
        assert all(
            torch.equal(got, quant_ops.linear(x, packed_weight, tiling=tiling)) for _ in range(3)
        )
        assert not packed_weight.locks.any()


@pytest.mark.gpu
def test_products_can_be_captured() -> None:
    """No product makes the host wait or depends on the data."""
    weights = [
        TRITON.pack(quantized(name, 256, 512))
        for name in ("int8", "fp8", "fp8-a16", "fp8-g128-f32", "int8-a8", "int4-g128")
    ]
    for rows in (1, 7, 100):
        x = random(rows, 512, dtype=HALF)
        want = [TRITON.linear(x, weight) for weight in weights]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = [TRITON.linear(x, weight) for weight in weights]
        for _ in range(3):
            graph.replay()
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)
