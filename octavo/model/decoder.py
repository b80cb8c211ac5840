"""One decoder for Llama, Mistral, Qwen2, Qwen3 and Gemma 3, which differ in their ModelConfig only.

    hidden = embed(ids)
    for each layer:   hidden += attention(norm(hidden));  hidden += mlp(norm(hidden))
    logits = head(norm(hidden))

Each residual is added by the matrix product before it. The decoder must not depend on batching,
paging (ops does both), devices or checkpoint files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from octavo.config import ModelConfig, RopeConfig, Share
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
from octavo.model.rope import context_length, rope_config, rope_table
from octavo.ops import ForwardBatch, Ops, Watched
from octavo.ops.fused_spec import DecoderLayer, DecoderSpec, Fused, FusedStep, StepSpec
from octavo.ops.kv import KV

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# Defaults for fields that a config.json may omit, where an architecture differs from the others.
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen2ForCausalLM": {"sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "Gemma3ForCausalLM": {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}


class TransformerLayer(nn.Module):
    """Attention and MLP, each with a residual connection."""

    def __init__(
        self, config: ModelConfig, ops: Ops, layer_index: int, attention_inputs: int | None = None
    ):
        """`attention_inputs` is the size of the attention's input if it is not hidden_size."""
        super().__init__()
        self.config = config
        self.ops = ops
        self.window = config.window(layer_index)
        hidden = config.hidden_size
        # In a divided model, a rank has a share of the heads and of the intermediate size.
        query = config.shares.query
        key = config.shares.key
        intermediate = config.shares.intermediate
        self.qkv = Linear(
            ops,
            attention_inputs or hidden,
            {"q_proj": query, "k_proj": key, "v_proj": key},
            config.qkv_bias,
        )
        self.out = Linear(ops, query, {"o_proj": hidden}, config.out_bias)
        self.gate_up = Linear(
            ops, hidden, {"gate_proj": intermediate, "up_proj": intermediate}, config.mlp_bias
        )
        self.down = Linear(ops, intermediate, {"down_proj": hidden}, config.mlp_bias)
        self.attn_norm = norm_weight(hidden)
        self.mlp_norm = norm_weight(hidden)
        self.q_norm = norm_weight(config.head_dim) if config.qk_norm else None
        self.k_norm = norm_weight(config.head_dim) if config.qk_norm else None
        self.post_attn_norm = norm_weight(hidden) if config.post_norms else None
        self.post_mlp_norm = norm_weight(hidden) if config.post_norms else None
        self.act_mul = ops.silu_mul if config.activation == "silu" else ops.gelu_mul

    def forward(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        kv_cache: KV,
        cos_sin: Tensor,
        last: ForwardBatch | None = None,
    ) -> Tensor:
        """Compute one layer.

        The memory of hidden [T, hidden] may be overwritten by the result. kv_cache
        [N, 2, Hk, B, D] is the cache of this layer. `last` is batch.last in the last layer.
        """
        normed = self.ops.rms_norm(hidden, self.attn_norm, self.config.norm_eps)
        return self.add_branches(normed, hidden, batch, kv_cache, cos_sin, last)

    def add_branches(
        self,
        normed: Tensor,
        hidden: Tensor,
        batch: ForwardBatch,
        kv_cache: KV,
        cos_sin: Tensor,
        last: ForwardBatch | None,
    ) -> Tensor:
        """Add the attention of `normed` and then the MLP to hidden, as forward() does."""
        ops = self.ops
        epsilon = self.config.norm_eps
        qkv = self.qkv(normed)
        query = ops.rope_and_cache(qkv, kv_cache, batch, cos_sin, self.q_norm, self.k_norm, epsilon)
        if batch.watched is not None:
            ops.block_mass(
                query, cast("Tensor", kv_cache), batch.watched, self.config.scale, self.window
            )
        if last is not None:  # only the hidden states of these tokens are needed
            query = query[batch.logit_indices]
            hidden = hidden[batch.logit_indices]
            batch = last
        branch = ops.attention(query, kv_cache, batch, self.config.scale, self.window).flatten(1)
        hidden = self._add_branch(self.out, branch, self.post_attn_norm, hidden)
        branch = self.act_mul(self.gate_up(ops.rms_norm(hidden, self.mlp_norm, epsilon)))
        return self._add_branch(self.down, branch, self.post_mlp_norm, hidden)

    def _add_branch(
        self, linear: Linear, branch: Tensor, norm: Tensor | None, hidden: Tensor
    ) -> Tensor:
        """Return hidden + linear(branch). The product is normalised first if there is a norm."""
        return (
            linear(branch, hidden)
            if norm is None
            else self.ops.rms_norm(linear(branch), norm, self.config.norm_eps, hidden)
        )

    def spec(self, cos_sin: Tensor) -> DecoderLayer:
        """Return this layer as data, for a backend that computes all layers in one call."""
        return DecoderLayer(
            qkv=self.qkv.weight,
            out=self.out.weight,
            gate_up=self.gate_up.weight,
            down=self.down.weight,
            biases=(self.qkv.bias, self.out.bias, self.gate_up.bias, self.down.bias),
            attn_norm=self.attn_norm,
            mlp_norm=self.mlp_norm,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            post_attn_norm=self.post_attn_norm,
            post_mlp_norm=self.post_mlp_norm,
            cos_sin=cos_sin,
            window=self.window,
        )

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        attention_prefix = f"{prefix}self_attn."
        mlp_prefix = f"{prefix}mlp."
        targets = (
            self.qkv.weight_targets(attention_prefix)
            | self.out.weight_targets(attention_prefix)
            | self.gate_up.weight_targets(mlp_prefix)
            | self.down.weight_targets(mlp_prefix)
        )
        norms = {
            "input_layernorm": self.attn_norm,
            "self_attn.q_norm": self.q_norm,
            "self_attn.k_norm": self.k_norm,
        }
        # Gemma 3 uses the name post_attention_layernorm for another norm than the other models do.
        if self.config.post_norms:
            norms["post_attention_layernorm"] = self.post_attn_norm
            norms["pre_feedforward_layernorm"] = self.mlp_norm
            norms["post_feedforward_layernorm"] = self.post_mlp_norm
        else:
            norms["post_attention_layernorm"] = self.mlp_norm
        for name, weight in norms.items():
            if weight is not None:
                targets[f"{prefix}{name}.weight"] = norm_target(weight, self.config)
        return targets


