"""GPT-2: learned positions, LayerNorm, biases everywhere, and matrices stored as [in, out].

The model must not depend on batching, paging (ops does both), devices or checkpoint files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from octavo.config import ModelConfig, Share
from octavo.errors import ModelError
from octavo.model.base import CausalLM, WeightTarget, registry
from octavo.model.fields import MAX_LAYERS, MAX_VOCABULARY, Fields
from octavo.model.known_fields import refuse_fields
from octavo.model.layers import (
    Embedding,
    Linear,
    norm_weight,
    pack_weights,
    vocabulary_logits,
)
from octavo.ops import ForwardBatch, Ops
from octavo.ops.kv import KV


class LayerNorm(nn.Module):
    def __init__(self, ops: Ops, size: int, epsilon: float):
        super().__init__()
        self.ops = ops
        self.eps = epsilon
        self.weight = norm_weight(size)
        self.bias = norm_weight(size)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the norm of hidden + residual. The sum is stored in hidden."""
        return self.ops.layer_norm(hidden, self.weight, self.bias, self.eps, residual)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {
            f"{prefix}.weight": WeightTarget(self.weight),
            f"{prefix}.bias": WeightTarget(self.bias),
        }


class GPT2Layer(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.config = config
        self.ops = ops
        hidden = config.hidden_size
        query = config.shares.query
        key = config.shares.key
        intermediate = config.shares.intermediate
        self.attn_norm = LayerNorm(ops, hidden, config.norm_eps)
        self.mlp_norm = LayerNorm(ops, hidden, config.norm_eps)
        self.qkv = Linear(ops, hidden, {"c_attn": Share.joined(query, key, key)}, bias=True)
        self.out = Linear(ops, query, {"c_proj": hidden}, bias=True)
        self.up = Linear(ops, hidden, {"c_fc": intermediate}, bias=True)
        self.down = Linear(ops, intermediate, {"c_proj": hidden}, bias=True)

    def forward(self, hidden: Tensor, batch: ForwardBatch, kv_cache: KV) -> Tensor:
        """Compute one layer. hidden [T, hidden] is overwritten; kv_cache is [N, 2, H, B, D]."""
        ops = self.ops
        query = ops.rope_and_cache(self.qkv(self.attn_norm(hidden)), kv_cache, batch, None)
        attended = self.out(ops.attention(query, kv_cache, batch, self.config.scale).flatten(1))
        return hidden + self.down(ops.gelu(self.up(self.mlp_norm(hidden, attended))))

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets = self.attn_norm.weight_targets(prefix + "ln_1") | self.mlp_norm.weight_targets(
            prefix + "ln_2"
        )
        for linear, owner in (
            (self.qkv, "attn."),
            (self.out, "attn."),
            (self.up, "mlp."),
            (self.down, "mlp."),
        ):
            targets |= linear.weight_targets(prefix + owner, transform=Tensor.t)
        return targets


@registry.add("GPT2LMHeadModel")
class GPT2(CausalLM):
    tied_weight = "transformer.wte.weight"
    supports_tensor_parallel = True
    embed: Embedding

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config, ops)
        vocabulary = config.shares.vocabulary
        self.embed = Embedding(ops, vocabulary, config.hidden_size)
        self.positions = Embedding(ops, config.max_position, config.hidden_size)
        self.layers = nn.ModuleList(GPT2Layer(config, ops) for _ in range(config.num_layers))
        self.norm = LayerNorm(ops, config.hidden_size, config.norm_eps)
        self.head = (
            None if config.tied else Linear(ops, config.hidden_size, {"lm_head": vocabulary})
        )

    def forward(self, batch: ForwardBatch, kv_cache: KV) -> Tensor:
        hidden = self.embed(batch.ids) + self.positions(batch.positions)
        for layer_index, layer in enumerate(self.layers):
            hidden = layer(hidden, batch, kv_cache[:, layer_index])
        return self.norm(hidden if batch.last is None else hidden[batch.logit_indices])

    def logits(self, hidden: Tensor) -> Tensor:
        return vocabulary_logits(self.head or self.embed, hidden)

    def weight_map(self) -> dict[str, WeightTarget]:
        targets = {
            "transformer.wte.weight": self.embed.weight_target(),
            "transformer.wpe.weight": self.positions.weight_target(),
        }
        targets |= self.norm.weight_targets("transformer.ln_f")
        if self.head is not None:
            targets |= self.head.weight_targets()
        for layer_index, layer in enumerate(cast("Iterable[GPT2Layer]", self.layers)):
            targets |= layer.weight_targets(f"transformer.h.{layer_index}.")
        return targets

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Add the prefix `transformer.`, which checkpoints that were saved without a head omit."""
        return name if name.startswith(("transformer.", "lm_head.")) else "transformer." + name

    def ignored_weights(self) -> set[str]:
        """Return the names of the causal masks, which old checkpoints store for every layer."""
        layers = range(self.config.num_layers)
        return {
            f"transformer.h.{layer_index}.attn.{mask}"
            for layer_index in layers
            for mask in ("bias", "masked_bias")
        }

    def finish_loading(self) -> None:
        pack_weights(self)

    @classmethod
    def parse_config(cls, hf_config: dict[str, Any]) -> ModelConfig:
        fields = Fields(hf_config)
        hidden_size = fields.positive_int("n_embd")
        num_heads = fields.positive_int("n_head")
        if hidden_size % num_heads:
            raise ModelError(
                f"config.json: n_embd ({hidden_size}) must be a multiple of n_head ({num_heads})"
            )
        refuse_fields(fields, "GPT2LMHeadModel")
        activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
        return ModelConfig(
            architecture="GPT2LMHeadModel",
            vocab_size=fields.positive_int("vocab_size", maximum=MAX_VOCABULARY),
            hidden_size=hidden_size,
            num_layers=fields.positive_int("n_layer", maximum=MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            intermediate_size=fields.positive_int("n_inner", 4 * hidden_size),
            max_position=fields.positive_int("n_positions"),
            norm_eps=fields.positive_float("layer_norm_epsilon", 1e-5),
            tied=fields.boolean("tie_word_embeddings", True),
            dtype=fields.dtype(),
            activation=fields.choice("activation_function", activations, "gelu_new"),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            attention_scale=None if fields.boolean("scale_attn_weights", True) else 1.0,
            eos_ids=fields.token_ids("eos_token_id"),
            bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        )
