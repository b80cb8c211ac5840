"""The sampler alone: what each parameter does, that rows do not touch each other, that frequencies
are right."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from octavo.ops import SamplingColumns
from octavo.ops.reference import ReferenceOps, gumbel
from octavo.ops.reference import keep_likely as keep_likely_rows
from octavo.params import SamplingParams
from octavo.runner import sampler
from octavo.runner.batch import ForwardResult
from octavo.runner.batch_slots import BatchSlots, max_distance
from octavo.runner.transfer import Upload
from octavo.types import Plan, SlotFill
from tests.toy_guide import pack

VOCAB = 97
OPS = ReferenceOps()


def choose(
    logits: torch.Tensor,
    params: list[SamplingParams],
    tokens: list[list[int]] | None = None,
    prompt_lens: list[int] | None = None,
    seeds: list[int] | None = None,
    stop_ids: frozenset[int] = frozenset(),
    masks: dict[int, list[int]] | None = None,
) -> list[int]:
    """Sample one token per slot through the same staging that the runner uses."""
    n = len(params)
    tokens = tokens or [[1, 2, 3]] * n
    prompt_lens = prompt_lens or [len(t) for t in tokens]
    seeds = seeds or [p.seed or 0 for p in params]
    batch_slots = BatchSlots(n, 64, 16, torch.device("cpu"))
    slot_fills = [
        SlotFill(
            i, 0, i, array("i", tokens[i]), 0, [], prompt_lens[i], seeds[i], stop_ids, params[i]
        )
        for i in range(n)
    ]
    upload = Upload()
    changes = batch_slots.prepare(Plan(1, slot_fills=slot_fills), upload)
    job = sampler.SampleJob.prepare(
        slots=list(range(n)),
        max_len=max(map(len, tokens)),
        batch_slots=batch_slots,
        upload=upload,
        masks={i: pack(allowed, VOCAB) for i, allowed in (masks or {}).items()},
    )
    sent = upload.send(torch.device("cpu"))
    batch_slots.apply(changes, sent)
    forward = ForwardResult(
        slots=torch.arange(n, dtype=torch.int32),
        logits=logits.float().clone(),
        lengths=torch.tensor([len(t) for t in tokens], dtype=torch.int32),
    )
    adjusted = forward._replace(logits=sampler.adjust(forward, job, batch_slots, sent))
    return sampler.choose(adjusted, batch_slots, OPS).tolist()


def keep_likely(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Filter all rows with the same parameters."""
    ones = torch.ones(len(logits))
    columns = SamplingColumns(
        temperature=ones * temperature,
        top_p=ones * top_p,
        top_k=torch.full((len(logits),), top_k, dtype=torch.int32),
        max_distance=torch.full((len(logits),), max_distance(min_p), dtype=torch.int32),
        seed_low=ones.int(),
        seed_high=ones.int(),
    )
    return keep_likely_rows(logits, columns)


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = random_logits(8)
    assert choose(logits, [SamplingParams(temperature=0)] * 8) == logits.argmax(1).tolist()


def test_top_k_of_one_takes_the_likeliest_at_any_temperature() -> None:
    logits = random_logits(8)
    assert (
        choose(logits, [SamplingParams(temperature=5.0, top_k=1, seed=i) for i in range(8)])
        == logits.argmax(1).tolist()
    )


def test_a_row_is_the_same_alone_and_among_others() -> None:
    logits = random_logits(6)
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0),
        SamplingParams(seed=3, top_k=5),
        SamplingParams(seed=4, top_p=0.5, repetition_penalty=1.3),
        SamplingParams(seed=5, min_p=0.1, logit_bias={4: 3.0}),
        SamplingParams(
            seed=6, temperature=1.7, presence_penalty=1.0, allowed_token_ids=[3, 5, 8, 13, 21]
        ),
    ]
    together = choose(logits, params)
    alone = [choose(logits[i : i + 1], params[i : i + 1])[0] for i in range(6)]
    assert together == alone


def test_the_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    a = choose(logits, [SamplingParams(seed=7)], tokens=[[1, 2, 3]])
    assert a == choose(logits, [SamplingParams(seed=7)], tokens=[[9, 8, 7]], prompt_lens=[1])
    seeds = {choose(logits, [SamplingParams(seed=s)])[0] for s in range(50)}
    positions = {
        choose(logits, [SamplingParams(seed=7)], tokens=[[1] * n])[0] for n in range(1, 50)
    }
    high_bits = {choose(logits, [SamplingParams(seed=7 + (s << 32))])[0] for s in range(50)}
    assert min(len(seeds), len(positions), len(high_bits)) > 25


