"""Bounded KV with real models: the generated tokens equal those of a naive loop that keeps the same
tokens at the same positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.errors import ContextLengthExceeded, InvalidRequest
from tests.tiny import hf_model, model_dir

SIZE, BUDGET = 8, 40
PROMPT = [5, 17, 200, 33, 90, 11, 64, 7, 8, 150, 21]


def make(architecture: str = "llama", **options: Any) -> LLM:
    given = dict(
        dtype="float32",
        kv_cache_dtype="float32",
        block_size=SIZE,
        num_gpu_blocks_override=60,
        max_num_seqs=4,
    )
    given |= dict(kv_eviction="sinks", kv_budget=BUDGET, max_model_len=200, progress=False)
    return LLM(model_dir(architecture), **given | options)  # type: ignore[arg-type]


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, **more
    )


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [list(r.outputs[0].token_ids) for r in llm.generate(prompts, params, use_tqdm=False)]


def rotate_back(keys: Tensor, by: int, frequencies: Tensor) -> Tensor:
    angle = torch.cat([by * frequencies.double()] * 2)
    a, b = keys.chunk(2, dim=-1)
    return keys * angle.cos() + torch.cat((b, -a), dim=-1) * angle.sin()


@torch.no_grad()
def naive(
    architecture: str, prompt: list[int], count: int, sinks: int = SIZE
) -> list[tuple[int, Tensor]]:
    """Return tokens and logits of a naive loop in float64, whose cache has one tensor per layer. When
    a block is dropped, the keys behind it are rotated back."""
    from transformers import DynamicCache

    model = copy.deepcopy(hf_model(architecture)).double()
    rotary, types = model.model.rotary_emb, getattr(model.config, "layer_types", None)
    cache, ids, out = DynamicCache(), prompt, []
    for _ in range(count):
        if cache.get_seq_length() + 1 > BUDGET:
            for i, layer in enumerate(cache.layers):
                name = (
                    f"{types[i]}_inv_freq"
                    if types and hasattr(rotary, f"{types[i]}_inv_freq")
                    else "inv_freq"
                )
                keys = rotate_back(layer.keys[:, :, sinks + SIZE :], SIZE, getattr(rotary, name))
                layer.keys = torch.cat((layer.keys[:, :, :sinks], keys), dim=2)
                layer.values = torch.cat(
                    (layer.values[:, :, :sinks], layer.values[:, :, sinks + SIZE :]), dim=2
                )
        logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
        ids = [int(logits.argmax())]
        out.append((ids[0], logits))
    return out


@pytest.mark.parity
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_tokens_and_logprobs_equal_a_naive_loop_far_beyond_the_budget(architecture: str) -> None:
    want = naive(architecture, PROMPT, 150)
    output = (
        make(architecture).generate([PROMPT], greedy(150, logprobs=0), use_tqdm=False)[0].outputs[0]
    )
    assert list(output.token_ids) == [token for token, _ in want]
    for entry, (token, logits) in zip(output.logprobs or [], want, strict=True):
        assert entry[token].logprob == pytest.approx(float(logits.log_softmax(0)[token]), abs=1e-3)


def test_neither_depth_nor_other_requests_change_the_tokens() -> None:
    prompts = [PROMPT, PROMPT[:3], [*PROMPT, 1, 2, 3] * 2]
    params = SamplingParams(
        max_tokens=300, temperature=0.8, seed=5, ignore_eos=True, detokenize=False
    )
    alone = [tokens_of(make(), [p], params)[0] for p in prompts]
    for depth in (1, 3):
        llm = make(depth=depth)
        assert tokens_of(llm, prompts, params) == alone
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.counters.dropped_blocks > 90
        assert len(llm.engine.scheduler.pool.available_blocks) == 60


def test_a_prompt_that_others_share_stays_in_the_prefix_cache_as_it_was() -> None:
    prompt = list(range(1, BUDGET))
    llm = make()
    first = llm.generate(
        [prompt],
        SamplingParams(n=3, max_tokens=100, temperature=1, seed=1, ignore_eos=True),
        use_tqdm=False,
    )
    assert llm.engine.scheduler.counters.copies > 0
    again = llm.generate([prompt], greedy(1), use_tqdm=False)[0]
    fresh = make().generate([prompt], greedy(1), use_tqdm=False)[0]
    assert again.num_cached_tokens and again.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert len({tuple(o.token_ids) for o in first[0].outputs}) == 3


def test_sampling_noise_depends_on_the_position_in_the_text() -> None:
    """If all tokens are equally likely, the noise alone determines the sample: it must not repeat
    after 8 tokens."""
    llm = make(max_num_seqs=1)
    llm.model.logits = lambda hidden: torch.zeros(len(hidden), llm.config.vocab_size)  # type: ignore[method-assign]
    tokens = tokens_of(
        llm, [PROMPT], SamplingParams(max_tokens=120, seed=1, ignore_eos=True, detokenize=False)
    )[0]
    assert all(tokens[i : i + 8] != tokens[i + 8 : i + 16] for i in range(40, 100))


def test_min_tokens_counts_dropped_tokens() -> None:
    bias = {256: 100.0}
    params = SamplingParams(
        max_tokens=200, min_tokens=120, temperature=0, logit_bias=bias, detokenize=False
    )
    assert len(tokens_of(make(), [PROMPT], params)[0]) == 121


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(architecture="gpt2"), "learned"),
        (dict(kv_cache_dtype="int8"), "compressed"),
        (dict(kv_budget=20), "multiple of the block size 8, from 24"),
        (dict(kv_budget=16), "from 24"),
        (dict(kv_budget=208), "max_model_len"),
        (dict(kv_eviction="oldest"), "none, sinks, heavy"),
        (dict(kv_eviction="none"), "kv_budget has no effect"),
    ],
)
def test_options_without_bounded_kv_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        make(**options)


def test_beams_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="bounded KV"):
        make().generate(
            [PROMPT],
            SamplingParams(max_tokens=2, best_of=2, use_beam_search=True, temperature=0),
            use_tqdm=False,
        )


def test_a_prompt_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded, match="kv_budget"):
        make().generate([[1] * (BUDGET + 1)], greedy(1), use_tqdm=False)


@torch.no_grad()
def test_mass_is_the_share_of_attention_that_a_block_gets() -> None:
    """The mass of a block for one layer and one token is the output of attention if the values of
    the block are ones and all others zeros."""
    from octavo.ops import ForwardBatch, Span, Watched
    from octavo.ops.reference import ReferenceOps

    torch.manual_seed(0)
    ops, length, width = ReferenceOps(), 29, 4
    kv, q = torch.randn(9, 2, 2, SIZE, 16), torch.randn(1, 4, 16)
    table = torch.tensor([[5, 2, 7, 3]], dtype=torch.int32)
    ints, at = torch.zeros(2, dtype=torch.int32), torch.tensor([length - 1])
    lengths = torch.tensor([length], dtype=torch.int32)
    for window in (0, 10):
        watched = Watched(torch.tensor([0]), lengths, table.long(), torch.zeros(1, width))
        ops.block_mass(q, kv, watched, 0.25, window)
        for j in range(width):
            kv[:, 1] = 0
            kv[table[0, j], 1] = 1
            batch = ForwardBatch(
                at, at, at, ints, lengths, table, ints[:1], ints[:1].long(), [Span(0, 1, length)]
            )
            assert float(watched.mass[0, j]) == pytest.approx(
                float(ops.attention(q, kv, batch, 0.25, window).mean()), abs=1e-5
            )
        assert float(watched.mass.sum()) == pytest.approx(1)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_heavy_hitters_give_the_same_tokens_at_every_depth(architecture: str) -> None:
    prompts, params = [PROMPT, PROMPT[:3]], greedy(200)
    alone = [tokens_of(make(architecture, kv_eviction="heavy"), [p], params)[0] for p in prompts]
    llm = make(architecture, kv_eviction="heavy", depth=3)
    assert tokens_of(llm, prompts, params) == alone
    assert alone[0] != tokens_of(make(architecture), prompts, params)[0], (
        "the tokens differ from those of dropping the oldest block"
    )
    assert llm.engine.scheduler.pool.num_available == 60
