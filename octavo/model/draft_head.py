"""A trained draft head: one decoder layer that guesses the next tokens of a target model.

The head follows EAGLE-3. Its input at position i is the target's hidden state of position i and the
embedding of token i + 1, and its output predicts token i + 2:

    hidden = fc(hidden states before some layers of the target)     or its final hidden state
    hidden += attention(norm(embed(token i + 1)) | norm(hidden));  hidden += mlp(norm(hidden))
    logits = head(norm(hidden)), over a reduced vocabulary

To draft further, the head is chained: its own output hidden state takes the place of the target's.
The layer has one layer of KV cache with the block tables of the target. The target's embedding is
shared. This module must not depend on scheduling, batching or verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.model import quant
from octavo.model.base import CausalLM, WeightTarget, build
from octavo.model.checkpoint import Checkpoint
from octavo.model.decoder import ACTIVATIONS, TransformerLayer, head_sizes, ropes
from octavo.model.fields import Fields
from octavo.model.layers import Linear, norm_weight, pack_weights
from octavo.model.load import choose_formats, load_weights, open_checkpoint, outline
from octavo.model.rope import rope_table
from octavo.model.tensor_matching import match_tensors
from octavo.ops import ForwardBatch, Ops, Span
from octavo.ops.fused_spec import DecoderSpec, DraftHeadSpec, FusedDraftHead
from octavo.ops.kv import KV
from octavo.ops.weight import QuantWeight

ARCHITECTURE = "LlamaForCausalLMEagle3"  # the name that most public checkpoints state
DRAFT_TO_TARGET = "d2t"  # for each draft token, the id in the target minus the id in the draft


@dataclass(frozen=True)
class DraftConfig(ModelConfig):
    """The sizes of a draft head. `vocab_size` is the number of draft tokens, `num_layers` is 1."""

    target_vocab_size: int = 0
    # The layers of the target whose input hidden states the head reads. Without any, the input is
    # the target's final hidden state, after its last norm.
    target_layers: tuple[int, ...] = ()
    owns_head: bool = True  # False: the head uses rows of the target's output head
    maps_tokens: bool = True  # the vocabulary of drafts is a part of the target's vocabulary
    norms_residual: bool = False  # the residual is the hidden state after its norm


class DraftHead(CausalLM):
    """Call attach() before loading. The target's hidden states come as [T, layers, hidden]."""

    config: DraftConfig
    token_ids: Tensor  # [draft vocabulary] the target's id of each draft token (int64)
    rope: Tensor

    def __init__(self, config: DraftConfig, ops: Ops):
        super().__init__(config, ops)
        hidden = config.hidden_size
        self.fc: Linear | None = None
        if config.target_layers:
            self.fc = Linear(ops, len(config.target_layers) * hidden, {"fc": hidden})
        self.layer = TransformerLayer(config, ops, 0, attention_inputs=2 * hidden)
        self.hidden_norm = norm_weight(hidden)
        self.norm = norm_weight(hidden)
        self.head: nn.Module | None = None
        if config.owns_head:
            self.head = Linear(ops, hidden, {"lm_head": config.vocab_size})
        # Until finish_loading(), these are the distances to the draft's ids, as in a checkpoint.
        offsets = torch.zeros(config.vocab_size, dtype=torch.int64)
        self.register_buffer("token_ids", offsets, persistent=False)
        self.register_buffer(
            "rope", rope_table(config.rope, config.head_dim, config.max_position), persistent=False
        )
        self.fused: FusedDraftHead | None = None  # computes the head in few calls
        self._embed: Callable[[Tensor], Tensor] | None = None
        self._embedding_weight: Callable[[], Any] = lambda: None
        self._target_rows: Callable[[Tensor], Tensor] | None = None

    def attach(self, target: CausalLM) -> None:
        """Share the embedding of the target, and its output head unless this head has its own."""
        # These are functions, because a module would become a part of this one.
        self._embed = target.embed.forward
        if target.embed.scale == 1.0:
            self._embedding_weight = lambda: target.embed.weight
        self._target_rows = target.head_rows

    # ---- computing -------------------------------------------------------------------------------

    def combine(self, target_hidden: Tensor) -> Tensor:
        """Return hidden [T, hidden] for compute() from hidden states of the target.

        They are batch.aux_hidden_states [T, layers, hidden] if config.target_layers is set, and
        otherwise the final hidden states [T, hidden].
        """
        return target_hidden if self.fc is None else self.fc(target_hidden.flatten(1))

    def compute(self, batch: ForwardBatch, kv_cache: KV, hidden: Tensor) -> Tensor:
        """Return the head's hidden states [T, hidden], or those of batch.logit_indices for `last`.

        batch.ids are the tokens after batch.positions. hidden [T, hidden] belongs to
        batch.positions, and its memory may be overwritten. kv_cache is [N, 2, Hk, B, D].
        """
        assert self._embed is not None
        if self.fused is not None:
            return self.fused.compute(hidden, batch, kv_cache)
        ops = self.ops
        epsilon = self.config.norm_eps
        normed = ops.rms_norm(hidden, self.hidden_norm, epsilon)
        embedded = ops.rms_norm(self._embed(batch.ids), self.layer.attn_norm, epsilon)
        return self.layer.add_branches(
            normed=torch.cat((embedded, normed), 1),
            hidden=normed if self.config.norms_residual else hidden,
            batch=batch,
            kv_cache=kv_cache,
            cos_sin=self.rope,
            last=batch.last,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] of compute() -> logits [R, draft vocabulary]"""
        assert self.head is not None
        normed = self.ops.rms_norm(hidden, self.norm, self.config.norm_eps)
        return self.ops.logits(normed, self.head.weight)

    def draft(self, batch: ForwardBatch, kv_cache: KV, hidden: Tensor, count: int) -> Tensor:
        """Return the next `count` tokens that follow batch.ids, [R, count].

        The arguments are those of compute(). The drafts continue the rows of batch.last, or of the
        batch if all items have one token. The sequences need blocks for count - 1 more positions.
        """
        hidden = self.compute(batch, kv_cache, hidden)
        rows = batch.last or batch
        tokens = self.token_ids[self.logits(hidden).argmax(1)]
        drafted = [tokens]
        for _ in range(1, count):
            rows = following(rows, tokens, kv_cache.shape[-2])
            hidden = self.compute(rows, kv_cache, hidden)
            tokens = self.token_ids[self.logits(hidden).argmax(1)]
            drafted.append(tokens)
        return torch.stack(drafted, 1)

    # ---- loading ---------------------------------------------------------------------------------

    def weight_map(self) -> dict[str, WeightTarget]:
        targets = self.layer.weight_targets("midlayer.")
        targets["midlayer.hidden_norm.weight"] = WeightTarget(self.hidden_norm)
        targets["norm.weight"] = WeightTarget(self.norm)
        if self.fc is not None:
            targets |= self.fc.weight_targets()
        if isinstance(self.head, Linear):
            targets |= self.head.weight_targets()
        if self.config.maps_tokens:
            targets[DRAFT_TO_TARGET] = WeightTarget(self.token_ids)
        return targets

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Return the name as EAGLE spells it. Speculators and vLLM call the layer `layers.0`."""
        name = name.removeprefix("model.")
        return f"midlayer.{name[9:]}" if name.startswith("layers.0.") else name

    def ignored_weights(self) -> set[str]:
        """Return the names of tensors that repeat others: the inverse of d2t, the embedding."""
        return {"t2d", "embed_tokens.weight", DRAFT_TO_TARGET}

    def finish_loading(self) -> None:
        self.token_ids += torch.arange(len(self.token_ids), device=self.token_ids.device)
        largest = self.config.target_vocab_size - 1
        if not 0 <= int(self.token_ids.min()) <= int(self.token_ids.max()) <= largest:
            raise ModelError(
                f"{DRAFT_TO_TARGET} of the draft head names tokens outside 0 to {largest}, the "
                "target's vocabulary. Use a draft head that was trained for this model"
            )
        if self.head is None:
            self.head = self._head_of_target()
        pack_weights(self)
        self.fused = self.ops.fuse_draft_head(self.spec())

    def spec(self) -> DraftHeadSpec:
        """Return the head as data, for a backend that computes it in few calls."""
        assert self.head is not None
        config = self.config
        decoder = DecoderSpec(
            layers=[self.layer.spec(self.rope)],
            norm=self.norm,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            scale=config.scale,
            gelu=config.activation != "silu",
            dtype=self.dtype,
            head=self.head.weight,
        )
        return DraftHeadSpec(
            decoder=decoder,
            embedding=self._embedding_weight(),
            hidden_norm=self.hidden_norm,
            token_ids=self.token_ids,
            norms_residual=config.norms_residual,
        )

    def _head_of_target(self) -> Linear:
        """Return the rows of the target's head. They are quantised if the layer is."""
        assert self._target_rows is not None
        rows = self._target_rows(self.token_ids)
        head = self.empty_head(str(rows.device))
        if isinstance(head.weight, QuantWeight):
            quant.fill(head.weight, rows)
        else:
            head.weight = nn.Parameter(rows.to(self.dtype), requires_grad=False)
        return head

    def empty_head(self, device: str) -> Linear:
        """Return an output head for the draft tokens, with the format of the layer.

        Only a quantised head has memory.
        """
        with torch.device("meta"):
            head = Linear(self.ops, self.config.hidden_size, {"lm_head": self.config.vocab_size})
        if isinstance(self.layer.qkv.weight, QuantWeight):
            head.quantize(self.layer.qkv.weight.format, device)
        return head