@registry.add(*DEFAULTS)
class Decoder(CausalLM):
    tied_weight = "model.embed_tokens.weight"
    supports_tensor_parallel = True
    embed: Embedding

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config, ops)
        vocabulary = config.shares.vocabulary
        self.embed = Embedding(ops, vocabulary, config.hidden_size, config.embed_scale)
        self.layers = nn.ModuleList(
            TransformerLayer(config, ops, layer_index) for layer_index in range(config.num_layers)
        )
        self.norm = norm_weight(config.hidden_size)
        self.head = (
            None if config.tied else Linear(ops, config.hidden_size, {"lm_head": vocabulary})
        )
        self.register_buffer(
            "rope", rope_table(config.rope, config.head_dim, config.max_position), persistent=False
        )
        local_rope = (
            None
            if config.local_rope is None
            else rope_table(config.local_rope, config.head_dim, config.max_position)
        )
        self.register_buffer("local_rope", local_rope, persistent=False)
        self.fused: Fused | None = None  # computes all layers in one call, if the backend can

    def forward(self, batch: ForwardBatch, kv_cache: KV) -> Tensor:
        hidden, _ = self._run_layers(batch, kv_cache)
        return hidden

    def forward_with_logits(self, batch: ForwardBatch, kv_cache: KV) -> tuple[Tensor, Tensor]:
        hidden, fused_logits = self._run_layers(batch, kv_cache)
        return hidden, self.logits(hidden) if fused_logits is None else fused_logits

    def _run_layers(self, batch: ForwardBatch, kv_cache: KV) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states, and their logits if the fused call has computed them too."""
        hidden = self.embed(batch.ids)
        if self.aux_hidden_state_layers:  # a fused call returns no hidden states between layers
            batch.aux_hidden_states = hidden.new_empty(
                len(hidden), len(self.aux_hidden_state_layers), hidden.shape[1]
            )
        elif self.fused is not None:
            fused_result = self.fused(hidden, batch, kv_cache)
            if isinstance(fused_result, Tensor):
                return fused_result, None
            if fused_result is not None:
                return fused_result
        for layer_index, layer in enumerate(self.layers):
            if batch.aux_hidden_states is not None and layer_index in self.aux_hidden_state_layers:
                batch.aux_hidden_states[:, self.aux_hidden_state_layers.index(layer_index)] = hidden
            last = batch.last if layer_index == len(self.layers) - 1 else None
            hidden = layer(
                hidden, batch, kv_cache[:, layer_index], self.rope_table_of(layer_index), last
            )
        if batch.watched is not None and self.config.part is not None:
            self._average_mass(batch.watched, self.config.part.query)
        return self.ops.rms_norm(hidden, self.norm, self.config.norm_eps), None

    def _average_mass(self, watched: Watched, heads: Share) -> None:
        """Turn the mean over the heads of this rank into the mean over the heads of all ranks."""
        watched.mass *= heads.count / heads.total
        watched.mass = self.ops.ranks.all_reduce(watched.mass)

    def logits(self, hidden: Tensor) -> Tensor:
        return vocabulary_logits(self.head or self.embed, hidden)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        if not all(0 <= layer < self.config.num_layers for layer in layers):
            raise ModelError(
                f"hidden states before layers {list(layers)} are wanted, but the layers of this "
                f"model are 0 to {self.config.num_layers - 1}"
            )
        self.aux_hidden_state_layers = layers

    def weight_map(self) -> dict[str, WeightTarget]:
        targets = {
            "model.embed_tokens.weight": self.embed.weight_target(),
            "model.norm.weight": norm_target(self.norm, self.config),
        }
        if self.head is not None:
            targets |= self.head.weight_targets()
        for layer_index, layer in enumerate(cast("Iterable[TransformerLayer]", self.layers)):
            targets |= layer.weight_targets(f"model.layers.{layer_index}.")
        return targets

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Add the prefix `model.`, which checkpoints of embedding models omit."""
        return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name

    def ignored_weights(self) -> set[str]:
        """Return the names of rotary frequencies, which old checkpoints store."""
        layers = range(self.config.num_layers)
        per_layer = {
            f"model.layers.{layer_index}.self_attn.rotary_emb.inv_freq" for layer_index in layers
        }
        return per_layer | {"model.rotary_emb.inv_freq"}

    def finish_loading(self) -> None:
        pack_weights(self)
        self.fused = self._fuse()
        # A float16 cache halves the bytes to read; see docs/decisions/0006.
        if self.fused is not None and self.dtype == torch.float32:
            self.kv_dtype = torch.float16

    def first_layers(self, count: int) -> Decoder:
        truncated = cast("Decoder", super().first_layers(count))
        truncated.fused = truncated._fuse()
        return truncated

    def _fuse(self) -> Fused | None:
        """Return a function that computes all layers in one call, if the backend can.

        A divided model runs layer by layer, because its layers wait for the other ranks and the
        fused function does not.
        """
        return None if self.config.part is not None else self.ops.fuse(self._spec())

    def fuse_step(self) -> FusedStep | None:
        if self.config.part is not None or self.aux_hidden_state_layers:
            return None
        return self.ops.fuse_step(
            StepSpec(
                decoder=self._spec(),
                embedding=self.embed.weight,
                embedding_scale=self.embed.scale,
            )
        )

    def _spec(self) -> DecoderSpec:
        """Return the decoder as data."""
        config = self.config
        layers = [
            layer.spec(self.rope_table_of(layer_index))
            for layer_index, layer in enumerate(cast("Iterable[TransformerLayer]", self.layers))
        ]
        return DecoderSpec(
            layers=layers,
            norm=self.norm,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            scale=config.scale,
            gelu=config.activation != "silu",
            dtype=self.dtype,
            head=(self.head or self.embed).weight,
        )

    def rope_table_of(self, layer: int) -> Tensor:
        """Return the cosines and sines that this layer rotates by."""
        uses_local_rope = self.local_rope is not None and self.config.window(layer)
        return cast("Tensor", self.local_rope if uses_local_rope else self.rope)

    def rope_table_for_shift(self, layer: int) -> Tensor | None:
        """Return the rope table of a layer, or None for dynamic scaling.

        Its frequencies depend on the position, so a key cannot be moved by a fixed angle.
        """
        is_dynamic = self.config.rope.scaling.get("rope_type") == "dynamic"
        return None if is_dynamic else self.rope_table_of(layer)

    @classmethod
    def parse_config(cls, hf_config: dict[str, Any]) -> ModelConfig:
        architecture = next(
            architecture for architecture in hf_config["architectures"] if architecture in DEFAULTS
        )
        fields = Fields(hf_config, DEFAULTS[architecture])
        heads = head_sizes(fields)
        num_layers = fields.positive_int("num_hidden_layers", maximum=MAX_LAYERS)
        refuse_fields(fields, architecture)
        is_gemma = architecture == "Gemma3ForCausalLM"
        has_bias = fields.boolean("attention_bias")
        rope_configs = ropes(fields, is_gemma)
        trained_positions = fields.positive_int("max_position_embeddings")
        # Gemma 3's max_position_embeddings is the length after scaling.
        max_position = (
            trained_positions
            if is_gemma
            else context_length(rope_configs["rope"], trained_positions)
        )
        return ModelConfig(
            architecture=architecture,
            vocab_size=fields.positive_int("vocab_size", maximum=MAX_VOCABULARY),
            hidden_size=heads.hidden_size,
            num_layers=num_layers,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            intermediate_size=fields.positive_int("intermediate_size"),
            max_position=max_position,
            norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
            tied=fields.boolean("tie_word_embeddings"),
            dtype=fields.dtype(),
            activation=fields.choice(
                "hidden_activation" if is_gemma else "hidden_act", ACTIVATIONS, "silu"
            ),
            qkv_bias=architecture == "Qwen2ForCausalLM"
            or (has_bias and architecture != "MistralForCausalLM"),
            out_bias=has_bias and architecture not in ("Qwen2ForCausalLM", "MistralForCausalLM"),
            mlp_bias=fields.boolean("mlp_bias") and architecture == "LlamaForCausalLM",
            qk_norm=is_gemma or architecture == "Qwen3ForCausalLM",
            post_norms=is_gemma,
            norm_offset=1.0 if is_gemma else 0.0,
            embed_scale=heads.hidden_size**0.5 if is_gemma else 1.0,
            attention_scale=fields.positive_float("query_pre_attn_scalar") ** -0.5
            if is_gemma
            else None,
            windows=windows(architecture, fields, num_layers),
            eos_ids=fields.token_ids("eos_token_id"),
            bos_id=next(iter(fields.token_ids("bos_token_id")), None),
            rope=rope_configs["rope"],
            local_rope=rope_configs.get("local_rope"),
        )


