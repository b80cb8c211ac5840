"""Every Triton kernel computes what its reference op computes. On a machine without a GPU they run
interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops import SamplingColumns
from octavo.ops.backends import select
from octavo.ops.reference import ReferenceOps
from tests.conftest import DEVICE
from tests.ops.test_reference import BATCHES, draw, filled

pytest.importorskip("triton")
from octavo.ops.triton import TritonOps, attention_kernels
from octavo.ops.triton.attention_kernels import (
    OVERLAP_MIN_SEQUENCES,
    SPLIT_MAX_TOKENS,
    SPLIT_MIN_CONTEXT,
)
from octavo.runner.batch_slots import max_distance

pytestmark = pytest.mark.parity
TRITON, REFERENCE = TritonOps(), ReferenceOps()
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def close(got: Tensor, want: Tensor) -> None:
    """Compare up to the rounding of float32, or two units in the last place of bfloat16."""
    tolerance = (
        dict(atol=1e-5, rtol=1e-5) if got.dtype == torch.float32 else dict(atol=2e-2, rtol=1.6e-2)
    )
    torch.testing.assert_close(got.float(), want.float(), **tolerance)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(*shape, seed=seed).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "slack"),
    [(2, 2, 16, 0), (6, 2, 32, 3), (4, 1, 8, 19), (9, 3, 64, 0)],
)
@pytest.mark.parametrize("name", BATCHES)
def test_attention(
    name: str, heads: int, kv_heads: int, dim: int, slack: int, window: int, dtype: torch.dtype
) -> None:
    batch, kv = filled(BATCHES[name], kv_heads, dim, DEVICE, slack)
    kv = kv.to(dtype)
    q = random(len(batch.ids), heads, dim, dtype=dtype)
    close(
        TRITON.attention(q, kv, batch, 0.3, window), REFERENCE.attention(q, kv, batch, 0.3, window)
    )


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("block", [8, 64])
def test_attention_in_long_sequences(block: int, window: int) -> None:
    """Several tiles and splits, the last chunk of a long prompt, and decoding rows beside it."""
    batch, kv = filled([(1, 299), (1, 0), (1, 128), (70, 130), (40, 0)], 1, 16, DEVICE, block=block)
    q = random(len(batch.ids), 2, 16)
    close(
        TRITON.attention(q, kv, batch, 0.3, window), REFERENCE.attention(q, kv, batch, 0.3, window)
    )


@pytest.mark.parametrize("window", [0, 300])
def test_only_long_sequences_of_many_are_split(window: int) -> None:
    """The number of splits follows from the length of a sequence. Most sequences have one."""
    lengths = [700, 3, 255, 511, 512, 1, 600, *range(1, 26)]
    batch, kv = filled([(1, length - 1) for length in lengths], 4, 16, DEVICE, block=64)
    q = random(len(batch.ids), 4, 16)
    close(
        TRITON.attention(q, kv, batch, 0.3, window), REFERENCE.attention(q, kv, batch, 0.3, window)
    )


@pytest.mark.parametrize("window", [0, 20])
def test_many_rows_decode_beside_prompts(window: int) -> None:
    batch, kv = filled(
        [(1, 3 * i % 50) for i in range(OVERLAP_MIN_SEQUENCES + 3)] + [(70, 30), (9, 0)],
        1,
        16,
        DEVICE,
        block=16,
    )
    q = random(len(batch.ids), 2, 16)
    close(
        TRITON.attention(q, kv, batch, 0.3, window), REFERENCE.attention(q, kv, batch, 0.3, window)
    )


@pytest.mark.gpu
def test_decode_that_starts_early_sees_the_keys_of_the_kernel_before_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode beside prefill reads keys that the kernel before both writes. The bits are those of
    kernels that run one after the other."""
    spans = [(1, 211 * i % 1500) for i in range(100)] + [(130, 700), (60, 0)]
    batch, kv = filled(spans, 8, 128, DEVICE, block=64)
    kv, cos_sin = kv.to(torch.bfloat16), random(2048, 2, 64)
    qkv = random(12, len(batch.ids), 48 * 128, dtype=torch.bfloat16)

    def layers() -> list[Tensor]:
        layer_kv = kv.clone()
        return [
            TRITON.attention(
                TRITON.rope_and_cache(each, layer_kv, batch, cos_sin), layer_kv, batch, 0.1
            )
            for each in qkv.clone()
        ]

    plain = attention_kernels._prefill
    monkeypatch.setattr(
        attention_kernels, "_prefill", lambda *arguments: plain(*arguments) and False
    )
    want = layers()
    monkeypatch.undo()
    graph = torch.cuda.CUDAGraph()
    assert all(map(torch.equal, layers(), want))
    with torch.cuda.graph(graph):
        got = layers()
    for _ in range(20):
        for each in got:
            each.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(
    "spans", [[(20, 1030)], [(20, 1780)], [(1, 1100), (1, 3), (20, 700), (3, 0), (12, 64)]]
)
def test_attention_of_a_few_tokens_to_a_long_context_is_split(
    spans: list[tuple[int, int]], window: int
) -> None:
    """Splits in which a row, or a whole sequence, sees no key do not change the result."""
    batch, kv = filled(spans, 1, 16, DEVICE, block=64)
    assert batch.block_table.shape[1] * 64 >= SPLIT_MIN_CONTEXT
    q = random(len(batch.ids), 2, 16)
    assert len(q) <= SPLIT_MAX_TOKENS
    close(
        TRITON.attention(q, kv, batch, 0.3, window), REFERENCE.attention(q, kv, batch, 0.3, window)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [16, 100, 576])
