"""Sampling with min-p, top-k and top-p: every backend chooses the tokens of a naive filter, and the
CUDA kernel is emulated."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.ops import SamplingColumns
from octavo.ops.backends import select
from octavo.ops.cuda import filtered_sampling
from octavo.ops.reference import ReferenceOps, keep_likely
from octavo.runner.batch_slots import max_distance
from tests.emulated import EmulatedKernel

OFF = 2**31 - 1
# top_k, top_p, min_p
FILTERS = [
    (50, 1.0, 0.0),
    (OFF, 0.9, 0.0),
    (OFF, 1.0, 0.05),
    (50, 0.95, 0.0),
    (20, 0.7, 0.02),
    (OFF, 0.999, 0.0),
    (OFF, 1e-9, 0.0),
    (400, 0.47, 0.0),
    (1, 1.0, 0.0),
]
THREADS = 64
LIST = 40  # The list is short, so that sampling with it and without it is tested.


def columns(
    num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> SamplingColumns:
    generator = torch.Generator().manual_seed(num_rows)

    def seeds() -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, (num_rows,), generator=generator).int()

    return SamplingColumns(
        temperature=torch.full((num_rows,), temperature),
        top_p=torch.full((num_rows,), top_p),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        max_distance=torch.full((num_rows,), max_distance(min_p), dtype=torch.int32),
        seed_low=seeds(),
        seed_high=seeds(),
    )


def random_logits(num_rows: int, vocab_size: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def naively_kept(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """Return the tokens that the filters keep, from their definition."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = [token for token in ranked if weights[token] >= min_p][:top_k]
    total = math.fsum(weights[token] for token in ranked)
    kept = set()
    reached = 0.0
    for token in ranked:
        kept.add(token)
        reached += weights[token]
        if reached >= top_p * total:
            break
    return kept


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k,top_p,min_p", FILTERS)
def test_the_reference_keeps_what_the_definition_keeps(
    top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    for scale in (0.5, 4.0):
        logits = random_logits(4, 600, scale)
        kept = keep_likely(logits, columns(4, temperature, top_k, top_p, min_p))
        for row, kept_row in zip(logits.tolist(), kept, strict=True):
            want = naively_kept(row, temperature, top_k, top_p, min_p)
            assert set(kept_row.isfinite().nonzero()[:, 0].tolist()) == want


def test_equal_logits_rank_by_token() -> None:
    logits = torch.zeros(1, 100)
    kept = keep_likely(logits, columns(1, 1.0, 7, 1.0, 0.0))
    assert kept[0].isfinite().nonzero()[:, 0].tolist() == list(range(7))
    kept = keep_likely(logits, columns(1, 1.0, OFF, 0.25, 0.0))
    assert kept[0].isfinite().nonzero()[:, 0].tolist() == list(range(25))


@pytest.mark.parametrize("vocab_size", [5, 300, 4099])
@pytest.mark.parametrize("top_k,top_p,min_p", FILTERS)
def test_the_cpu_chooses_as_the_reference(
    top_k: int, top_p: float, min_p: float, vocab_size: int
) -> None:
    rows = torch.arange(8, dtype=torch.int32)
    for scale in (0.0, 0.5, 4.0):
        logits = random_logits(8, vocab_size, scale)
        logits[:, 3] = logits[:, 1]
        for temperature in (0.05, 0.8, 3.0):
            sampling = columns(8, temperature, top_k, top_p, min_p)
            got = select("cpu").choose(logits, rows, rows, sampling)
            assert torch.equal(got, ReferenceOps().choose(logits, rows, rows, sampling))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "top_k,top_p,min_p",
    [
        (OFF, 1.0, 0.0),
        (8, 1.0, 0.0),
        (OFF, 0.8, 0.0),
        (OFF, 1.0, 0.1),
        (12, 0.7, 0.0),
        (12, 1.0, 0.05),
        (OFF, 0.8, 0.05),
        (12, 0.9, 0.03),
    ],
)
def test_frequencies_follow_the_kept_probabilities(
    top_k: int, top_p: float, min_p: float, backend: str
) -> None:
    """Chi-squared over 8,000 draws, against the definition of the filters."""
    num_draws = 8000
    temperature = 0.8
    logits = random_logits(1, 40, 1.2)
    kept = sorted(naively_kept(logits[0].tolist(), temperature, top_k, top_p, min_p))
    expected = num_draws * (logits[0, kept].double() / temperature).softmax(0)
    ops = ReferenceOps() if backend == "reference" else select("cpu")
    rows = torch.arange(num_draws, dtype=torch.int32)
    sampling = columns(num_draws, temperature, top_k, top_p, min_p)
    tokens = ops.choose(logits.expand(num_draws, -1).contiguous(), rows, rows, sampling)
    counts = torch.bincount(tokens, minlength=40).double()
    assert counts[kept].sum() == num_draws, "only kept tokens are drawn"
    chi_squared = float(((counts[kept] - expected) ** 2 / expected).sum())
    degrees = len(kept) - 1
    assert chi_squared < degrees + 4 * math.sqrt(2 * degrees) + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_emulated_kernel_chooses_as_the_reference(dtype: torch.dtype, tmp_path: Path) -> None:
    """The vocabulary is not a multiple of the vector size, rows are padded, and some logits are equal."""
    vocab_size = 601
    rows = torch.arange(3, dtype=torch.int32)
    logits = torch.zeros(3, 608).to(dtype)[:, :vocab_size]
    shared = filtered_sampling.shared_bytes(THREADS, LIST)
    constants = filtered_sampling.constants(logits, THREADS, LIST)
    kernel = EmulatedKernel(
        filtered_sampling.SOURCE, constants, "sample_filtered", shared, tmp_path
    )
    for scale in (0.0, 0.5, 4.0):
        logits[:] = random_logits(3, vocab_size, scale)
        logits[:, 3] = -torch.inf
        for top_k, top_p, min_p in FILTERS:
            sampling = columns(3, 0.8, top_k, top_p, min_p)
            tokens = logits.float().argmax(1).int()
            kernel.launch(
                blocks=3,
                threads=THREADS,
                argument=filtered_sampling.arguments(logits, rows, rows, sampling, tokens),
                device=logits.device,
            )
            assert torch.equal(tokens, ReferenceOps().choose(logits, rows, rows, sampling)), (
                f"scale {scale}, top_k {top_k}, top_p {top_p}, min_p {min_p}"
            )


def test_the_emulated_kernel_does_not_change_other_rows(tmp_path: Path) -> None:
    logits = random_logits(3, 64, 1.0)
    sampling = columns(3, 1.0, OFF, 1.0, 0.0)
    sampling.top_k[1] = 5
    sampling.temperature[1] = 0.0
    sampling.top_k[2] = 5
    tokens = torch.tensor([7, 8, -1], dtype=torch.int32)
    rows = torch.arange(3, dtype=torch.int32)
    kernel = EmulatedKernel(
        filtered_sampling.SOURCE,
        filtered_sampling.constants(logits, THREADS, LIST),
        "sample_filtered",
        filtered_sampling.shared_bytes(THREADS, LIST),
        tmp_path,
    )
    kernel.launch(
        blocks=3,
        threads=THREADS,
        argument=filtered_sampling.arguments(logits, rows, rows, sampling, tokens),
        device=logits.device,
    )
    assert tokens.tolist() == [7, 8, -1], (
        "a row without filters, one without temperature, one with NaN"
    )
