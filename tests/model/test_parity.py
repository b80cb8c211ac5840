"""Every architecture computes what transformers computes: each layer's output, the logits and the
generated tokens, alone and in ragged batches, with the prompt in one piece or in chunks, through a
scattered paged cache."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo.model import CausalLM, build, registry
from octavo.model.base import HEAD
from octavo.model.load import load_model
from octavo.model.rope import rope_table
from octavo.ops.backends import select
from tests.batch import empty_kv, make_batch, scattered_tables
from tests.conftest import DEVICE

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity
torch.backends.cuda.matmul.allow_tf32 = False

ATOL = 1e-4
VOCAB = 97
# of the prompts: with 64 generated tokens the last reaches 134, in a context of 256
LENGTHS = (37, 3, 70)

COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=2,
    max_position_embeddings=256,
)
MHA = dict(COMMON, num_attention_heads=4, num_key_value_heads=4)  # head_dim 16
GQA = dict(COMMON, num_attention_heads=4, num_key_value_heads=2)
GEMMA = dict(GQA, head_dim=32, sliding_window=20, num_hidden_layers=3)
LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, **parameters}}


GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
GPT2_SMALL = dict(vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=3, n_positions=256)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(MHA)),
    "llama-tied": ("Llama", dict(GQA, tie_word_embeddings=True)),
    # head_dim 32
    "llama-one-kv-head": ("Llama", dict(COMMON, num_attention_heads=2, num_key_value_heads=1)),
    "llama-head-dim-64": (
        "Llama",
        dict(COMMON, num_attention_heads=8, num_key_value_heads=2, head_dim=64),
    ),
    "llama-biases": ("Llama", dict(GQA, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3)),
    "llama-rope-linear": ("Llama", dict(GQA, **rope(rope_type="linear", factor=3.0))),
    "llama-rope-llama3": ("Llama", dict(GQA, **rope(**LLAMA3))),
    "llama-rope-dynamic": ("Llama", dict(GQA, **rope(rope_type="dynamic", factor=2.0))),
    "llama-rope-yarn": ("Llama", dict(GQA, **rope(**YARN))),
    "llama-rope-yarn-betas": (
        "Llama",
        dict(GQA, **rope(**YARN, beta_fast=8.0, beta_slow=2.0, attention_factor=0.7)),
    ),
    "llama-rope-yarn-mscale": (
        "Llama",
        dict(GQA, **rope(**YARN, mscale=0.7, mscale_all_dim=1.2, truncate=False)),
    ),
    "mistral-window": ("Mistral", dict(GQA, sliding_window=20)),
    "mistral": ("Mistral", dict(GQA, head_dim=32, sliding_window=None)),
    "qwen2": ("Qwen2", dict(GQA, tie_word_embeddings=True)),
    "qwen2-window": (
        "Qwen2",
        dict(MHA, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", dict(GQA, head_dim=32)),
    "qwen3-tied": ("Qwen3", dict(GQA, head_dim=16, tie_word_embeddings=True, attention_bias=True)),
    "qwen3-layer-types": (
        "Qwen3",
        dict(
            GQA,
            head_dim=32,
            num_hidden_layers=3,
            use_sliding_window=True,
            sliding_window=9,
            layer_types=LOCAL_GLOBAL,
        ),
    ),
    "gemma3": ("Gemma3", dict(GEMMA, layer_types=LOCAL_GLOBAL, query_pre_attn_scalar=32)),
    "gemma3-pattern": (
        "Gemma3",
        dict(GEMMA, sliding_window_pattern=3, query_pre_attn_scalar=100, tie_word_embeddings=False),
    ),
    "gemma3-rope": (
        "Gemma3",
        dict(GEMMA, layer_types=LOCAL_GLOBAL, query_pre_attn_scalar=24, rope_parameters=GEMMA_ROPE),
    ),
    "gpt2": ("GPT2", dict(GPT2_SMALL)),
    "gpt2-untied": (
        "GPT2",
        dict(GPT2_SMALL, n_head=4, n_inner=60, scale_attn_weights=False, tie_word_embeddings=False),
    ),
}
EACH_ARCHITECTURE = ["llama", "mistral-window", "qwen2", "qwen3", "gemma3", "gpt2"]


class Expected(NamedTuple):
    """Transformers' answer for one prompt."""

    layers: list[Tensor]  # each [tokens, hidden]
    logits: Tensor  # [tokens, vocab]


class Pair(NamedTuple):
    theirs: Any
    ours: CausalLM
    prompts: list[list[int]]
    expected: list[Expected]


