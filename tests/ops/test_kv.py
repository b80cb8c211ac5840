"""Compressed KV: the accuracy of codes, and that every backend writes and reads them as the reference
does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.config import CacheConfig, ModelConfig
from octavo.ops import ForwardBatch
from octavo.ops.cpu import CpuOps, paged_attention
from octavo.ops.cpu.cpu_features import instruction_set
from octavo.ops.cpu.thread_pool import kernels, thread_pool
from octavo.ops.kv import LARGEST, QuantKV, compress, expand
from octavo.ops.reference import ReferenceOps
from octavo.runner.kvstore import KVStore
from tests.conftest import DEVICE
from tests.marks import slow_after
from tests.ops.test_reference import BATCHES, definition, draw, filled

pytestmark = pytest.mark.parity
REFERENCE = ReferenceOps()
CODES = pytest.mark.parametrize("codes", list(LARGEST), ids=["int8", "fp8"])
needs_kernels = pytest.mark.skipif(
    isinstance(instruction_set(), str), reason=str(instruction_set())
)
ODD_NUMBERS = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 1e-31, 1e-29, 3e37, -7.0]
)  # numbers of special vectors


def compressed(kv: Tensor, codes: torch.dtype) -> QuantKV:
    """Compress a layer's kv [N, 2, Hk, B, D] with the strides of a store. Vectors with NaN become
    NaN."""
    blocks, _, heads, size, dim = kv.shape
    model = ModelConfig("", 1, 1, 3, heads, heads, dim, 1, 1)
    store = KVStore(model, CacheConfig(size, blocks - 1), codes, kv.device)
    store.tensor.fill_(255)
    layer = store.view[:, 1]
    assert isinstance(layer, QuantKV)
    layer_codes, scales = compress(kv, codes)
    layer.codes.view(torch.int8).copy_(layer_codes.view(torch.int8))
    layer.scales.copy_(scales)
    return layer


def problem(
    items: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    codes: torch.dtype,
    slack: int = 0,
    **options: Any,
) -> tuple[Tensor, QuantKV, ForwardBatch]:
    batch, kv = filled(items, kv_heads, dim, DEVICE, slack, **options)
    return draw(len(batch.ids), heads, dim).to(DEVICE), compressed(kv, codes), batch


# ---- codes ---------------------------------------------------------------------------------------


@CODES
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_expanded_codes_are_near_the_numbers(codes: torch.dtype, size: float) -> None:
    """The error of int8 is at most half a step; a step is 1/127 of the largest number. That of fp8 is
    at most a sixteenth of the number, or one smallest step."""
    x = draw(1000, 64).to(DEVICE) * size
    got = expand(QuantKV(*compress(x, codes)))
    peak = x.abs().amax(1, keepdim=True)
    bound = (
        peak * 0.501 / 127
        if codes == torch.int8
        else torch.maximum(x.abs() / 15.9, peak * 2.0**-9 / 448)
    )
    assert bool(((got - x).abs() <= bound).all())
    torch.testing.assert_close(got.abs().amax(1, keepdim=True), peak, rtol=1e-6, atol=0)


@CODES
def test_the_codes_of_a_vector_do_not_depend_on_other_vectors(codes: torch.dtype) -> None:
    x = draw(7, 3, 32).to(DEVICE)
    for part in (x, x.bfloat16()):
        whole, scales = compress(part, codes)
        for i in range(7):
            one, scale = compress(part[i], codes)
            assert torch.equal(one.view(torch.int8), whole[i].view(torch.int8)) and torch.equal(
                scale, scales[i]
            )


@CODES
def test_odd_vectors(codes: torch.dtype) -> None:
    """Zeros and very small numbers become zeros, and the largest numbers are kept. A vector that is not
    finite becomes NaN, and no other vector does."""
    x = torch.zeros(7, 16, device=DEVICE)
    x[1], x[2, 3], x[3, 5] = 1e-31, 3.4e38, -1e-29
    x[4, 0], x[5, 1], x[6, 2] = torch.inf, -torch.inf, torch.nan
    got = expand(QuantKV(*compress(x, codes)))
    assert not got[:2].any()
    torch.testing.assert_close(got[2:4], x[2:4], rtol=1e-6, atol=0)
    assert bool(got[4:].isnan().all())


# ---- the store -----------------------------------------------------------------------------------


@CODES
@pytest.mark.parametrize(
    ("heads", "dim", "block"), [(3, 64, 16), (8, 128, 64), (1, 80, 64), (5, 4, 1)]
)
def test_a_block_is_contiguous_and_has_the_bytes_of_the_memory_plan(
    codes: torch.dtype, heads: int, dim: int, block: int
) -> None:
    model = ModelConfig("", 1, 1, 4, heads, heads, dim, 1, 1)
    store = KVStore(model, CacheConfig(block, 6), codes, torch.device(DEVICE))
    name = "int8" if codes == torch.int8 else "fp8"
    assert store.tensor.is_contiguous() and store.tensor[
        0
    ].nbytes == block * model.kv_bytes_per_token(name)
    assert isinstance(store.view, QuantKV)
    assert store.view.codes.shape == (7, 4, 2, heads, block, dim) and store.view.scales.shape == (
        7,
        4,
        2,
        heads,
        block,
    )
    assert (
        store.view.codes.untyped_storage().data_ptr() == store.tensor.untyped_storage().data_ptr()
    )
    assert not expand(store.view)[0].any(), "padding reads as zeros"
    if block % 16 == 0 and dim % 16 == 0:  # Vector loads need this alignment.
        assert (
            all(store.view.codes.stride(i) % 16 == 0 for i in range(5))
            and store.view.codes.data_ptr() % 16 == 0
        )
    store.tensor.copy_(
        torch.arange(store.tensor.numel(), device=DEVICE).view(store.tensor.shape) % 251
    )
    want = store.tensor[[3, 1]].clone()
    source, target = torch.tensor([3, 1], device=DEVICE), torch.tensor([1, 5], device=DEVICE)
    store.copy(source, target)
    assert torch.equal(store.tensor[[1, 5]], want)
    assert torch.equal(
        store.view.scales[5].view(torch.int32), store.view.scales.view(torch.int32)[5]
    )


def test_half_the_bytes_of_bfloat16() -> None:
    for dim, share in ((64, 0.532), (128, 0.516), (256, 0.508)):
        model = ModelConfig("", 1, 1, 30, 9, 3, dim, 1, 1)
        assert model.kv_bytes_per_token("int8") <= share * model.kv_bytes_per_token("bfloat16")


# ---- the reference -------------------------------------------------------------------------------


@CODES
@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "slack"), [(2, 2, 16, 0), (6, 2, 32, 0), (4, 1, 8, 19)]
)
@pytest.mark.parametrize("name", BATCHES)
def test_reference_attention(
    name: str, heads: int, kv_heads: int, dim: int, slack: int, window: int, codes: torch.dtype
) -> None:
    q, kv, batch = problem(BATCHES[name], heads, kv_heads, dim, codes, slack)
    want = definition(q, expand(kv), batch, 0.3, window)
    torch.testing.assert_close(
        REFERENCE.attention(q, kv, batch, 0.3, window).double(), want, atol=1e-5, rtol=0
    )


@CODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_writes_its_positions_and_no_others(
    codes: torch.dtype, dtype: torch.dtype
) -> None:
    _, kv, batch = problem(BATCHES["mixed"], 4, 2, 16, codes)
    plain = expand(kv).nan_to_num(7.0)
    qkv = draw(len(batch.ids), 8 * 16).to(DEVICE, dtype)
    angles = draw(40, 8).to(DEVICE)
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    got = REFERENCE.rope_and_cache(qkv, kv, batch, cos_sin)
    want = REFERENCE.rope_and_cache(qkv, plain, batch, cos_sin)
    assert torch.equal(got, want)
    block, offset = batch.kv_indices // 8, batch.kv_indices % 8
    written = QuantKV(*compress(plain[block, :, :, offset].to(dtype), codes))
    assert torch.equal(expand(kv)[block, :, :, offset], expand(written))
    plain[block, :, :, offset] = expand(written)
    torch.testing.assert_close(expand(kv).nan_to_num(7.0), plain)


# ---- CPU kernels ---------------------------------------------------------------------------------


@needs_kernels
@CODES
@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "slack"),
    [(2, 2, 16, 0), (6, 2, 32, 19), (9, 3, 64, 0), (2, 2, 80, 0), (4, 1, 128, 3), (2, 1, 256, 0)],
)
@pytest.mark.parametrize("name", ["decoding", "mixed", "long"])
def test_cpu_attention_reads_codes_in_place(
    name: str, heads: int, kv_heads: int, dim: int, slack: int, window: int, codes: torch.dtype
) -> None:
    if DEVICE != "cpu":
        pytest.skip("a CPU's kernels")
    pool = thread_pool()
    assert pool is not None
    items = BATCHES.get(name, [(37, 0), (1, 100), (20, 150), (70, 3)])
    q, kv, batch = problem(items, heads, kv_heads, dim, codes, slack)
    want = definition(q, expand(kv), batch, 0.3, window)
    torch.testing.assert_close(
        paged_attention(pool, q, kv, batch, 0.3, window).double(), want, atol=3e-5, rtol=0
    )
    assert torch.equal(
        CpuOps().attention(q, kv, batch, 0.3, window),
        paged_attention(pool, q, kv, batch, 0.3, window),
    )


@needs_kernels
@CODES
def test_cpu_kernels_write_the_references_codes(codes: torch.dtype) -> None:
    """The vectors include the middle between every two float8 numbers, and vectors that are not
    finite."""
    import numba

    entry_points = kernels()
    assert entry_points is not None
    step = entry_points.decoder_jit
    store, kind = (
        step.store_vector,
        int(getattr(step.attention_jit, "I8" if codes == torch.int8 else "F8")),
    )

    @numba.njit
    def store_all(source: int, target: int, scales: int, count: int, dim: int) -> None:
        for i in range(count):
            store(source + i * dim * 4, target + i * dim, scales + i * 4, kind, dim)

    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (exact[1:] + exact[:-1]) / 2
    values = torch.cat((exact, middle, middle * (1 + 1e-6), middle * (1 - 1e-6)))
    values = torch.cat((values, -values, torch.arange(-127, 127.5, 0.5)))
    dim = 32
    x = torch.nn.functional.pad(values, (0, -len(values) % (dim - 1))).view(-1, dim - 1)
    # With the largest code in each vector, the scale is 1.
    x = torch.cat((torch.full((len(x), 1), LARGEST[codes]), x), 1)
    x[:, 1:] = x[:, 1:].clamp(-LARGEST[codes], LARGEST[codes])
    x = torch.cat(
        (
            x,
            draw(50, dim) * torch.logspace(-32, 37, 50)[:, None],
            torch.zeros(1, dim),
            ODD_NUMBERS.repeat(dim // 8)[None],
        )
    )
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.cat((x, draw(1, dim)))
        x[-1, 9] = bad
    x = x.contiguous()
    got, scales = torch.empty(len(x), dim, dtype=codes), torch.empty(len(x))
    store_all(x.data_ptr(), got.data_ptr(), scales.data_ptr(), len(x), dim)
    want, want_scales = compress(x, codes)
    assert torch.equal(scales.nan_to_num(-1), want_scales.nan_to_num(-1))
    assert torch.equal(scales.isnan(), torch.tensor([i >= len(x) - 3 for i in range(len(x))]))
    # -0.0 and 0.0 are the same number
    assert torch.equal(expand(QuantKV(got, scales))[:-3], expand(QuantKV(want, want_scales))[:-3])


# ---- Triton kernels ------------------------------------------------------------------------------


@pytest.fixture
def triton_ops() -> Any:
    pytest.importorskip("triton")
    from octavo.ops.triton import TritonOps

    return TritonOps()


@CODES
@pytest.mark.parametrize("window", slow_after(1, [5, 0]))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "slack"),
    [(2, 2, 16, 0), (6, 2, 32, 3), (4, 1, 8, 19), (9, 3, 64, 0), (4, 2, 80, 0)],
)
@pytest.mark.parametrize("name", BATCHES)
def test_triton_attention(
    name: str,
    heads: int,
    kv_heads: int,
    dim: int,
    slack: int,
    window: int,
    codes: torch.dtype,
    triton_ops: Any,
) -> None:
    q, kv, batch = problem(BATCHES[name], heads, kv_heads, dim, codes, slack)
    got, want = (ops.attention(q, kv, batch, 0.3, window) for ops in (triton_ops, REFERENCE))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


DTYPES = (
    [torch.float32, torch.float16, torch.bfloat16]
    if DEVICE == "cuda"
    else [torch.float32, torch.float16]
)


@CODES
@pytest.mark.parametrize("dtype", slow_after(1, DTYPES))
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("block", "dim"), [(8, 16), (64, 64), (64, 80), (64, 128), (64, 256)])
def test_triton_attention_in_long_sequences(
    block: int, dim: int, window: int, dtype: torch.dtype, codes: torch.dtype, triton_ops: Any
) -> None:
    """Several tiles and splits; in blocks of 64 decoding rows read their codes as words."""
    if DEVICE == "cuda" and dtype == torch.float32 and dim > 128:
        pytest.skip("takes half a minute to compile, and no model needs it")
    items = [(1, 299), (1, 0), (1, 128), (70, 130), (40, 0)]
    q, kv, batch = problem(items, 2, 1, dim, codes, block=block)
    q = (q * 100).to(dtype)  # Queries of any size must keep their precision.
    got, want = (ops.attention(q, kv, batch, 0.001, window) for ops in (triton_ops, REFERENCE))
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@CODES
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
)
def test_triton_attention_over_small_and_large_numbers(
    dtype: torch.dtype, codes: torch.dtype, triton_ops: Any
) -> None:
    """Products are in float16, which must not limit the size of queries and values."""
    batch, plain = filled([(1, 200), (70, 130)], 1, 64, DEVICE, block=64)
    q = draw(len(batch.ids), 2, 64).to(DEVICE)
    for query, value in (
        ((1e-6, 1e-3), (1e3, 1e3)) if dtype == torch.float16 else ((1e-20, 1e-3), (1e20, 1e3))
    ):
        sized = plain.clone()
        sized[:, 0] /= query
        sized[:, 1] *= value
        kv = compressed(sized, codes)
        got, want = (
            ops.attention((q * query).to(dtype), kv, batch, 0.1, 0).float()
            for ops in (triton_ops, REFERENCE)
        )
        error = (got - want).norm() / want.norm()
        assert float(error) < 1e-2, (query, value)


@CODES
@pytest.mark.parametrize(("rope", "norm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 24), (2, 1, 80)])
def test_triton_writes_the_references_codes(
    heads: int, kv_heads: int, dim: int, rope: bool, norm: bool, codes: torch.dtype, triton_ops: Any
) -> None:
    _, kv, batch = problem(BATCHES["mixed"], heads, kv_heads, dim, codes)
    expected_kv = compressed(expand(kv), codes)
    qkv = draw(len(batch.ids), (heads + 2 * kv_heads) * dim).to(DEVICE)
    qkv[3], qkv[5, 0], qkv[6, -1] = 0.0, torch.inf, torch.nan
    angle = draw(64, dim // 2, seed=1).to(DEVICE)
    cos_sin = torch.stack([angle.cos(), angle.sin()], 1) if rope else None
    norms = (draw(dim, seed=2).to(DEVICE), draw(dim, seed=3).to(DEVICE)) if norm else (None, None)
    got = triton_ops.rope_and_cache(qkv, kv, batch, cos_sin, *norms)
    want = REFERENCE.rope_and_cache(qkv, expected_kv, batch, cos_sin, *norms)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(kv.scales, expected_kv.scales, rtol=1e-5, atol=0, equal_nan=True)
    is_finite = ~expected_kv.scales.isnan()
    same = (kv.codes.float() == expected_kv.codes.float())[is_finite]
    # A difference in the last bit before rounding may change a code.
    assert float(same.float().mean()) > (0.999 if rope else 0.9999)
    step = kv.scales[..., None] * (1.01 if codes == torch.int8 else 33)
    assert bool(((expand(kv) - expand(expected_kv)).abs() <= step)[is_finite].all())


def test_the_assembler_in_triton_kernels_converts_every_code(triton_ops: Any) -> None:
    """Without a GPU the kernels do not use this PTX, so it is interpreted here."""
    from octavo.ops.triton import kv_codes

    all_codes = torch.arange(256, dtype=torch.uint8)
    as_int8, as_fp8 = (
        all_codes.view(torch.int8).float().tolist(),
        all_codes.view(torch.float8_e4m3fn).float().tolist(),
    )
    for n in range(256):
        four = [n, (n * 7 + 3) % 256, 255 - n, (n + 128) % 256]
        other = [(x * 11 + 5) % 256 for x in four]
        low, high = run_ptx(kv_codes.INT8.value, 2, [word(four)])
        assert halves(low) + halves(high) == [as_int8[x] for x in four]
        for text, meaning in (
            (kv_codes.QUARTERS_INT8.value, as_int8),
            (kv_codes.QUARTERS_FP8.value, as_fp8),
        ):
            got = [halves(x) for x in run_ptx(text, 4, [word(four), word(other)])]
            want = [[meaning[a], meaning[b]] for a, b in zip(four, other, strict=True)]
            assert str(got) == str(want)  # As text, because NaN is not equal to NaN.


def word(four: list[int]) -> int:
    return sum(x << 8 * i for i, x in enumerate(four))


def halves(register: int) -> list[float]:
    return (
        torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32)
        .to(torch.int16)
        .view(torch.float16)
        .tolist()
    )


def run_ptx(text: str, outputs: int, inputs: list[int]) -> list[int]:
    """Run some lines of PTX, and return the registers $0, $1 ..."""
    state = {f"${outputs + i}": x for i, x in enumerate(inputs)}

    def bits(values: Tensor) -> int:
        a, b = (x & 0xFFFF for x in values.view(torch.int16).tolist())
        return a | b << 16

    for line in text.strip("{} \n").splitlines():
        operation, _, operands = line.strip(" ;").partition(" ")
        if operation in (".reg", ""):
            continue
        if operands.startswith("{"):  # A register is divided into its halves.
            names, source = operands.strip("{").split("}, ")
            state |= zip(
                names.split(", "), (state[source] & 0xFFFF, state[source] >> 16), strict=True
            )
            continue
        target, *sources = operands.split(", ")
        a, b, c = ([state[x] if x in state else int(x, 16) for x in sources] + [0, 0])[:3]
        if operation == "mov.b32":
            state[target] = a
        elif operation == "xor.b32":
            state[target] = a ^ b
        elif operation == "prmt.b32":
            pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
            state[target] = int.from_bytes(bytes(pool[c >> 4 * i & 7] for i in range(4)), "little")
        elif operation == "sub.f16x2":
            state[target] = bits(
                torch.tensor(halves(a), dtype=torch.float16)
                - torch.tensor(halves(b), dtype=torch.float16)
            )
        else:
            assert operation == "cvt.rn.f16x2.e4m3x2", operation
            pair = torch.tensor([a & 0xFF, a >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
            state[target] = bits(pair.to(torch.float16))
    return [state[f"${i}"] for i in range(outputs)]