def test_frequencies_follow_the_softmax() -> None:
    """Chi-squared over 20,000 draws at different seeds and positions."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    n = 20_000
    low = torch.arange(n, dtype=torch.int32) // 100
    noise = gumbel(low, torch.zeros_like(low), torch.arange(n, dtype=torch.int32) % 100, 12)
    counts = torch.bincount((logits + noise).argmax(1), minlength=12).double()
    expected = logits.double().softmax(0) * n
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 31.3, (
        f"chi-squared {chi2:.1f} with 11 degrees of freedom: less than one chance in a thousand"
    )


def test_noise_is_finite_and_gumbel() -> None:
    key = torch.arange(64, dtype=torch.int32)
    noise = gumbel(key, key * 3, key * 7, 5000).double()
    assert noise.isfinite().all()
    assert (
        abs(float(noise.mean()) - 0.5772) < 0.01 and abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    )
    flat = noise.reshape(-1)
    assert abs(float(torch.corrcoef(torch.stack([flat[:-1], flat[1:]]))[0, 1])) < 0.01


@pytest.mark.parametrize(
    "top_k,top_p,min_p",
    [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.05), (20, 0.7, 0.02), (0, 0.999, 0.0)],
)
def test_what_is_kept_equals_transformers(top_k: int, top_p: float, min_p: float) -> None:
    """Each filter is transformers' own. The order is vLLM's: min-p comes first."""
    logits = random_logits(40, seed=2)
    want = logits.clone()
    if min_p:
        want = hf.MinPLogitsWarper(min_p)(None, want)
    if top_k:
        want = hf.TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = hf.TopPLogitsWarper(top_p)(None, want)
    got = keep_likely(logits, 1.0, top_k or 2**31 - 1, top_p, min_p)
    torch.testing.assert_close(got, want)


def test_the_token_that_crosses_top_p_is_kept() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.6, 2), (0.9, 3), (0.96, 4), (1e-9, 1)):
        got = keep_likely(logits, 1.0, 2**31 - 1, top_p, 0.0)
        assert int(got.isfinite().sum()) == kept, top_p


def test_repetition_penalty_equals_transformers() -> None:
    logits = random_logits(3, seed=3)
    tokens = torch.tensor([[1, 5, 5, 9], [3, 3, 3, 3], [0, 96, 40, 2]])
    want = hf.RepetitionPenaltyLogitsProcessor(1.7)(tokens, logits.clone())
    three = torch.full((3,), 0.0)
    lengths = torch.full((3,), 4)
    got = sampler.penalise(
        logits, tokens, torch.full((3,), 2), lengths, three, three, torch.full((3,), 1.7)
    )
    torch.testing.assert_close(got, want)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    # prompt 4 4, output 6 6 7; 50 is stale memory behind the end
    tokens = torch.tensor([[4, 4, 6, 6, 7, 50, 50]])
    got = sampler.penalise(
        logits,
        tokens,
        torch.tensor([2]),
        torch.tensor([5]),
        torch.tensor([0.5]),
        torch.tensor([0.25]),
        torch.tensor([1.0]),
    )
    assert got[0, 4] == 0 and got[0, 50] == 0
    assert got[0, 6] == -1.0 and got[0, 7] == -0.75


def test_top_p_is_taken_of_what_min_p_leaves() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()
    got = keep_likely(logits, 1.0, 9, 0.85, 0.6)
    assert got.isfinite().tolist() == [[True, True, False, False, False]], (
        "0.4 and 0.3 pass min_p and are then the whole distribution; of all five, three reach 0.85"
    )
    warm = keep_likely(logits, 2.0, 9, 1.0, 0.6)
    assert int(warm.isfinite().sum()) == 3, "min_p looks at probabilities after the temperature"


def test_a_bias_is_added_before_the_penalties() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 3.0
    params = SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={5: 5.0})
    assert choose(logits, [params], tokens=[[1, 5]]) == [8], "(0 + 5) / 2 < 3 < 0 / 2 + 5"


def test_a_penalty_never_brings_back_what_a_mask_excludes() -> None:
    logits = random_logits(2, seed=9)
    params = [
        SamplingParams(
            temperature=0, frequency_penalty=-2, repetition_penalty=0.01, allowed_token_ids=[7, 8]
        ),
        SamplingParams(temperature=0, presence_penalty=-2, logit_bias={3: 100}),
    ]
    got = choose(logits, params, tokens=[[3, 4, 3, 4]] * 2, prompt_lens=[1, 1], masks={1: [11, 12]})
    assert got[0] in (7, 8) and got[1] in (11, 12)


def test_logit_bias_forces_and_forbids() -> None:
    logits = random_logits(2, seed=4)
    best = int(logits[1].argmax())
    got = choose(
        logits,
        [
            SamplingParams(temperature=0, logit_bias={11: 100}),
            SamplingParams(temperature=0, logit_bias={best: -100}),
        ],
    )
    assert got[0] == 11 and got[1] == int(logits[1].topk(2).indices[1])


def test_allowed_token_ids_are_the_only_ones() -> None:
    logits = random_logits(200, seed=5)
    got = choose(
        logits,
        [SamplingParams(seed=i, temperature=3.0, allowed_token_ids=[2, 30]) for i in range(200)],
    )
    assert set(got) == {2, 30}


def test_the_only_token_allowed_is_chosen_whatever_its_noise() -> None:
    """At this seed and position the hash of token 5 is among the 128 largest there are."""
    params = [SamplingParams(seed=54729777, allowed_token_ids=[5])]
    assert choose(torch.zeros(1, VOCAB), params, tokens=[[1, 2, 3]]) == [5]


def test_stop_ids_wait_for_min_tokens() -> None:
    logits = torch.full((2, VOCAB), -1.0)
    logits[:, 8], logits[:, 9] = 5.0, 4.0
    params = [SamplingParams(temperature=0, min_tokens=2)] * 2
    got = choose(
        logits, params, tokens=[[1, 2, 3], [1, 2, 3]], prompt_lens=[2, 1], stop_ids=frozenset([8])
    )
    assert got == [9, 8], "one token said: too early to stop; two said: free to"


@pytest.mark.parametrize(
    "options",
    [dict(), dict(temperature=0), dict(top_k=3), dict(top_p=0.2), dict(min_p=0.9), dict(frequency_penalty=2.0),
     dict(logit_bias={2: -100, 31: -100, 96: -100})],
    ids=str,
)  # fmt: skip
def test_a_masked_row_says_only_what_it_may(options: dict) -> None:
    n = 2 * sampler.MASK_CHUNK + 5
    logits = random_logits(n, seed=5, scale=20)
    allowed = {i: [2, 31, 96] for i in range(0, n, 2)}
    params = [SamplingParams(**{"seed": i, "temperature": 5.0, **options}) for i in range(n)]
    got = choose(logits, params, masks=allowed)
    assert {got[i] for i in allowed} <= {2, 31, 96}
    free = [i for i in range(n) if i not in allowed]
    assert [got[i] for i in free] == choose(logits[free], [params[i] for i in free])
    assert [
        choose(logits[i : i + 1], params[i : i + 1], masks={0: allowed[i]})[0] for i in (0, 64, 130)
    ] == [got[i] for i in (0, 64, 130)]


def test_a_mask_of_every_token_alone_chooses_it() -> None:
    logits = random_logits(VOCAB, seed=8, scale=30)
    got = choose(
        logits, [SamplingParams(seed=i) for i in range(VOCAB)], masks={i: [i] for i in range(VOCAB)}
    )
    assert got == list(range(VOCAB)), "bit k of the mask is token k"


def test_min_tokens_gives_way_where_a_mask_leaves_only_the_end() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 8] = 5.0
    params = [SamplingParams(temperature=0, min_tokens=9)] * 3
    got = choose(logits, params, stop_ids=frozenset([8, 9]), masks={0: [8], 1: [8, 40]})
    assert got[:2] == [8, 40], "forced to end; free to go on"
    assert got[2] not in (8, 9), "not masked"


def test_logprobs_are_of_the_model_and_ranked() -> None:
    logits = random_logits(3, seed=6)
    tokens = torch.tensor([5, int(logits[1].argmax()), 7])
    parts = sampler.logprobs_of(logits, tokens, 4)
    want = logits.log_softmax(1)
    records = sampler.as_records(tokens.tolist(), list(parts), [slice(4), slice(2), slice(0)])
    assert [len(r.top) for r in records] == [4, 2, 0]
    assert records[1].rank == 1 and records[1].top[0] == (
        records[1].token,
        pytest.approx(float(want[1].max())),
    )
    for r, row in zip(records, want, strict=True):
        assert r.logprob == pytest.approx(float(row[r.token])) and r.rank == 1 + int(
            (row > row[r.token]).sum()
        )


@pytest.mark.parametrize("scale", [3.0, 1e4])
def test_no_parameter_makes_finite_logits_infinite(scale: float) -> None:
    extremes: list[dict[str, Any]] = [
        {"repetition_penalty": 5e-324}, {"repetition_penalty": 100.0}, {"temperature": 1.1e-5}, {"temperature": 100.0},
        {"repetition_penalty": 5e-324, "temperature": 1.1e-5}, {"top_p": 5e-324}, {"min_p": 1.0}, {"top_k": 1},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 1.1e-5}, {"logit_bias": {1: -100.0, 5: 100.0}},
    ]  # fmt: skip
    params = [SamplingParams(seed=1, **{"temperature": 1.0, **extreme}) for extreme in extremes]
    assert min(choose(random_logits(len(params), scale=scale), params)) >= 0


def test_fewer_tokens_than_alternatives_asked_for() -> None:
    _, _, ids, top = sampler.logprobs_of(random_logits(2)[:, :5], torch.tensor([1, 4]), 20)
    assert ids.shape == top.shape == (2, 5) and sorted(ids[0].tolist()) == [0, 1, 2, 3, 4]