def randomise(model: nn.Module) -> None:
    """Weights that make every part matter: attention is neither uniform nor one-hot, no norm is the
    identity, no bias is 0."""
    generator, kind = torch.Generator().manual_seed(1), type(model).__name__
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "embed" in name or ".wte." in name:
            # Gemma scales it up
            p.data.copy_(0.2 * noise if "Gemma" not in kind else 0.5 * noise / p.shape[1] ** 0.5)
        elif p.dim() == 2:
            inputs = p.shape[0] if "GPT2" in kind and ".h." in name else p.shape[1]
            p.data.copy_(1.5 * noise / inputs**0.5)
        elif "norm" in name or ".ln_" in name:
            p.data.add_(0.3 * noise)
        else:
            p.data.copy_(0.5 * noise)


def config_json(case: str, theirs: Any) -> dict[str, Any]:
    """Without layer_types unless the case gives them: published files seldom hold what transformers
    derived from the rest."""
    derived = {
        name: value for name, value in theirs.config.to_dict().items() if name != "layer_types"
    }
    return {**derived, **CASES[case][1], "architectures": [type(theirs).__name__]}


def transfer(theirs: Any, ours: CausalLM) -> None:
    """What the loader does, with every tensor accounted for."""
    targets = ours.weight_map()
    for name, value in theirs.state_dict().items():
        name = ours.canonical_name(name)
        if name in targets:
            target = targets.pop(name)
            assert (
                target.dest.shape
                == (value if target.transform is None else target.transform(value)).shape
            ), name
            target.fill(value)
        else:
            tied = ours.config.tied and name == HEAD
            assert tied or name in ours.ignored_weights(), f"unexpected: {name}"
    assert not targets, f"missing: {list(targets)}"
    ours.finish_loading()


def layers_of(model: Any) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


