"""Beam search and best_of with a model: the texts, scores and order of transformers, whatever else
is in the batch."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import InvalidRequest
from octavo.outputs import RequestOutput
from tests import tiny

PROMPTS = [[5, 6, 7], [200, 3, 3, 90, 17, 8, 250, 41, 41, 9, 10], list(range(40, 73)), [77]]
# One end of text among 300 tokens is rarely among the best. With so many stop tokens, some are.
STOPS = list(range(0, 250, 7))


@cache
def llm(architecture: str = "llama", **options: Any) -> LLM:
    small = {
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 400,
        "block_size": 4,
        "max_model_len": 256,
    }
    return LLM(tiny.model_dir(architecture), progress=False, **{**small, **options})


@cache
@torch.no_grad()
def transformers_beams(architecture: str, prompt: tuple[int, ...], stops: bool, width: int, length: int, penalty: float,
                       early: bool | str) -> list[tuple[float, list[int]]]:  # fmt: skip
    ids = torch.tensor([prompt])
    ends = [tiny.EOS, *STOPS] if stops else None
    result = tiny.hf_model(architecture).generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, max_new_tokens=length,
        length_penalty=penalty, early_stopping=early, do_sample=False, eos_token_id=ends, pad_token_id=299,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    lengths = (result.beam_indices >= 0).sum(1).tolist()
    rows = result.sequences[:, len(prompt) :].tolist()
    return [
        (score, row[:n])
        for score, row, n in zip(result.sequences_scores.tolist(), rows, lengths, strict=True)
    ]


def search(
    stops: bool, width: int, length: int, penalty: float, early: bool | str
) -> SamplingParams:
    return SamplingParams(n=width, use_beam_search=True, max_tokens=length, length_penalty=penalty, early_stopping=early,
                          ignore_eos=not stops, stop_token_ids=STOPS if stops else [], logprobs=0, detokenize=False)  # fmt: skip


def compare(output: RequestOutput, architecture: str, prompt: list[int], *settings: Any) -> None:
    want = transformers_beams(architecture, tuple(prompt), *settings)
    assert len(output.outputs) == len(want) and output.finished
    for (score, tokens), completion in zip(want, output.outputs, strict=True):
        assert completion.token_ids == tokens, (settings, completion.token_ids, tokens)
        assert completion.cumulative_logprob is not None and completion.logprobs is not None
        assert completion.cumulative_logprob / len(tokens) ** settings[3] == pytest.approx(
            score, abs=1e-4
        )
        assert sum(
            logprobs[t].logprob for logprobs, t in zip(completion.logprobs, tokens, strict=True)
        ) == pytest.approx(completion.cumulative_logprob)
        assert completion.finish_reason == (
            "stop" if settings[0] and tokens[-1] in [tiny.EOS, *STOPS] else "length"
        )


SETTINGS = [
    (True, width, length, penalty, early)
    for width in (2, 3, 5, 8)
    for length, penalty, early in [(12, 1.0, False), (12, 1.0, True), (12, 1.0, "never"), (20, 0.5, False), (9, 2.0, "never"),
                                   (9, -1.0, False), (9, -1.0, "never"), (15, 0.0, "never"), (15, 2.0, True), (1, 1.0, False)]
] + [(False, 2, 10, 1.0, False), (False, 8, 10, 0.5, True)]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_search_alone_equals_transformers(settings: tuple[Any, ...]) -> None:
    for prompt in PROMPTS[:2]:
        (output,) = llm().generate([prompt], search(*settings), use_tqdm=False)
        compare(output, "llama", prompt, *settings)


@pytest.mark.parity
@pytest.mark.parametrize("architecture", [a for a in tiny.ARCHITECTURES if a != "llama"])
def test_every_architecture_equals_transformers(architecture: str) -> None:
    settings = (True, 4, 10, 1.0, False)
    (output,) = llm(architecture).generate([PROMPTS[1]], search(*settings), use_tqdm=False)
    compare(output, architecture, PROMPTS[1], *settings)


BATCHES = {
    "depth 1": {},
    "depth 2": {"depth": 2},
    "depth 3, chunks of 8": {"depth": 3, "max_num_batched_tokens": 8, "max_num_seqs": 8},
    "no prefix cache": {"enable_prefix_caching": False, "depth": 2},
    "fewer slots than beams": {"max_num_seqs": 3, "depth": 2},
    "a pool for one or two": {"num_gpu_blocks_override": 20, "max_model_len": 60, "depth": 3},
    "the same, no prefix cache": {
        "num_gpu_blocks_override": 20,
        "max_model_len": 60,
        "enable_prefix_caching": False,
    },
    "blocks of one": {"block_size": 1, "num_gpu_blocks_override": 500, "depth": 2},
    "priorities": {
        "scheduling_policy": "priority",
        "num_gpu_blocks_override": 30,
        "max_model_len": 60,
    },
}


@pytest.mark.parametrize("options", BATCHES.values(), ids=list(BATCHES))
def test_a_search_in_a_batch_equals_transformers(options: dict[str, Any]) -> None:
    g = random.Random(repr(options))
    engine, chosen = llm(**options), g.sample(SETTINGS, 6)
    drawn = SamplingParams(
        temperature=0.8, seed=5, max_tokens=14, ignore_eos=True, detokenize=False
    )
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
    several = SamplingParams(n=3, seed=9, max_tokens=9, ignore_eos=True, detokenize=False)
    plain = [
        engine.generate([PROMPTS[i]], p, use_tqdm=False)[0]
        for i, p in ((0, drawn), (1, greedy), (2, several))
    ]
    prompts = [g.choice(PROMPTS) for _ in chosen]
    searches = [search(*s) for s in chosen]
    outputs = engine.generate([PROMPTS[0], *prompts[:3], PROMPTS[1], *prompts[3:], PROMPTS[2]],
                              [drawn, *searches[:3], greedy, *searches[3:], several], use_tqdm=False)  # fmt: skip
    others = [outputs.pop(i) for i in (0, 3, -1)]
    for prompt, settings, output in zip(prompts, chosen, outputs, strict=True):
        compare(output, "llama", prompt, *settings)
    for alone, beside in zip(plain, others, strict=True):
        assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in beside.outputs]
    engine.engine.scheduler.check()
    engine.engine.scheduler.pool.check([])
    assert not engine.engine.scheduler.live


def test_guided_requests_go_on_beside_beams() -> None:
    pytest.importorskip("llguidance")
    from octavo import StructuredOutputsParams

    engine, settings = llm(depth=2), (True, 4, 12, 1.0, False)
    guided = SamplingParams(
        seed=3, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-z]{5}")
    )
    first, second = engine.generate(
        [PROMPTS[1], PROMPTS[0]], [search(*settings), guided], use_tqdm=False
    )
    compare(first, "llama", PROMPTS[1], *settings)
    assert second.outputs[0].text.isalpha() and len(second.outputs[0].text) == 5


def test_beam_search_gives_vllms_shape() -> None:
    prompts = ["Hello", {"prompt_token_ids": PROMPTS[0]}]
    first, second = llm().beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6))
    assert len(first.sequences) == len(second.sequences) == 3
    want = transformers_beams("llama", tuple(PROMPTS[0]), False, 3, 6, 1.0, False)
    for (score, tokens), beam in zip(want, second.sequences, strict=True):
        assert (
            beam.tokens == PROMPTS[0] + tokens
            and beam.finish_reason == "length"
            and len(beam.logprobs) == 6
        )
        assert beam.cum_logprob / 6 == pytest.approx(score, abs=1e-4)
    assert all(s.text and s.text.startswith("Hello") for s in first.sequences)


@pytest.mark.parametrize("shown", [False, True])
def test_the_end_of_a_text_is_among_its_tokens_on_demand(shown: bool) -> None:
    """Every second token of the model is an end of text."""
    engine = llm()
    ends = engine.engine.scheduler.eos_ids
    try:
        engine.engine.scheduler.eos_ids = frozenset(range(0, 300, 2))
        (output,) = engine.beam_search(
            [PROMPTS[0]], BeamSearchParams(4, 8, include_stop_str_in_output=shown)
        )
    finally:
        engine.engine.scheduler.eos_ids = ends
    stopped = [s for s in output.sequences if s.finish_reason == "stop"]
    assert stopped and all((s.tokens[-1] % 2 == 0) == shown or len(s.tokens) == 3 for s in stopped)
    assert all(
        s.stop_reason is None and len(s.logprobs) == len(s.tokens) - 3 + (not shown)
        for s in stopped
    )


def test_min_tokens_hold_for_beams() -> None:
    params = search(True, 4, 12, 1.0, False)
    params.min_tokens = 5
    (output,) = llm().generate([PROMPTS[0]], params, use_tqdm=False)
    assert all(
        len(c.token_ids) > 5 and not {*c.token_ids[:5]} & {*STOPS, tiny.EOS} for c in output.outputs
    )


def test_logprobs_and_prompt_logprobs_come_with_beams() -> None:
    params = search(False, 3, 4, 1.0, False)
    params.logprobs, params.prompt_logprobs = 2, 1
    (output,) = llm().generate([PROMPTS[1]], params, use_tqdm=False)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPTS[1])
    for completion in output.outputs:
        assert completion.logprobs is not None and all(
            2 <= len(at) <= 3 for at in completion.logprobs
        )
        ids = PROMPTS[1] + completion.token_ids
        logits = tiny.hf_logits("llama", ids).log_softmax(-1)
        for k, at in enumerate(completion.logprobs):
            row = logits[len(PROMPTS[1]) + k - 1]
            for token, entry in at.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
                assert entry.rank == int((row > row[token]).sum()) + 1


@pytest.mark.parametrize("penalty", [1.0, -1.0])
@pytest.mark.parametrize("early", [True, False, "never"])
def test_a_single_beam_is_greedy(early: bool | str, penalty: float) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=STOPS, detokenize=False)
    want = llm().generate(PROMPTS, greedy, use_tqdm=False)
    got = llm().generate(PROMPTS, search(True, 1, 40, penalty, early), use_tqdm=False)
    for one, other in zip(got, want, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert any(len(output.outputs[0].token_ids) < 40 for output in want)


def test_the_prompt_is_computed_once_and_shared() -> None:
    engine = llm()
    engine.reset_prefix_cache()
    count = engine.engine.scheduler.counters
    before, copies, preemptions = count.computed_tokens, count.copies, count.preemptions
    (output,) = engine.generate(
        [list(range(100, 140))], search(False, 5, 6, 1.0, False), use_tqdm=False
    )
    assert count.computed_tokens - before == 40 + 5 * 5, (
        "40 of the prompt, and 5 of the 6 tokens of 5 beams: the last token is not computed"
    )
    assert (
        count.copies > copies and count.preemptions == preemptions and output.num_cached_tokens == 0
    )
    (output,) = engine.generate(
        [list(range(100, 140))], search(False, 5, 6, 1.0, False), use_tqdm=False
    )
    assert output.num_cached_tokens == 36


# ---- best_of -------------------------------------------------------------------------------------


def test_best_of_gives_the_likeliest_by_token_best_first() -> None:
    params: dict[str, Any] = dict(seed=7, max_tokens=6, temperature=1.0, stop_token_ids=STOPS)
    (every,) = llm().generate(
        [PROMPTS[0]], SamplingParams(n=6, logprobs=0, **params), use_tqdm=False
    )
    (best,) = llm().generate([PROMPTS[0]], SamplingParams(n=2, best_of=6, **params), use_tqdm=False)
    mean = {
        tuple(c.token_ids): (c.cumulative_logprob or 0.0) / len(c.token_ids) for c in every.outputs
    }
    assert [tuple(c.token_ids) for c in best.outputs] == sorted(mean, key=lambda t: -mean[t])[:2]
    assert [c.index for c in best.outputs] == [0, 1] and best.outputs[0].logprobs is None
    first = best.outputs[0]
    assert first.cumulative_logprob == pytest.approx(
        mean[tuple(first.token_ids)] * len(first.token_ids)
    )


def test_best_of_equal_to_n_chooses_nothing() -> None:
    params: dict[str, Any] = dict(seed=7, max_tokens=6, detokenize=False)
    one, other = (
        llm().generate([PROMPTS[0]], SamplingParams(n=3, best_of=b, **params), use_tqdm=False)[0]
        for b in (None, 3)
    )
    assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
    assert len(list(llm().stream(PROMPTS[0], SamplingParams(n=3, best_of=3, **params)))) >= 3


# ---- refused -------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "more than there are": (dict(n=3, best_of=2), "best_of", "param_out_of_range"),
    "too many": (dict(best_of=10**6), "best_of", "param_out_of_range"),
    "too wide": (dict(use_beam_search=True, n=100), "n", "param_out_of_range"),
    "a million beams": (dict(use_beam_search=True, best_of=10**6), "best_of", "param_out_of_range"),
    "penalties": (
        dict(use_beam_search=True, n=2, frequency_penalty=1),
        "frequency_penalty",
        "unsupported_parameter",
    ),
    "a bias": (
        dict(use_beam_search=True, n=2, logit_bias={1: 2}),
        "logit_bias",
        "unsupported_parameter",
    ),
    "allowed tokens": (
        dict(use_beam_search=True, n=2, allowed_token_ids=[1]),
        "allowed_token_ids",
        "unsupported_parameter",
    ),
    "stop strings": (dict(use_beam_search=True, n=2, stop="x"), "stop", "unsupported_parameter"),
    "an unknown way to stop": (
        dict(use_beam_search=True, early_stopping="soon"),
        "early_stopping",
        None,
    ),
    "a penalty that is no number": (
        dict(use_beam_search=True, length_penalty="x"),
        "length_penalty",
        "param_out_of_range",
    ),
    "a length penalty without beams": (dict(length_penalty=2.0), "length_penalty", None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inconsistent_parameters_are_refused(name: str) -> None:
    fields, param, code = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_ranked_completions_cannot_be_streamed() -> None:
    for params in (SamplingParams(best_of=2), SamplingParams(use_beam_search=True, n=2)):
        with pytest.raises(InvalidRequest, match="streamed"):
            llm().stream(PROMPTS[0], params)


def test_more_beams_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        params = SamplingParams(
            use_beam_search=True, n=60, stop_token_ids=list(range(250)), detokenize=False
        )
        llm().generate([PROMPTS[0]], params, use_tqdm=False)
