"""Engines with compressed KV: the tokens of a naive loop that compresses the same way, whatever the
engine does inside."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo.assemble
from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequest
from octavo.ops.kv import CODES
from octavo.ops.reference import ReferenceOps
from tests import tiny
from tests.batch import empty_kv, make_batch

GREEDY = dict(temperature=0.0, ignore_eos=True)
SCHEDULES: list[dict[str, Any]] = [
    dict(),
    dict(max_num_batched_tokens=9, depth=2),
    dict(num_gpu_blocks_override=6, block_size=16, depth=3, max_num_batched_tokens=16),
    dict(num_gpu_blocks_override=19, block_size=4, enable_prefix_caching=False, depth=2),
]


def make(architecture: str, **options: Any) -> LLM:
    options = {
        "max_model_len": 200,
        "max_num_seqs": 8,
        "progress": False,
        "num_gpu_blocks_override": 200,
        **options,
    }
    return LLM(tiny.model_dir(architecture), device="cpu", **options)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo.assemble, "select", lambda device, choice: ReferenceOps())


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    g = random.Random(seed)
    shared = [g.randrange(250) for _ in range(40)]
    return [
        shared[: g.randrange(40)] + [g.randrange(250) for _ in range(g.randrange(1, 20))]
        for _ in range(count)
    ]


@torch.inference_mode()
def naive(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """Generate greedily, and compute the whole sequence again for every token, in one block of a
    separate cache."""
    ids, model = list(prompt), llm.model
    for _ in range(count):
        kv = empty_kv(model.config, [[1]], len(ids), "cpu", llm.kv_dtype)
        batch = make_batch([(ids, 0)], [[1]], len(ids), "cpu")
        ids.append(int(model.logits(model(batch, kv)[-1:]).argmax()))
    return ids[len(prompt) :]


def ids_of(outputs: list[Any]) -> list[list[list[int]]]:
    return [[c.token_ids for c in o.outputs] for o in outputs]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_batch_equals_the_naive_loop(architecture: str, codes: str, reference: None) -> None:
    """Chunked prompts, a pool too small for all of them, shared prefixes, steps in flight: token
    for token."""
    many, params = prompts(7), SamplingParams(max_tokens=12, **GREEDY)
    want = [[naive(make(architecture, kv_cache_dtype=codes), p, 12)] for p in many]
    for options in SCHEDULES:
        llm = make(architecture, kv_cache_dtype=codes, **options)
        assert ids_of(llm.generate(many, params)) == want, options
        assert ids_of(llm.generate(many, params)) == want, ("again, from the prefix cache", options)
        if "num_gpu_blocks_override" in options:
            assert llm.engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("kernels", [False, True], ids=["plain weights", "quantised weights"])
def test_samples_do_not_depend_on_the_schedule(codes: str, kernels: bool) -> None:
    """Several completions of a prompt fork its blocks, whose copies must bring their scales along.
    With quantised weights all layers are one call of the CPU's kernels, where there are any."""
    each = [
        SamplingParams(max_tokens=10, seed=i, n=3, ignore_eos=True, temperature=0.8)
        for i in range(6)
    ]
    weights = {"quantization": "int8"} if kernels else {}
    want = None
    for options in (
        *SCHEDULES,
        dict(num_gpu_blocks_override=40, block_size=8, max_num_batched_tokens=17),
    ):
        llm = make("qwen3", kv_cache_dtype=codes, **weights, **options)
        got = ids_of(llm.generate(prompts(6, seed=1), each))
        want = want or got
        assert got == want, options
        assert llm.engine.scheduler.counters.copies > 0, (
            "the forks were meant to write to a shared block"
        )
    assert len({tuple(t) for c in want or [] for t in c}) > 6


@pytest.mark.parametrize("codes", CODES)
def test_other_tiers_hold_codes_and_scales(codes: str, reference: None, tmp_path: Path) -> None:
    """Prompts are loaded from host memory after an eviction, and from disk after a restart. The
    other format finds none of these records."""
    g = random.Random(3)
    many, params = (
        [[g.randrange(250) for _ in range(100)] for _ in range(4)],
        SamplingParams(max_tokens=8, **GREEDY),
    )
    options: dict[str, Any] = dict(
        num_gpu_blocks_override=16, swap_space=1 / 1024, kv_disk_path=tmp_path
    )

    def complete(llm: LLM) -> list[tuple[list[int], int]]:
        outputs = [llm.generate([p], params)[0] for p in many]
        return [(o.outputs[0].token_ids, o.num_cached_tokens or 0) for o in outputs]

    llm = make("llama", kv_cache_dtype=codes, **options)
    want = [naive(llm, p, 8) for p in many]
    for cached in (0, 96):
        assert complete(llm) == [(tokens, cached) for tokens in want]
    llm.close()
    again = make("llama", kv_cache_dtype=codes, **options)
    assert complete(again) == [(tokens, 96) for tokens in want]
    again.close()
    other = make("llama", kv_cache_dtype=next(c for c in CODES if c != codes), **options)
    assert [cached for _, cached in complete(other)] == [0] * 4
    other.close()


def test_compressed_kv_changes_logprobs_only_a_little() -> None:
    """Logprobs change a little, with int8 less than with fp8."""
    prompt = prompts(1, seed=2)[0]
    errors = {}
    for name in ("auto", "int8", "fp8", "float16"):
        llm = make("llama", kv_cache_dtype=name)
        prompt_logprobs = (
            llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))[
                0
            ].prompt_logprobs
            or []
        )
        errors[name] = torch.tensor(
            [next(iter(x.values())).logprob for x in prompt_logprobs[1:] if x]
        )
    base = errors.pop("auto")
    size = {name: float((x - base).abs().mean()) for name, x in errors.items()}
    assert 0 < size["float16"] < size["int8"] < size["fp8"] < 0.5, size


def test_unknown_kv_dtypes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidRequest,
        match=r"kv_cache_dtype must be one of auto, float32, .* fp8 .*, got 'fp8_e5m2'",
    ):
        LLM("/nowhere", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(
        InvalidRequest,
        match="kv_cache_dtype bfloat16 is not supported: with float32 .* float32, float16",
    ):
        make("llama", kv_cache_dtype="bfloat16")
    config = tiny.hf_model("gpt2").config.to_dict() | {
        "n_embd": 12,
        "architectures": ["GPT2LMHeadModel"],
    }
    with pytest.raises(InvalidRequest, match="multiple of 4, but this model has head_dim 3"):
        LLM(
            config,
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_dtype="int8",
            device="cpu",
        )


def test_twice_the_tokens_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.assemble.available_memory", lambda device: (2**30, 2**30))
    fits = {}
    for name in ("float32", "float16", "int8", "fp8_e4m3"):
        llm = LLM(
            tiny.model_dir("qwen3"),
            device="cpu",
            kv_cache_dtype=name,
            progress=False,
            max_num_seqs=10_000,
        )
        fits[name] = llm.memory.kv_tokens
        # and the padding
        assert (
            llm.runner.kv.tensor.nbytes
            == llm.memory.kv + llm.memory.kv_per_token * llm.memory.block_size
        )
    # heads of 16 numbers: 20 bytes
    assert fits["int8"] == fits["fp8_e4m3"] > 1.5 * fits["float16"] > 2.9 * fits["float32"]