class Recorder:
    """Collects what each layer of a model returns: the residual stream [tokens, hidden]."""

    def __init__(self, model: Any):
        self.outputs: list[Tensor] = []
        self.hooks = [layer.register_forward_hook(self.keep) for layer in layers_of(model)]

    def keep(self, module: nn.Module, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        # ours is overwritten by the next layer
        self.outputs.append(output.reshape(-1, output.shape[-1]).clone())

    def __enter__(self) -> list[Tensor]:
        return self.outputs

    def __exit__(self, *_: Any) -> None:
        for hook in self.hooks:
            hook.remove()


@cache
def pair(case: str, dtype: torch.dtype = torch.float32) -> Pair:
    """Both models with the same weights, and transformers' answers, computed once for all tests."""
    family, options = CASES[case]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(
        **copy.deepcopy(options), eos_token_id=None, bos_token_id=None
    )
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    theirs = getattr(transformers, family + head)(config).eval()
    randomise(theirs)
    theirs = theirs.to(DEVICE, dtype)
    hf = config_json(case, theirs)
    ours = build(registry.parse(hf), registry.find(hf), select(DEVICE), dtype, DEVICE)
    transfer(theirs, ours)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    expected = []
    for prompt in prompts:
        with torch.inference_mode(), Recorder(theirs) as layers:
            logits = theirs(torch.tensor([prompt], device=DEVICE)).logits[0]
        expected.append(Expected(layers, logits))
    return Pair(theirs, ours, prompts, expected)


@torch.inference_mode()
def run(
    p: Pair, prompts: Sequence[list[int]], chunk: int, decode: int, block_size: int, slack: int = 0
) -> list[Expected]:
    """All prompts through our model in one ragged batch: `chunk` tokens a step, the last `decode`
    one by one."""
    tables = scattered_tables([len(prompt) for prompt in prompts], block_size)
    dtype = p.ours.dtype
    kv = empty_kv(p.ours.config, tables, block_size, DEVICE, dtype)
    depth = p.ours.config.num_layers
    layers: list[list[list[Tensor]]] = [[[] for _ in range(depth)] for _ in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while live := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
        chunks = []
        for i in live:
            prefill = len(prompts[i]) - decode - done[i]
            chunks.append(
                (
                    prompts[i][done[i] : done[i] + (min(chunk, prefill) if prefill > 0 else 1)],
                    done[i],
                )
            )
        batch = make_batch(chunks, [tables[i] for i in live], block_size, DEVICE, slack)
        with Recorder(p.ours) as outputs:
            step = p.ours.logits(p.ours(batch, kv))
        for i, span in zip(live, batch.spans, strict=True):
            mine = slice(span.first, span.first + span.num)
            logits[i].append(step[mine])
            for depth_, output in enumerate(outputs):
                layers[i][depth_].append(output[mine])
            done[i] += span.num
    return [
        Expected([torch.cat(parts) for parts in layers[i]], torch.cat(logits[i]))
        for i in range(len(prompts))
    ]


def assert_same(got: Expected, expected: Expected) -> None:
    for depth, (a, b) in enumerate(zip(got.layers, expected.layers, strict=True)):
        torch.testing.assert_close(
            a, b, atol=ATOL, rtol=0, msg=lambda m, depth=depth: f"layer {depth}: {m}"
        )
    torch.testing.assert_close(got.logits, expected.logits, atol=ATOL, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_each_prompt_alone(case: str) -> None:
    p = pair(case)
    for prompt, expected in zip(p.prompts, p.expected, strict=True):
        [got] = run(p, [prompt], chunk=len(prompt), decode=0, block_size=16)
        assert_same(got, expected)


@pytest.mark.parametrize(
    ("chunk", "block_size", "slack"), [(1, 16, 0), (7, 16, 5), (16, 8, 0), (64, 16, 40)]
)
@pytest.mark.parametrize("case", CASES)
def test_ragged_batches_of_chunks_then_decoding(
    case: str, chunk: int, block_size: int, slack: int
) -> None:
    p = pair(case)
    for got, expected in zip(
        run(p, p.prompts, chunk, 6, block_size, slack), p.expected, strict=True
    ):
        assert_same(got, expected)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_64_greedy_tokens(case: str) -> None:
    p = pair(case)
    tables = scattered_tables([n + 64 for n in LENGTHS], 16)
    kv = empty_kv(p.ours.config, tables, 16, DEVICE)
    chunks = [(prompt, 0) for prompt in p.prompts]
    texts = [list(prompt) for prompt in p.prompts]
    for _ in range(64):
        batch = make_batch(chunks, tables, 16, DEVICE)
        last = (batch.query_start[1:] - 1).long()
        tokens = p.ours.logits(p.ours(batch, kv)[last]).argmax(-1).tolist()
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        chunks = [([text[-1]], len(text) - 1) for text in texts]
    written = {
        token
        for prompt, text in zip(p.prompts, texts, strict=True)
        for token in text[len(prompt) :]
    }
    assert len(written) > 5, "weights that repeat themselves would prove little"
    for prompt, text in list(zip(p.prompts, texts, strict=True))[:2]:
        ids = torch.tensor([prompt], device=DEVICE)
        mask = torch.ones_like(ids)
        theirs = p.theirs.generate(
            ids, attention_mask=mask, max_new_tokens=64, do_sample=False, pad_token_id=0
        )[0]
        assert text == theirs.tolist()


@pytest.mark.parametrize("case", EACH_ARCHITECTURE)
def test_bfloat16_is_as_close_to_the_truth_as_theirs(case: str) -> None:
    """Rounding differs, so the yardstick is float32: ours errs no more than transformers' own
    bfloat16."""
    truth, half = pair(case), pair(case, torch.bfloat16)
    got = run(half, half.prompts, chunk=16, decode=6, block_size=16)
    ours = torch.cat(
        [(g.logits.float() - t.logits).flatten() for g, t in zip(got, truth.expected, strict=True)]
    )
    theirs = torch.cat(
        [
            (e.logits.float() - t.logits).flatten()
            for e, t in zip(half.expected, truth.expected, strict=True)
        ]
    )
    assert ours.square().mean().sqrt() < 1.3 * theirs.square().mean().sqrt()


def test_gpt2_checkpoints_without_prefix_and_with_saved_masks() -> None:
    hf = config_json("gpt2", pair("gpt2").theirs)
    model = build(registry.parse(hf), registry.find(hf), select(DEVICE), torch.float32, DEVICE)
    needed = set(model.weight_map())
    masks = {"h.0.attn.bias", "h.1.attn.masked_bias"}
    saved = {name.removeprefix("transformer.") for name in needed} | masks
    names = {model.canonical_name(name) for name in saved}
    assert needed <= names
    assert names - needed <= model.ignored_weights()
    assert not needed & model.ignored_weights()


# ---- a head beside a config.json that ties it ----------------------------------------------------


def save_with_head(case: str, directory: Path, head: str) -> Any:
    """Transformers' model of a case whose config.json ties the head: with a head that differs from
    the embedding, a second copy of the embedding, or the head alone."""
    family, options = CASES[case]
    config = getattr(transformers, f"{family}Config")(
        **copy.deepcopy(options)
        | {"tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(model)
    embedding = model.get_input_embeddings().weight
    if head != "different":
        model.get_output_embeddings().weight.data.copy_(embedding)
    model.save_pretrained(directory)
    about = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(about | {"tie_word_embeddings": True}))
    if head == "alone":
        tensors = load_file(directory / "model.safetensors")
        del tensors["transformer.wte.weight" if family == "GPT2" else "model.embed_tokens.weight"]
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("head", ["different", "equal", "alone"])
@pytest.mark.parametrize("case", ["llama", "gpt2"])
@torch.inference_mode()
def test_a_tied_config_uses_the_head_that_the_checkpoint_has(
    case: str, head: str, tmp_path: Path
) -> None:
    theirs = save_with_head(case, tmp_path, head)
    ours, _ = load_model(tmp_path, ops=select("cpu"), progress=False)
    assert ours.config.tied is (head != "different")
    assert (ours.head is None) is (head != "different")  # no second copy is held
    prompt = list(range(30))
    tables = scattered_tables([len(prompt)], 16)
    batch = make_batch([(prompt, 0)], tables, 16, "cpu")
    got = ours.logits(ours(batch, empty_kv(ours.config, tables, 16, "cpu")))
    torch.testing.assert_close(got, theirs(torch.tensor([prompt])).logits[0], atol=ATOL, rtol=0)


# ---- positions beyond max_position_embeddings ----------------------------------------------------

TRAINED = 64
LONG_ROPES = {
    "linear": dict(rope_type="linear", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=TRAINED),
    "yarn-without-length": dict(rope_type="yarn", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
}


@pytest.mark.parametrize("kind", LONG_ROPES)
@torch.inference_mode()
def test_scaled_rope_reaches_beyond_the_trained_length(kind: str) -> None:
    """Transformers gets the prompt token by token: its dynamic rope would otherwise depend on the
    prompt's chunks."""
    fields = dict(GQA, max_position_embeddings=TRAINED, **rope(**LONG_ROPES[kind]))
    config = transformers.LlamaConfig(**copy.deepcopy(fields), eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    randomise(theirs)
    hf = {**fields, "architectures": ["LlamaForCausalLM"]}
    parsed = registry.parse(hf)
    assert parsed.max_position == 4 * TRAINED
    ours = build(parsed, registry.find(hf), select("cpu"), torch.float32, "cpu")
    transfer(theirs, ours)
    prompt = torch.randint(0, VOCAB, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    cache = transformers.DynamicCache(config=config)
    expected = torch.cat(
        [theirs(torch.tensor([[id]]), past_key_values=cache).logits[0] for id in prompt]
    )
    tables = scattered_tables([len(prompt)], 16)
    kv = empty_kv(ours.config, tables, 16, "cpu")
    got = ours.logits(ours(make_batch([(prompt, 0)], tables, 16, "cpu"), kv))
    torch.testing.assert_close(got, expected, atol=ATOL, rtol=0)


def test_qwen_with_its_documented_yarn_reaches_131072_positions() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    fields = dict(GQA, max_position_embeddings=32768, rope_theta=1e6, rope_scaling=yarn)
    config = registry.parse({**fields, "architectures": ["Qwen2ForCausalLM"]})
    assert config.max_position == 131_072
    theirs = transformers.Qwen2Config(**copy.deepcopy(fields))
    rotary = transformers.models.qwen2.modeling_qwen2.Qwen2RotaryEmbedding(theirs)
    positions = torch.tensor([[0, 32767, 32768, 100_000, 131_071]])
    cos, sin = rotary(torch.zeros(1), positions)
    table = rope_table(config.rope, config.head_dim, config.max_position)[positions[0]]
    half = config.head_dim // 2
    torch.testing.assert_close(table[:, 0], cos[0, :, :half])
    torch.testing.assert_close(table[:, 1], sin[0, :, :half])


def test_llama3_rope_and_gemma_state_the_length_after_scaling() -> None:
    llama = dict(GQA, max_position_embeddings=131_072, rope_scaling=LLAMA3)
    gemma = dict(GEMMA, max_position_embeddings=131_072, rope_parameters=GEMMA_ROPE)
    for architecture, fields in (("LlamaForCausalLM", llama), ("Gemma3ForCausalLM", gemma)):
        config = registry.parse({**fields, "architectures": [architecture]})
        assert config.max_position == 131_072
