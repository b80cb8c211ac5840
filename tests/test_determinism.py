"""With deterministic=True a request gets the same bits alone and in every batch, however its prompt
is cut into chunks, and with prefix hits, preemption and speculation. `make test-gpu` runs the same
on a GPU, in bfloat16 and with more and longer prompts."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.engine_options import EngineOptions
from octavo.errors import InvalidRequest
from octavo.outputs import RequestOutput
from octavo.params import MAX_LOGPROBS
from tests.batch import empty_kv, make_batch, scattered_tables
from tests.conftest import DEVICE
from tests.marks import slow_after

pytestmark = pytest.mark.parity
ON_GPU = DEVICE == "cuda"
VOCABULARY = 1000
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_id=2,
)
if ON_GPU:
    SIZES |= dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": dict(SIZES, architectures=["LlamaForCausalLM"], model_type="llama"),
    "gemma3": dict(
        SIZES,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=50,
        layer_types=["sliding_attention", "full_attention"] * (SIZES["num_hidden_layers"] // 2),
    ),
    "gpt2": dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        vocab_size=VOCABULARY + 1,  # logits of an odd width
        n_embd=SIZES["hidden_size"],
        n_layer=SIZES["num_hidden_layers"],
        n_head=8,
        n_positions=2048,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "mistral": dict(
        SIZES,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=50,
    ),
    "qwen2": dict(SIZES, architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    "qwen3": dict(
        SIZES,
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        head_dim=32,
        tie_word_embeddings=True,
    ),
}
# `make test-gpu` has to be short; OCTAVO_TEST_PROMPTS=200 is the full test of a GPU.
NUM_PROMPTS = int(os.environ.get("OCTAVO_TEST_PROMPTS", 40 if ON_GPU else 12))
LONGEST = 1400 if ON_GPU else 150
MAX_TOKENS = 12 if ON_GPU else 5
SMALL_BLOCK = 16 if ON_GPU else 4  # replies do not fit into the last block of their prompt
BATCHES = [2, 7, 64, 256] if ON_GPU else [2, 7, 64]


def make(architecture: str = "llama", **options: Any) -> LLM:
    options = {
        "device": DEVICE,
        "dtype": "bfloat16" if ON_GPU else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "deterministic": True,
        "max_num_seqs": 1,
        "max_model_len": 2048,
        "num_gpu_blocks_override": (1 << 19 if ON_GPU else 1 << 15) // (64 if ON_GPU else 16),
        "enable_prefix_caching": False,
        "progress": False,
        **options,
    }
    return LLM(ARCHITECTURES[architecture], **options)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random lengths, of which some begin with the same tokens."""
    generator = random.Random(seed)
    shared = [generator.randrange(3, VOCABULARY) for _ in range(LONGEST // 2)]
    prompts = []
    for _ in range(count):
        suffix = [
            generator.randrange(3, VOCABULARY) for _ in range(generator.randint(1, LONGEST // 2))
        ]
        prompts.append(shared[: generator.choice([0, 0, LONGEST // 3, LONGEST // 2])] + suffix)
    return prompts


# ---- logits of a model ---------------------------------------------------------------------------

Chunk = tuple[int, int, int]  # sequence, first position, end


class Sequences:
    """Sequences whose logits are computed in given steps."""

    def __init__(self, llm: LLM, tokens: list[list[int]]):
        self.model = llm.model
        self.tokens = tokens
        self.block_size = 64 if ON_GPU else 16
        self.tables = scattered_tables([len(ids) for ids in tokens], self.block_size)

    @torch.inference_mode()
    def logits(self, steps: Sequence[Sequence[Chunk]]) -> list[Tensor]:
        """Return the logits of all positions of each sequence. Each step is a batch of chunks."""
        dtype = self.model.kv_dtype
        kv = empty_kv(self.model.config, self.tables, self.block_size, DEVICE, dtype)
        chunks: list[list[Tensor]] = [[] for _ in self.tokens]
        for step in steps:
            batch = make_batch(
                [(self.tokens[seq][first:end], first) for seq, first, end in step],
                [self.tables[seq] for seq, _, _ in step],
                self.block_size,
                DEVICE,
            )
            logits = self.model.logits(self.model(batch, kv))
            parts = logits.split([end - first for _, first, end in step])
            for (seq, _, _), rows in zip(step, parts, strict=True):
                chunks[seq].append(rows.clone())
        return [torch.cat(parts) for parts in chunks]


def random_steps(lengths: list[int], sizes: list[int], seed: int) -> list[list[Chunk]]:
    """Return steps with chunks of random sizes of random sequences. Chunks of one token are first,
    as in the steps of the engine."""
    generator = random.Random(seed)
    done = [0] * len(lengths)
    steps = []
    while any(first < length for first, length in zip(done, lengths, strict=True)):
        step = []
        for seq, length in enumerate(lengths):
            if done[seq] < length and generator.random() < 0.7:
                end = min(done[seq] + generator.choice(sizes), length)
                step.append((seq, done[seq], end))
                done[seq] = end
        if step:
            steps.append(sorted(step, key=lambda chunk: chunk[2] - chunk[1] > 1))
    return steps


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_have_the_same_bits_in_every_batch_and_chunk(architecture: str) -> None:
    llm = make(architecture)
    sequences = Sequences(llm, prompts(7, seed=1))
    lengths = [len(ids) for ids in sequences.tokens]
    alone = sequences.logits([[(seq, 0, end)] for seq, end in enumerate(lengths)])
    together = sequences.logits([[(seq, 0, end) for seq, end in enumerate(lengths)]])
    assert all(map(torch.equal, together, alone))
    for sizes in ([1], [64, 1], [512, 64, 7]):
        chunked = sequences.logits(random_steps(lengths, sizes, seed=len(sizes)))
        assert all(map(torch.equal, chunked, alone)), f"chunks of {sizes}"


def test_plain_logits_do_depend_on_the_batch() -> None:
    """The comparison above sees differences: without the option there are some."""
    llm = make("llama", deterministic=False)
    sequences = Sequences(llm, prompts(7, seed=1))
    lengths = [len(ids) for ids in sequences.tokens]
    alone = sequences.logits([[(seq, 0, end)] for seq, end in enumerate(lengths)])
    chunked = sequences.logits(random_steps(lengths, [1], seed=1))
    assert not all(map(torch.equal, chunked, alone))


@pytest.mark.parametrize("quantization", slow_after(2, ["int8", "int4-g64", "int4-g32"]))
def test_quantised_weights(quantization: str) -> None:
    llm = make("llama", quantization=quantization)
    sequences = Sequences(llm, prompts(3, seed=2))
    lengths = [len(ids) for ids in sequences.tokens]
    alone = sequences.logits([[(seq, 0, end)] for seq, end in enumerate(lengths)])
    chunked = sequences.logits(random_steps(lengths, [64, 1, 17], seed=2))
    assert all(map(torch.equal, chunked, alone))


# ---- whole requests ------------------------------------------------------------------------------

Reply = tuple[list[int], list[dict[int, float]]]


def replies(outputs: list[RequestOutput]) -> list[Reply]:
    """Return the tokens of each request, and the logprobs at each of them as exact numbers."""
    return [
        (
            list(output.outputs[0].token_ids),
            [
                {token: entry.logprob for token, entry in logprobs.items()}
                for logprobs in output.outputs[0].logprobs or []
            ],
        )
        for output in outputs
    ]


def params(count: int) -> list[SamplingParams]:
    """Half of the requests are greedy, the others are sampled."""
    return [
        SamplingParams(
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=MAX_TOKENS + index % 3,
            ignore_eos=True,
            logprobs=MAX_LOGPROBS,
        )
        for index in range(count)
    ]


SCENARIOS: dict[str, dict[str, Any]] = {
    **{f"batch of {size}": dict(max_num_seqs=size) for size in BATCHES},
    "chunks of 64 in batches": dict(max_num_seqs=7, max_num_batched_tokens=64),
    "chunks of 1": dict(max_num_seqs=1, max_num_batched_tokens=1),
    "chunks of 512": dict(max_num_seqs=64, max_num_batched_tokens=512),
    "prefix hits": dict(max_num_seqs=7, enable_prefix_caching=True),
    "preemption": dict(  # a pool that is full when the replies begin
        max_num_seqs=64,
        max_model_len=LONGEST + 40,
        block_size=SMALL_BLOCK,
        num_gpu_blocks_override=2 * LONGEST // SMALL_BLOCK,
    ),
    "speculation": dict(max_num_seqs=7, speculative_config="ngram,k=3,min=1,adaptive=no"),
    "early exit": dict(max_num_seqs=7, speculative_config="early_exit,layer=1,k=2,adaptive=no"),
    "without graphs": dict(max_num_seqs=7, enforce_eager=True, depth=1),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[LLM, list[Reply]]]:
    """For each architecture an engine, and the replies to requests that it computed alone."""
    return {}


def replies_alone(
    architecture: str, cached: dict[str, tuple[LLM, list[Reply]]]
) -> tuple[LLM, list[Reply]]:
    if architecture not in cached:
        llm = make(architecture)
        outputs = llm.generate(prompts(NUM_PROMPTS), params(NUM_PROMPTS), use_tqdm=False)
        cached[architecture] = (llm, replies(outputs))
    return cached[architecture]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("architecture", slow_after(6 if ON_GPU else 3, ARCHITECTURES))
def test_requests_get_the_same_tokens_and_logprobs(
    architecture: str, scenario: str, alone: dict[str, tuple[LLM, list[Reply]]]
) -> None:
    llm, want = replies_alone(architecture, alone)
    other = llm.with_options(**SCENARIOS[scenario])
    count = 12 if scenario == "chunks of 1" else NUM_PROMPTS  # many steps on a GPU
    for _ in range(2 if scenario == "prefix hits" else 1):
        outputs = other.generate(prompts(count), params(count), use_tqdm=False)
        assert replies(outputs) == want[:count]
    counters = other.engine.scheduler.counters
    if scenario == "preemption":
        assert counters.preemptions > 0
    if scenario == "prefix hits":
        assert counters.cached_tokens > 0


# ---- what the option refuses ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(attention_backend="reference"),
        dict(fused_kernels=False),
        dict(kv_eviction="sinks"),
        dict(tensor_parallel_size=2),
    ],
)
def test_options_that_would_break_the_promise_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="deterministic does not work with"):
        EngineOptions(deterministic=True, **options)


@pytest.mark.skipif(ON_GPU, reason="these formats have kernels on a GPU")
@pytest.mark.parametrize("options", [dict(dtype="bfloat16"), dict(quantization="fp8")])
def test_formats_without_an_invariant_cpu_kernel_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="deterministic"):
        make("llama", **options)