def test_norms(hidden: int, dtype: torch.dtype) -> None:
    x, add, weight = (random(7, hidden, seed=i, dtype=dtype) for i in range(3))
    weight = weight[0].float()
    close(TRITON.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    close(TRITON.rms_norm(x, weight, 1e-5, add), REFERENCE.rms_norm(x, weight, 1e-5, add))
    bias, hidden_copies = weight.flip(0), (x.clone(), x.clone())
    close(TRITON.layer_norm(x, weight, bias, 1e-5), REFERENCE.layer_norm(x, weight, bias, 1e-5))
    close(
        TRITON.layer_norm(hidden_copies[0], weight, bias, 1e-5, add),
        REFERENCE.layer_norm(hidden_copies[1], weight, bias, 1e-5, add),
    )
    assert torch.equal(*hidden_copies) and not torch.equal(hidden_copies[0], x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inter", [8, 100, 1500])
def test_gated_activations(inter: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * inter, dtype=dtype) * 3
    close(TRITON.silu_mul(gate_up), REFERENCE.silu_mul(gate_up))
    close(TRITON.gelu_mul(gate_up), REFERENCE.gelu_mul(gate_up))
    close(TRITON.gelu(gate_up), REFERENCE.gelu(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 24), (2, 1, 8)])
def test_rope_and_cache(
    heads: int, kv_heads: int, dim: int, rope: bool, norm: bool, dtype: torch.dtype
) -> None:
    batch, _ = filled(BATCHES["mixed"], kv_heads, dim, DEVICE)
    blocks = int(batch.block_table.max()) + 1
    qkv = random(len(batch.ids), (heads + 2 * kv_heads) * dim, dtype=dtype)
    angle = random(64, dim // 2, seed=1)
    cos_sin = torch.stack([angle.cos(), angle.sin()], 1) if rope else None
    norms = (random(dim, seed=2), random(dim, seed=3)) if norm else (None, None)
    caches = [
        torch.full((blocks, 3, 2, kv_heads, 8, dim), 7.0, dtype=dtype, device=DEVICE)
        for _ in range(2)
    ]
    got = TRITON.rope_and_cache(qkv, caches[0][:, 1], batch, cos_sin, *norms)
    want = REFERENCE.rope_and_cache(qkv, caches[1][:, 1], batch, cos_sin, *norms)
    close(got, want)
    close(caches[0], caches[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, 48), (100, 33), (1024, 16), (576, 70), (2048, 6)]
)
def test_linear(inputs: int, outputs: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    """Products with and without a residual."""
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, seed=1, dtype=dtype) / 8
    b = random(outputs, seed=2, dtype=dtype) if bias else None
    add = random(rows, outputs, seed=3, dtype=dtype)
    want = x.double() @ weight.double().T + (0 if b is None else b.double())
    for got, exact in (
        (TRITON.linear(x, weight, b), want),
        (TRITON.linear(x, weight, b, add.clone()), want + add.double()),
    ):
        assert float((got.double() - exact).norm() / exact.norm()) < (
            1e-6 if dtype == torch.float32 else 4e-3
        )


def unfiltered(
    temperature: torch.Tensor, seed_low: torch.Tensor, seed_high: torch.Tensor
) -> SamplingColumns:
    """Return sampling parameters with a temperature only."""
    off = torch.full_like(seed_low.contiguous(), 2**31 - 1)
    return SamplingColumns(
        temperature=temperature.contiguous(),
        top_p=torch.ones_like(temperature.contiguous()),
        top_k=off,
        max_distance=off.clone(),
        seed_low=seed_low.contiguous(),
        seed_high=seed_high.contiguous(),
    )


@pytest.mark.parametrize("vocab", [50, 1024, 9001])
def test_choose(vocab: int) -> None:
    """Tokens are those of the reference, for slots in any order, several temperatures, seeds of 64
    bits and equal logits."""
    logits = random(12, vocab) * 4
    logits[3, [5, 9]] = 100.0
    rows = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:12].to(
        DEVICE, torch.int32
    )
    floats = torch.tensor([[0.0, 9.0], [0.7, 9.0], [1.0, 9.0], [2.5, 9.0]] * 5, device=DEVICE)
    floats[rows[3]] = 0.0
    ints = torch.randint(
        -(2**31), 2**31 - 1, (20, 3), generator=torch.Generator().manual_seed(2)
    ).to(DEVICE, torch.int32)
    position = torch.arange(1, 13, dtype=torch.int32, device=DEVICE)
    sampling = unfiltered(floats[:, 0], ints[:, 1], ints[:, 2])
    arguments = (logits, rows, position, sampling)
    got, want = TRITON.choose(*arguments), REFERENCE.choose(*arguments)
    assert got.tolist() == want.tolist() and got[3] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [97, 9001])
