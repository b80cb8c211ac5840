"""The reference operators equal their definitions, which are computed here for one token and one head
at a time in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from octavo.config import ModelConfig
from octavo.ops import ForwardBatch
from octavo.ops.backends import select
from octavo.ops.reference import ReferenceOps
from tests.batch import empty_kv, make_batch, scattered_tables

pytestmark = pytest.mark.parity
B = 8
OPS = ReferenceOps()

# (tokens, first position) of each item. The positions before are already in the cache.
BATCHES = {
    "one prompt": [(13, 0)],
    "decoding": [(1, 30), (1, 0), (1, 7), (1, 8)],
    "chunks": [(8, 16), (8, 8), (8, 0)],
    "prompts of one length": [(9, 0), (9, 0)],
    "mixed": [(1, 20), (1, 33), (11, 0), (1, 5), (4, 12), (4, 0), (1, 0)],
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(
    items: Sequence[tuple[int, int]],
    kv_heads: int,
    dim: int,
    device: str,
    slack: int = 0,
    block: int = B,
) -> tuple[ForwardBatch, Tensor]:
    """Return a batch and one layer's kv [N, 2, Hk, B, D], a strided view, with K and V at every
    position that may be read."""
    tables = scattered_tables([start + num + slack for num, start in items], block)
    config = ModelConfig("", 1, 1, 3, kv_heads, kv_heads, dim, 1, 1)
    kv = empty_kv(config, tables, block, device)[:, 1]
    for seed, ((num, start), table) in enumerate(zip(items, tables, strict=True)):
        for p in range(start + num):
            kv[table[p // block], :, :, p % block] = draw(
                2, kv_heads, dim, seed=1000 * seed + p
            ).to(device)
    return make_batch(
        [([0] * num, start) for num, start in items], tables, block, device, slack
    ), kv


def definition(q: Tensor, kv: Tensor, batch: ForwardBatch, scale: float, window: int) -> Tensor:
    out = torch.zeros_like(q, dtype=torch.float64)
    group_size = q.shape[1] // kv.shape[2]
    for item, span in enumerate(batch.spans):
        table = batch.block_table[item].tolist()
        for t in range(span.first, span.first + span.num):
            p = int(batch.positions[t])
            seen = range(max(0, p - window + 1) if window else 0, p + 1)
            # [seen, 2, Hk, D]
            states = torch.stack([kv[table[s // B], :, :, s % B] for s in seen]).double()
            for h in range(q.shape[1]):
                k, v = states[:, 0, h // group_size], states[:, 1, h // group_size]
                out[t, h] = torch.softmax(k @ q[t, h].double() * scale, 0) @ v
    return out


@pytest.mark.parametrize("window", [0, 5, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "slack"), [(2, 2, 16, 0), (6, 2, 32, 0), (4, 1, 8, 19)]
)
@pytest.mark.parametrize("name", BATCHES)
def test_attention(
    name: str, heads: int, kv_heads: int, dim: int, slack: int, window: int, device: str
) -> None:
    """Positions after the end of a sequence hold NaN, and the lengths that the host knows are `slack`
    too large. Neither changes the result."""
    batch, kv = filled(BATCHES[name], kv_heads, dim, device, slack)
    q = draw(len(batch.ids), heads, dim).to(device)
    got = OPS.attention(q, kv, batch, 0.3, window)
    torch.testing.assert_close(
        got.double(), definition(q, kv, batch, 0.3, window), atol=1e-5, rtol=0
    )


def test_one_batch_serves_layers_with_and_without_window(device: str) -> None:
    """Values in batch.scratch for a layer with one window are not used for another window."""
    batch, kv = filled(BATCHES["mixed"], 2, 16, device)
    q = draw(len(batch.ids), 4, 16).to(device)
    for window in (0, 5, 3, 0, 5):
        got = OPS.attention(q, kv, batch, 0.25, window)
        torch.testing.assert_close(
            got.double(), definition(q, kv, batch, 0.25, window), atol=1e-5, rtol=0
        )


def test_rope_and_cache_writes_its_positions_and_no_others(device: str) -> None:
    heads, kv_heads, dim = 4, 2, 16
    batch, kv = filled(BATCHES["mixed"], kv_heads, dim, device)
    before, tokens = kv.clone(), len(batch.ids)
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim).to(device)
    original_qkv = qkv.clone()
    q_norm, k_norm = draw(dim, seed=1).to(device), draw(dim, seed=2).to(device)
    angles = torch.rand(40, dim // 2, generator=torch.Generator().manual_seed(3)).to(device)
    got = OPS.rope_and_cache(
        qkv, kv, batch, torch.stack((angles.cos(), angles.sin()), 1), q_norm, k_norm, 1e-5
    )

    def expected(x: Tensor, norm: Tensor, t: int) -> Tensor:
        x = x.double() / (x.double().square().mean() + 1e-5).sqrt() * norm.double()
        z = torch.complex(x[: dim // 2], x[dim // 2 :]) * torch.exp(
            1j * angles[batch.positions[t]].double()
        )
        return torch.cat((z.real, z.imag)).float()

    parts = qkv.view(tokens, -1, dim)
    for t in range(tokens):
        block, offset = divmod(int(batch.kv_indices[t]), B)
        for h in range(heads):
            torch.testing.assert_close(got[t, h], expected(parts[t, h], q_norm, t))
        for h in range(kv_heads):
            torch.testing.assert_close(
                kv[block, 0, h, offset], expected(parts[t, heads + h], k_norm, t)
            )
            torch.testing.assert_close(kv[block, 1, h, offset], parts[t, heads + kv_heads + h])
        before[block, :, :, offset] = kv[block, :, :, offset]
    torch.testing.assert_close(kv, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(qkv, original_qkv), "the input is not scratch space"


def test_rope_and_cache_without_rotation_or_norms(device: str) -> None:
    batch, kv = filled([(5, 0)], 2, 16, device)
    qkv = draw(5, 6 * 16).to(device)
    q = OPS.rope_and_cache(qkv, kv, batch, None)
    assert torch.equal(q, qkv.view(5, 6, 16)[:, :2])
    block = int(batch.block_table[0, 0])
    assert torch.equal(kv[block, 0, :, :5].transpose(0, 1), qkv.view(5, 6, 16)[:, 2:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_compute_in_float32(dtype: torch.dtype, device: str) -> None:
    """There is one rounding, at the end, so the last bit of a bfloat16 is right except for ties."""
    x, residual = (draw(40, 64, seed=s).mul(300).to(device, dtype) for s in (0, 1))
    w, b = draw(64, seed=2).to(device), draw(64, seed=3).to(device)

    def assert_rounded(got: Tensor, exact: Tensor) -> None:
        if dtype == torch.bfloat16:
            assert (got != exact.to(dtype)).float().mean() < 0.01
        torch.testing.assert_close(got, exact.to(dtype), atol=1e-5, rtol=torch.finfo(dtype).eps)

    def rms(y: Tensor) -> Tensor:
        return y.double() * (y.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w

    assert_rounded(OPS.rms_norm(x, w, 1e-5), rms(x))
    assert torch.equal(OPS.rms_norm(x, w, 1e-5, residual), OPS.rms_norm(x, w, 1e-5) + residual)
    y = x.double()
    y = (y - y.mean(-1, keepdim=True)) * (
        y.var(-1, unbiased=False, keepdim=True) + 1e-5
    ).rsqrt() * w + b
    assert_rounded(OPS.layer_norm(x, w, b, 1e-5), y)


def test_activations(device: str) -> None:
    x = draw(3, 10).to(device)
    gate, up = x.double().chunk(2, -1)

    def gelu(z: Tensor) -> Tensor:
        return 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))

    torch.testing.assert_close(OPS.silu_mul(x), (gate / (1 + torch.exp(-gate)) * up).float())
    torch.testing.assert_close(OPS.gelu_mul(x), (gelu(gate) * up).float())
    torch.testing.assert_close(OPS.gelu(x), gelu(x.double()).float())


def test_embedding_scale_is_rounded_to_the_weights_dtype(device: str) -> None:
    weight, scale = draw(7, 8).to(device, torch.bfloat16), 1152**0.5
    ids = torch.tensor([3, 0, 3], device=device)
    rounded = torch.tensor(scale, dtype=torch.bfloat16, device=device)
    assert torch.equal(OPS.embedding(ids, weight, scale), weight[ids] * rounded)
    assert torch.equal(OPS.embedding(ids, weight), weight[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 33])
def test_packed_weights_give_the_same_product(rows: int, dtype: torch.dtype, device: str) -> None:
    ops = select(device)
    x, weight, bias = (
        draw(rows, 48).to(device, dtype),
        draw(40, 48, seed=1).to(device, dtype),
        draw(40, seed=2).to(device, dtype),
    )
    packed = ops.pack(weight)
    for b in (bias, None):
        expected = x.double() @ weight.double().t() + (0 if b is None else b.double())
        got = ops.linear(x, packed, b)
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.double(),
            expected,
            rtol=2 * torch.finfo(dtype).eps,
            atol=40 * torch.finfo(dtype).eps,
        )


@pytest.mark.gpu
def test_no_op_makes_the_host_wait(device: str) -> None:
    batch, kv = filled(BATCHES["mixed"], 2, 16, device)
    qkv, cos_sin = draw(len(batch.ids), 8 * 16).to(device), draw(40, 2, 8).to(device)
    weight = draw(7, 8).to(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        q = OPS.rope_and_cache(qkv, kv, batch, cos_sin)
        for window in (0, 5):
            OPS.attention(q, kv, batch, 0.3, window)
        OPS.embedding(batch.ids, weight, 3.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
