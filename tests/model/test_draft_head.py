"""A draft head computes what EAGLE-3 defines: through a paged cache, in chunks, chained, in every
spelling of its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import CheckpointError, ModelError
from octavo.model import CausalLM
from octavo.model.draft_head import DraftHead, load_draft_head
from octavo.model.load import LoadOptions, load_model
from octavo.ops.backends import select
from tests import tiny
from tests.batch import empty_kv, make_batch, scattered_tables
from tests.conftest import DEVICE

HIDDEN = 32
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
DRAFT_VOCAB = 50
BLOCK = 4
CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLMEagle3"],
    num_hidden_layers=1,
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    vocab_size=tiny.SMALL["vocab_size"],
    draft_vocab_size=DRAFT_VOCAB,
    rms_norm_eps=1e-5,
    rope_theta=500.0,
    eagle_config={"eagle_aux_hidden_state_layer_ids": [0]},  # the hidden states before layer 1
)
SHARED = {"eagle_config": {"use_aux_hidden_state": False}, "shares_target_head": True}


def load_target(architecture: str = "llama") -> CausalLM:
    options = LoadOptions(dtype="float32", device=DEVICE)
    model, _ = load_model(tiny.model_dir(architecture), options, ops=select(DEVICE), progress=False)
    return model


def random_tensors(captured: int = 1, owns_head: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) * 0.3

    tensors = {
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": matrix(40, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(40, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, 40),
        "d2t": torch.randperm(300, generator=generator)[:DRAFT_VOCAB].sort().values
        - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(300, dtype=torch.bool),
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
    tensors["norm.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
    if captured:
        tensors["fc.weight"] = matrix(HIDDEN, captured * HIDDEN)
    if owns_head:
        tensors["lm_head.weight"] = matrix(DRAFT_VOCAB, HIDDEN)
    return tensors


def write_head(path: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors, path / "model.safetensors")
    return path


# ---- the reference: EAGLE-3 for one sequence, with full attention and without a cache ------------


def norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, 1e-5)


def rotate(heads: Tensor) -> Tensor:
    """heads [T, H, D], rotated by position"""
    frequencies = 500.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(len(heads))[:, None] * frequencies
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def reference_layer(
    tensors: dict[str, Tensor], embedded: Tensor, hidden: Tensor, norms_residual: bool = False
) -> Tensor:
    """embedded [T, hidden] of tokens 1.., hidden [T, hidden] of positions 0.. -> [T, hidden]"""
    weights = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}
    normed = norm(hidden, weights["hidden_norm.weight"])
    both = torch.cat((norm(embedded, weights["input_layernorm.weight"]), normed), -1)
    query, key, value = (
        F.linear(both, weights[f"self_attn.{name}_proj.weight"]).unflatten(1, (-1, HEAD_DIM))
        for name in "qkv"
    )
    repeats = HEADS // KV_HEADS
    key = rotate(key).repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", rotate(query), key) * HEAD_DIM**-0.5
    future = torch.ones(len(hidden), len(hidden), dtype=torch.bool).triu(1)
    weighted = scores.masked_fill(future, -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weighted, value).flatten(1)
    residual = normed if norms_residual else hidden
    hidden = residual + F.linear(attended, weights["self_attn.o_proj.weight"])
    normed = norm(hidden, weights["post_attention_layernorm.weight"])
    gate = F.linear(normed, weights["mlp.gate_proj.weight"])
    up = F.linear(normed, weights["mlp.up_proj.weight"])
    return hidden + F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"])


def reference_draft(
    tensors: dict[str, Tensor],
    target: CausalLM,
    tokens: list[int],
    hidden: Tensor,
    count: int,
    **options: bool,
) -> tuple[list[int], list[Tensor]]:
    """Draft after `tokens`, whose last one has no hidden state yet. Return the drafts and the
    logits of each."""
    tokens = list(tokens)
    drafted: list[int] = []
    all_logits: list[Tensor] = []
    ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    head = tensors.get("lm_head.weight")
    if head is None:
        head = target.head_rows(ids.to(DEVICE)).cpu().float()
    if "fc.weight" in tensors:
        hidden = F.linear(hidden.flatten(1), tensors["fc.weight"])
    for _ in range(count):
        embedded = target.embed(torch.tensor(tokens[1:], device=DEVICE)).cpu().float()
        output = reference_layer(tensors, embedded, hidden, **options)
        logits = F.linear(norm(output[-1], tensors["norm.weight"]), head)
        drafted.append(int(ids[logits.argmax()]))
        all_logits.append(logits)
        tokens.append(drafted[-1])
        hidden = torch.cat((hidden, output[-1:]))
    return drafted, all_logits


def target_hidden(target: CausalLM, tokens: list[int], captured: bool) -> Tensor:
    """The target's hidden states of all tokens but the last, computed in one piece."""
    tables = scattered_tables([len(tokens)], BLOCK)
    batch = make_batch([(tokens[:-1], 0)], tables, BLOCK, DEVICE)
    final = target(batch, empty_kv(target.config, tables, BLOCK, DEVICE))
    if not captured:
        return final
    assert batch.aux_hidden_states is not None
    return batch.aux_hidden_states