class HeadSizes(NamedTuple):
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def head_sizes(fields: Fields) -> HeadSizes:
    """Read the sizes of the attention heads, and check that they fit together."""
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    if fields["head_dim"] is None and hidden_size % num_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) must divide hidden_size "
            f"({hidden_size}), or head_dim be given"
        )
    head_dim = fields.positive_int("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim ({head_dim}) must be even for rotary embedding")
    return HeadSizes(hidden_size, num_heads, num_kv_heads, head_dim)


def norm_target(weight: Tensor, config: ModelConfig) -> WeightTarget:
    """Return the weight target of a norm. Loading adds the offset of the norm to the weight."""
    offset = config.norm_offset
    return WeightTarget(
        weight, (lambda stored_weight: stored_weight.float() + offset) if offset else None
    )


def ropes(fields: Fields, is_gemma: bool) -> dict[str, RopeConfig]:
    """Return the rope fields of a ModelConfig.

    The layers of Gemma 3 that have a window have another base, and only its other layers scale.
    """
    scaling = fields.json_object("rope_scaling")
    parameters = fields.json_object("rope_parameters")
    theta = fields.positive_float("rope_theta", 10_000.0)
    if not is_gemma:
        return {"rope": rope_config(fields, scaling or parameters, theta)}
    nested = Fields(parameters)
    full_attention = nested.json_object("full_attention")
    sliding_attention = nested.json_object("sliding_attention")
    return {
        "rope": rope_config(fields, {**full_attention, **scaling}, theta),
        "local_rope": rope_config(
            fields, sliding_attention, fields.positive_float("rope_local_base_freq")
        ),
    }


