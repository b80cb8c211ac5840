"""Switches that turn a mechanism off: the tokens stay the same, and the mechanism is really off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.assemble import operator_choice
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest
from octavo.events import StepPlanned
from octavo.ops import ForwardBatch
from octavo.ops.backends import OperatorChoice, select
from octavo.ops.kv import KV
from octavo.ops.reference import ReferenceOps
from tests import tiny
from tests.test_llm import GREEDY, ids_of, make, prompts

SWITCHES: list[dict[str, Any]] = [
    dict(kv_cache=False),
    dict(kv_cache=False, max_num_batched_tokens=16, num_gpu_blocks_override=19, block_size=4),
    dict(kv_allocation="contiguous", num_gpu_blocks_override=19, block_size=4),
    dict(enable_chunked_prefill=False, max_num_batched_tokens=40, depth=2),
    dict(attention_backend="reference"),
    dict(attention_backend="tests.test_switches:PlainAttention"),
    dict(fused_kernels=False),
    dict(fused_decoder=False),
]


class PlainAttention:
    """A user's attention backend: one sequence after another, without a fused softmax."""

    name = "plain"
    calls = 0

    def attention(
        self, query: Tensor, kv_cache: KV, batch: ForwardBatch, scale: float, window: int = 0
    ) -> Tensor:
        type(self).calls += 1
        output = torch.empty_like(query)
        block_size = kv_cache.shape[-2]
        for span, slot, length in zip(
            batch.spans, batch.slots.tolist(), batch.seq_lens.tolist(), strict=True
        ):
            blocks = batch.block_table[slot, : -(-length // block_size)].long()
            keys, values = kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            tokens = slice(span.first, span.first + span.num)
            heads = query[tokens].transpose(0, 1)
            repeats = heads.shape[0] // keys.shape[0]
            scores = heads @ keys.repeat_interleave(repeats, 0).transpose(1, 2) * scale
            places = torch.arange(length, device=query.device)
            own = places[length - span.num :, None]
            visible = (places <= own) & (places > own - window if window else places >= 0)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            output[tokens] = (weights @ values.repeat_interleave(repeats, 0)).transpose(0, 1)
        return output

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return (dtype,)


@pytest.mark.parity
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_the_tokens_are_those_of_transformers(architecture: str) -> None:
    many = prompts(5)
    want = [tiny.hf_greedy(architecture, p, 8) for p in many]
    params = SamplingParams(max_tokens=8, **GREEDY)
    for options in SWITCHES:
        llm = make(architecture, **options)
        assert ids_of(llm.generate(many, params)) == want, options
        llm.engine.scheduler.check()


@pytest.mark.parametrize(
    "options",
    [
        dict(fused_decoder=False),
        dict(kv_cache=False),
        dict(kv_allocation="contiguous"),
        dict(enable_chunked_prefill=False),
    ],
)
def test_quantised_weights_give_the_same_tokens(options: dict[str, Any]) -> None:
    many = prompts(4, seed=7)
    params = SamplingParams(max_tokens=8, **GREEDY)
    want = ids_of(make(quantization="int8").generate(many, params))
    assert ids_of(make(quantization="int8", **options).generate(many, params)) == want


def steps_of(llm: LLM, many: list[list[int]], max_tokens: int = 6) -> list[list[int]]:
    """Return the number of tokens of each item of each step."""
    steps: list[list[int]] = []
    llm.engine.events.subscribe(
        lambda event: steps.append([item.num_tokens for item in event.plan.items]), StepPlanned
    )
    llm.generate(many, SamplingParams(max_tokens=max_tokens, **GREEDY))
    return [step for step in steps if step]


def test_without_a_kv_cache_each_token_computes_the_whole_sequence() -> None:
    steps = steps_of(make(kv_cache=False), [list(range(20))])
    assert steps == [[20], [21], [22], [23], [24], [25]]


def test_without_chunked_prefill_a_prompt_waits_for_room() -> None:
    pair = [list(range(30)), list(range(100, 125))]
    chunked = steps_of(make(max_num_batched_tokens=40), pair)
    assert chunked[:2] == [[30, 10], [1, 15]]
    whole = steps_of(make(max_num_batched_tokens=40, enable_chunked_prefill=False), pair)
    assert whole[:2] == [[30], [1, 25]]
    longer = steps_of(make(max_num_batched_tokens=20, enable_chunked_prefill=False), pair)
    assert longer[:3] == [[20], [10], [1]], "a prompt beyond the budget is computed in parts"


def test_a_contiguous_sequence_reserves_its_blocks_when_it_starts() -> None:
    llm = make(kv_allocation="contiguous", block_size=4, num_gpu_blocks_override=40)
    params = SamplingParams(max_tokens=40, **GREEDY)
    stream = llm.stream(list(range(10)), params)
    next(stream)
    (sequence,) = llm.engine.scheduler.running
    assert len(sequence.block_table) == 13  # 10 + 40 tokens, of which the last is never computed
    stream.close()
    three = make(kv_allocation="contiguous", block_size=4, num_gpu_blocks_override=26)
    rounds = [len(step) for step in steps_of(three, prompts(3, longest=50), 20)]
    assert max(rounds) < 3, "the pool has no room for three reservations"
    assert three.engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kv_cache=False, swap_space=1), "swap_space does not work with kv_cache=False"),
        (
            dict(kv_allocation="contiguous", kv_eviction="sinks"),
            "kv_eviction does not work with kv_allocation contiguous",
        ),
        (
            dict(kv_cache=False, speculative_config="ngram"),
            "speculative_config does not work with kv_cache=False",
        ),
        (dict(kv_cache=False, depth=2), "depth must be 1 with kv_cache=False"),
        (dict(attention_backend="flash"), "must be one of auto, reference, cpu, triton"),
        (
            dict(cascade_attention=True, attention_backend="reference"),
            "cascade_attention does not work with attention_backend reference",
        ),
        (
            dict(cascade_attention=True, deterministic=True),
            "deterministic does not work with cascade_attention True: .* Leave out one of them",
        ),
    ],
)
def test_options_that_contradict_a_switch_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("triton", "attention_backend triton needs an NVIDIA GPU, but the device is cpu"),
        ("no.such:Backend", "attention_backend 'no.such:Backend' cannot be loaded"),
        ("tests.tiny:model_dir", "has no name and no attention and no kv_dtypes"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        select("cpu", OperatorChoice(attention=name))


def test_cascade_attention_needs_a_gpu() -> None:
    with pytest.raises(InvalidRequest, match="cascade_attention needs an NVIDIA GPU"):
        make(cascade_attention=True, device="cpu")


def test_cascade_attention_is_off_unless_it_is_asked_for() -> None:
    pytest.importorskip("triton")
    assert not select("cuda").cascade_attention  # type: ignore[attr-defined]
    for choice in (OperatorChoice(), OperatorChoice(attention="triton", fused_decoder=False)):
        chosen = select("cuda", choice._replace(cascade_attention=True))
        assert chosen.attention.__self__.cascade_attention  # type: ignore[attr-defined]
    assert operator_choice(EngineOptions(cascade_attention=True)).cascade_attention
    assert not operator_choice(EngineOptions()).cascade_attention


def test_a_backend_of_vllm_means_the_default() -> None:
    assert EngineOptions(attention_backend="FLASH_ATTN").attention_backend == "auto"


def test_operators_are_replaced_where_they_should_be() -> None:
    plain = select("cpu")
    assert select("cpu", OperatorChoice(attention="cpu")).name == plain.name
    composed = select("cpu", OperatorChoice(attention="reference", fused_kernels=False))
    assert composed.name == "cpu" and composed.variant
    assert composed.attention.__func__ is ReferenceOps.attention  # type: ignore[attr-defined]
    assert composed.rms_norm.__func__ is ReferenceOps.rms_norm  # type: ignore[attr-defined]
    assert composed.linear.__func__ is type(plain).linear  # type: ignore[attr-defined]
    assert not composed.capturable
    before = PlainAttention.calls
    make(attention_backend="tests.test_switches:PlainAttention").generate([[1, 2, 3]])
    assert PlainAttention.calls > before