def draft_in_chunks(
    head: DraftHead,
    sequences: list[list[int]],
    hidden: list[Tensor],
    cut: int,
    count: int,
) -> Tensor:
    """Prefill the head with the positions up to `cut`, then with the rest, and draft."""
    tables = scattered_tables([len(tokens) + count for tokens in sequences], BLOCK)
    kv = empty_kv(head.config, tables, BLOCK, DEVICE)[:, 0]
    drafted = None
    for first, last in ((0, cut), (cut, None)):
        parts = [slice(first, len(tokens) - 1 if last is None else last) for tokens in sequences]
        chunks = [
            (tokens[part.start + 1 : part.stop + 1], part.start)
            for tokens, part in zip(sequences, parts, strict=True)
        ]
        if not chunks[0][0]:
            continue
        batch = make_batch(chunks, tables, BLOCK, DEVICE)
        ends = batch.query_start[1:].long() - 1
        batch.logit_indices = ends
        if len(batch.ids) > len(chunks):
            single = [([tokens[-1]], start + len(tokens) - 1) for tokens, start in chunks]
            batch.last = make_batch(single, tables, BLOCK, DEVICE)
        states = torch.cat(
            [states[part] for states, part in zip(hidden, parts, strict=True)]
        ).clone()
        drafted = head.draft(batch, kv, head.combine(states), 1 if last else count)
    assert drafted is not None
    return drafted


SEQUENCES = [list(range(40, 60)), [5, 9, 250, 17, 17, 8, 90, 91, 92, 93, 11]]


@pytest.mark.parametrize("cut", [0, 1, 6, 9])
@pytest.mark.parametrize("form", ["captured", "final", "residual"])
@torch.inference_mode()
def test_drafts_are_those_of_the_reference_wherever_the_prompt_is_cut(
    tmp_path: Path, form: str, cut: int
) -> None:
    target = load_target()
    captured = form != "final"
    tensors = random_tensors(captured=1 if captured else 0, owns_head=captured)
    changes: dict[str, Any] = {} if captured else SHARED
    if form == "residual":
        changes = {"norm_before_residual": True}
    head = load_draft_head(write_head(tmp_path, tensors, **changes), target)
    hidden = [target_hidden(target, tokens, captured) for tokens in SEQUENCES]
    drafted = draft_in_chunks(head, SEQUENCES, hidden, cut, count=4)
    for tokens, states, drafts in zip(SEQUENCES, hidden, drafted.tolist(), strict=True):
        expected, _ = reference_draft(
            tensors, target, tokens, states.cpu(), 4, norms_residual=form == "residual"
        )
        assert drafts == expected