def following(rows: ForwardBatch, tokens: Tensor, block_size: int) -> ForwardBatch:
    """Return the batch of the next position of each row. `rows` has one token for each item."""
    positions = rows.positions + 1
    blocks = rows.block_table[rows.slots.long(), positions // block_size].long()
    return replace(
        rows,
        ids=tokens,
        positions=positions,
        kv_indices=blocks * block_size + positions % block_size,
        seq_lens=rows.seq_lens + 1,
        spans=[Span(span.first, 1, span.end + 1) for span in rows.spans],
        scratch={},
    )


# ---- config.json and checkpoints -----------------------------------------------------------------


def load_draft_head(source: str | Path, target: CausalLM) -> DraftHead:
    """Load a draft head from a directory or the hub, for a target that is loaded already.

    The head has the device, the dtype and the ops of the target. The target then captures the
    hidden states that the head needs.
    """
    checkpoint = open_checkpoint(source)
    config = parse_draft_config(checkpoint, target.config)
    ops = target.ops
    device = str(next(target.parameters()).device)
    formats = choose_formats("auto", checkpoint, ops.name)
    match_tensors(outline(config, DraftHead, ops, target.dtype, formats), checkpoint)
    head = build(config, DraftHead, ops, target.dtype, device, formats)
    assert isinstance(head, DraftHead)
    head.attach(target)
    load_weights(head, checkpoint, progress=False)
    if config.target_layers:
        target.set_aux_hidden_state_layers(config.target_layers)
    return head


def outline_draft_head(
    checkpoint: Checkpoint, target: ModelConfig, ops: Ops, dtype: torch.dtype
) -> DraftHead:
    """Return the draft head without memory for its weights: their shapes and sizes."""
    config = parse_draft_config(checkpoint, target)
    formats = choose_formats("auto", checkpoint, ops.name)
    head = outline(config, DraftHead, ops, dtype, formats)
    assert isinstance(head, DraftHead)
    if head.head is None:  # it will have rows of the target's head
        head.head = head.empty_head("meta")
    return head


def parse_draft_config(checkpoint: Checkpoint, target: ModelConfig) -> DraftConfig:
    """Read the config.json of a draft head for this target."""
    layer_config = checkpoint.config.get("transformer_layer_config")  # as Speculators nests it
    fields = Fields(checkpoint.config | (layer_config if isinstance(layer_config, dict) else {}))
    num_layers = fields.positive_int("num_hidden_layers", 1)
    if num_layers != 1:
        raise ModelError(
            f"config.json: a draft head must have 1 layer, but num_hidden_layers is {num_layers}"
        )
    heads = head_sizes(fields)
    target_vocab_size = fields.positive_int("vocab_size", target.vocab_size)
    expected = {"hidden_size": heads.hidden_size, "vocab_size": target_vocab_size}
    for name, value in expected.items():
        if value != getattr(target, name):
            raise ModelError(
                f"{checkpoint.source} is a draft head for a model with {name} {value}, but the "
                f"target has {getattr(target, name)}. Use a draft head that was trained for this "
                "model, or train one: octavo train-draft"
            )
    vocab_size = fields.positive_int("draft_vocab_size", target_vocab_size)
    stored = {DraftHead.canonical_name(name) for name in checkpoint.tensors}
    has_bias = fields.boolean("attention_bias")
    return DraftConfig(
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=heads.hidden_size,
        num_layers=1,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        intermediate_size=fields.positive_int("intermediate_size"),
        max_position=target.max_position,
        norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias"),
        rope=ropes(fields, is_gemma=False)["rope"],
        target_vocab_size=target_vocab_size,
        target_layers=target_layers(fields, target.num_layers),
        owns_head="lm_head.weight" in stored or not fields.boolean("shares_target_head"),
        maps_tokens=vocab_size != target_vocab_size or DRAFT_TO_TARGET in stored,
        norms_residual=fields.boolean("norm_before_residual"),
    )


def target_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose input hidden states the head reads.

    EAGLE's default is one low, one middle and one high layer. SGLang and SpecForge list layers in
    eagle_config and mean the hidden states after them. Speculators lists them at the top level and
    means the hidden states before them.
    """
    eagle_config = Fields(fields.json_object("eagle_config"))
    if not eagle_config.boolean("use_aux_hidden_state", True):
        return ()
    name = "eagle_aux_hidden_state_layer_ids"
    after = eagle_config.token_ids(name)
    before = tuple(layer + 1 for layer in after) or fields.token_ids(name)
    return before or (2, num_layers // 2, num_layers - 3)


def draft_config_json(config: DraftConfig) -> dict[str, Any]:
    """Return the content of config.json for a head that parse_draft_config() reads back.

    The head shares the target's output head and reads its final hidden state.
    """
    return {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.target_vocab_size,
        "draft_vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "eagle_config": {"use_aux_hidden_state": False},
        "shares_target_head": True,
    }