def test_choose_with_filters(vocab: int, dtype: torch.dtype) -> None:
    """Rows with filters and rows without them give the tokens of the reference."""
    logits = (random(12, vocab) * 3).to(dtype)
    rows = torch.arange(12, dtype=torch.int32, device=DEVICE)
    sampling = unfiltered(torch.full((12,), 0.8, device=DEVICE), rows, rows)
    sampling.top_k[:6] = torch.tensor([1, 5, 50, 50, 2000, 80], device=DEVICE)
    sampling.top_p[3:9] = torch.tensor([0.9, 0.5, 0.99, 0.9, 0.2, 0.9999], device=DEVICE)
    sampling.max_distance[8:10] = max_distance(0.05)
    sampling.temperature[11] = 0.0
    got = TRITON.choose(logits, rows, rows, sampling)
    assert got.tolist() == REFERENCE.choose(logits, rows, rows, sampling).tolist()
    alone = [
        TRITON.choose(logits[i : i + 1], rows[i : i + 1], rows[i : i + 1], sampling).item()
        for i in range(12)
    ]
    assert alone == got.tolist()


def test_choose_never_forbids_a_token() -> None:
    """At this seed and position, the hash of token 5 is one of the 128 largest possible hashes."""
    logits = torch.full((1, 97), -torch.inf, device=DEVICE)
    logits[0, 5] = 0.0
    low, high, position = (
        torch.tensor([x], dtype=torch.int32, device=DEVICE) for x in (54729777, 0, 3)
    )
    rows, temperature = (
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        torch.ones(1, device=DEVICE),
    )
    for ops in (TRITON, REFERENCE):
        sampling = unfiltered(temperature, low, high)
        assert ops.choose(logits, rows, position, sampling).tolist() == [5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [97, 5000])
def test_choose_returns_minus_one_for_rows_that_are_not_finite(
    vocab: int, temperature: float
) -> None:
    logits = random(5, vocab)
    logits[0], logits[1], logits[2, 7], logits[3, 90] = -torch.inf, torch.nan, torch.inf, torch.nan
    rows = torch.arange(5, dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    for ops in (TRITON, REFERENCE, select("cpu")) if DEVICE == "cpu" else (TRITON, REFERENCE):
        sampling = unfiltered(torch.full((5,), temperature, device=DEVICE), zeros, zeros)
        got = ops.choose(logits, rows, zeros, sampling).tolist()
        assert got[:4] == [-1] * 4 and 0 <= got[4] < vocab


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [96, 97, 131])
@pytest.mark.parametrize("rows", [1, 5])
def test_logits_of_any_vocabulary(rows: int, vocab: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, 32, dtype=dtype), random(vocab, 32, seed=1, dtype=dtype)
    logits = TRITON.logits(x, weight)
    close(logits, REFERENCE.logits(x, weight))
    assert logits.shape == (rows, vocab) and (rows == 1 or logits.stride(0) % 8 == 0)