def windows(architecture: str, fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 for a layer that sees all positions.

    The tuple is empty if every layer sees all positions.
    """
    layer_types = fields["layer_types"]
    if layer_types is not None and (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(
            layer_type not in ("sliding_attention", "full_attention") for layer_type in layer_types
        )
    ):
        raise ModelError(
            f"config.json: layer_types must be {num_layers} times sliding_attention or "
            f"full_attention, got {layer_types}"
        )
    if "sliding_window" in fields.nulls or not has_windows(architecture, fields):
        window = 0
    else:
        window = fields.positive_int("sliding_window")
    if layer_types is None:
        layer_types = default_layer_types(architecture, fields, num_layers)
        if not window:
            return ()
    elif architecture == "MistralForCausalLM" and window and "full_attention" in layer_types:
        raise ModelError(
            "config.json: layer_types names full_attention, "
            "but all layers of a Mistral have the same window"
        )
    if not window and "sliding_attention" in layer_types:
        raise ModelError(
            f"config.json: layer_types names sliding_attention, but {architecture} has no "
            "sliding_window here"
        )
    if not window:
        return ()
    return tuple(window if layer_type == "sliding_attention" else 0 for layer_type in layer_types)


def has_windows(architecture: str, fields: Fields) -> bool:
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        return fields.boolean("use_sliding_window")
    return architecture != "LlamaForCausalLM"


def default_layer_types(architecture: str, fields: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer of a model with windows if config.json does not list them."""
    if architecture == "Gemma3ForCausalLM":
        pattern = fields.positive_int("sliding_window_pattern")
        sees_all = [(layer_index + 1) % pattern == 0 for layer_index in range(num_layers)]
    elif architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        sees_all = [
            layer_index < fields.natural_int("max_window_layers")
            for layer_index in range(num_layers)
        ]
    else:
        sees_all = [False] * num_layers
    return [
        "full_attention" if layer_sees_all else "sliding_attention" for layer_sees_all in sees_all
    ]