@torch.inference_mode()
def test_logits_are_those_of_the_reference(tmp_path: Path) -> None:
    target = load_target()
    tensors = random_tensors()
    head = load_draft_head(write_head(tmp_path, tensors), target)
    tokens = SEQUENCES[0]
    hidden = target_hidden(target, tokens, captured=True)
    tables = scattered_tables([len(tokens)], BLOCK)
    batch = make_batch([(tokens[1:], 0)], tables, BLOCK, DEVICE)
    kv = empty_kv(head.config, tables, BLOCK, DEVICE)[:, 0]
    output = head.compute(batch, kv, head.combine(hidden))
    _, (expected,) = reference_draft(tensors, target, tokens, hidden.cpu(), 1)
    torch.testing.assert_close(head.logits(output)[-1].cpu(), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_spelling_of_vllm_and_a_stored_embedding_load_the_same_head(tmp_path: Path) -> None:
    target = load_target()
    tensors = random_tensors()
    head = load_draft_head(write_head(tmp_path / "eagle", tensors), target)
    respelled = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    respelled["embed_tokens.weight"] = torch.zeros(300, HIDDEN)
    other = load_draft_head(write_head(tmp_path / "vllm", respelled), target)
    for (name, expected), actual in zip(head.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(expected.to_dense(), actual.to_dense()), name
    assert torch.equal(head.token_ids, other.token_ids)


@pytest.mark.parametrize("architecture", list(tiny.ARCHITECTURES))
@torch.inference_mode()
def test_rows_of_the_targets_head_are_its_logits(architecture: str) -> None:
    target = load_target(architecture)
    ids = torch.tensor([3, 17, 299], device=DEVICE)
    hidden = torch.randn(5, HIDDEN, device=DEVICE)
    rows = target.head_rows(ids).float()
    torch.testing.assert_close(
        F.linear(hidden, rows), target.logits(hidden)[:, ids].float(), atol=1e-4, rtol=1e-4
    )


@torch.inference_mode()
def test_captured_states_are_those_before_the_layers_and_change_nothing() -> None:
    target = load_target("qwen3")
    tokens = SEQUENCES[0]
    plain = target_hidden(target, tokens, captured=False)
    seen: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
        for layer in target.layers  # type: ignore[union-attr]
    ]
    target.set_aux_hidden_state_layers((1, 0))
    captured = target_hidden(target, tokens, captured=True)
    for hook in hooks:
        hook.remove()
    assert torch.equal(captured, torch.stack((seen[1], seen[0]), 1))
    assert torch.equal(target_hidden(target, tokens, captured=False), plain)


def test_default_layers_are_a_low_a_middle_and_a_high_one() -> None:
    from octavo.model.draft_head import target_layers
    from octavo.model.fields import Fields

    assert target_layers(Fields({}), 32) == (2, 16, 29)
    after = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}
    assert target_layers(Fields(after), 32) == (2, 16, 29)
    before = {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}
    assert target_layers(Fields(before), 32) == (2, 16, 29)


# ---- errors --------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["fc.weight"], tensors["lm_head.weight"], tensors["d2t"]
    with pytest.raises(CheckpointError, match="3 missing:") as error:
        load_draft_head(write_head(tmp_path, tensors), load_target())
    for name in ("fc.weight [32, 32]", "lm_head.weight [50, 32]", "d2t [50]"):
        assert name in str(error.value)


def test_a_tensor_of_the_wrong_size_is_named(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["lm_head.weight"] = torch.zeros(49, HIDDEN)
    with pytest.raises(CheckpointError, match=r"lm_head.weight \[49, 32\]: must be \[50, 32\]"):
        load_draft_head(write_head(tmp_path, tensors), load_target())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 64, but the target has 32"),
        ({"vocab_size": 1000}, "vocab_size 1000, but the target has 300"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, "layers of this model are"),
    ],
)
def test_a_head_for_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_draft_head(write_head(tmp_path, random_tensors(), **changes), load_target())


@pytest.mark.parametrize("shared", [True, False])
def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, shared: bool) -> None:
    tensors = random_tensors(captured=0 if shared else 1, owns_head=not shared)
    tensors["d2t"][-1] = 400
    path = write_head(tmp_path, tensors, **(SHARED if shared else {}))
    with pytest.raises(ModelError, match="names tokens outside 0 to 299"):
        load_draft_head(path, load_target())


def test_a_model_that_cannot_capture_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="final hidden state only"):
        load_draft_head(write_head(tmp_path, random_tensors()), load_target("gpt2"))
