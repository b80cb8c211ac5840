"""One decoder for Llama, Mistral, Qwen2, Qwen3 and Gemma 3: they differ by fields of ModelConfig and by nothing else.

    hidden = embed(ids)
    for each layer:   hidden += attention(norm(hidden));  hidden += mlp(norm(hidden))
    logits = head(norm(hidden))

Each addition happens in the matrix product before it (`add`). It must not know: batching, paging (ops does both), devices,
checkpoint files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.config import ModelConfig, RopeConfig
from octavo.errors import ModelError
from octavo.model.base import CausalLM, Slot, registry
from octavo.model.fields import MAX_LAYERS, Fields
from octavo.model.known_fields import refuse_fields
from octavo.model.layers import Embedding, Linear, norm_weight, pack_weights
from octavo.model.rope import context_length, rope_config, rope_table
from octavo.ops import ForwardBatch, Ops
from octavo.ops.fused_spec import DecoderLayer, DecoderSpec, Fused
from octavo.ops.kv import KV

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# What a config.json may leave out, where the architecture's own default is not the common one.
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


class Layer(nn.Module):
    """Attention and MLP, each around a residual."""

    def __init__(self, config: ModelConfig, ops: Ops, index: int):
        super().__init__()
        self.config = config
        self.ops = ops
        self.window = config.window(index)
        hidden = config.hidden_size
        inter = config.intermediate_size
        q = config.num_heads * config.head_dim
        k = config.num_kv_heads * config.head_dim
        self.qkv = Linear(ops, hidden, {"q_proj": q, "k_proj": k, "v_proj": k}, config.qkv_bias)
        self.out = Linear(ops, q, {"o_proj": hidden}, config.out_bias)
        self.gate_up = Linear(ops, hidden, {"gate_proj": inter, "up_proj": inter}, config.mlp_bias)
        self.down = Linear(ops, inter, {"down_proj": hidden}, config.mlp_bias)
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
        kv: KV,
        cos_sin: Tensor,
        last: ForwardBatch | None = None,
    ) -> Tensor:
        """hidden [T, hidden], whose memory may hold the result; kv [N, 2, Hk, B, D]: this layer's."""
        ops = self.ops
        eps = self.config.norm_eps
        qkv = self.qkv(ops.rms_norm(hidden, self.attn_norm, eps))
        q = ops.rope_and_cache(qkv, kv, batch, cos_sin, self.q_norm, self.k_norm, eps)
        if batch.watched is not None:
            ops.block_mass(q, cast("Tensor", kv), batch.watched, self.config.scale, self.window)
        if last is not None:  # nobody reads what the other tokens would become
            q = q[batch.logit_indices]
            hidden = hidden[batch.logit_indices]
            batch = last
        x = ops.attention(q, kv, batch, self.config.scale, self.window).flatten(1)
        hidden = self._added(self.out, x, self.post_attn_norm, hidden)
        x = self.act_mul(self.gate_up(ops.rms_norm(hidden, self.mlp_norm, eps)))
        return self._added(self.down, x, self.post_mlp_norm, hidden)

    def _added(self, linear: Linear, x: Tensor, norm: Tensor | None, hidden: Tensor) -> Tensor:
        """hidden + linear(x), normalised before it is added where there is a norm for that."""
        return (
            linear(x, hidden)
            if norm is None
            else self.ops.rms_norm(linear(x), norm, self.config.norm_eps, hidden)
        )

    def spec(self, cos_sin: Tensor) -> DecoderLayer:
        """This layer as data, for a backend that computes all of them at once."""
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

    def slots(self, prefix: str) -> dict[str, Slot]:
        attn = f"{prefix}self_attn."
        mlp = f"{prefix}mlp."
        slots = (
            self.qkv.slots(attn)
            | self.out.slots(attn)
            | self.gate_up.slots(mlp)
            | self.down.slots(mlp)
        )
        norms = {
            "input_layernorm": self.attn_norm,
            "self_attn.q_norm": self.q_norm,
            "self_attn.k_norm": self.k_norm,
        }
        # Gemma 3 calls another norm by the name that the MLP's has elsewhere
        if self.config.post_norms:
            norms["post_attention_layernorm"] = self.post_attn_norm
            norms["pre_feedforward_layernorm"] = self.mlp_norm
            norms["post_feedforward_layernorm"] = self.post_mlp_norm
        else:
            norms["post_attention_layernorm"] = self.mlp_norm
        for name, weight in norms.items():
            if weight is not None:
                slots[f"{prefix}{name}.weight"] = norm_slot(weight, self.config)
        return slots


@registry.add(*DEFAULTS)
class Decoder(CausalLM):
    tied_weight = "model.embed_tokens.weight"

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config, ops)
        self.embed = Embedding(ops, config.vocab_size, config.hidden_size, config.embed_scale)
        self.layers = nn.ModuleList(Layer(config, ops, i) for i in range(config.num_layers))
        self.norm = norm_weight(config.hidden_size)
        self.head = (
            None if config.tied else Linear(ops, config.hidden_size, {"lm_head": config.vocab_size})
        )
        self.register_buffer(
            "rope", rope_table(config.rope, config.head_dim, config.max_position), persistent=False
        )
        local = (
            None
            if config.local_rope is None
            else rope_table(config.local_rope, config.head_dim, config.max_position)
        )
        self.register_buffer("local_rope", local, persistent=False)
        self.fused: Fused | None = None  # all layers in one call, where the backend has that
        # hidden states, and their logits if that call has made them
        self.known: tuple[Tensor, Tensor] | None = None

    def forward(self, batch: ForwardBatch, kv: KV) -> Tensor:
        hidden = self.embed(batch.ids)
        if self.fused is not None and (done := self.fused(hidden, batch, kv)) is not None:
            if isinstance(done, Tensor):
                return done
            self.known = done
            return done[0]
        for i, layer in enumerate(self.layers):
            last = batch.last if i == len(self.layers) - 1 else None
            hidden = layer(hidden, batch, kv[:, i], self.table(i), last)
        return self.ops.rms_norm(hidden, self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.known is not None and self.known[0] is hidden:
            return self.known[1]
        return self.ops.logits(hidden, (self.head or self.embed).weight)

    def weight_map(self) -> dict[str, Slot]:
        slots = {
            "model.embed_tokens.weight": self.embed.slot(),
            "model.norm.weight": norm_slot(self.norm, self.config),
        }
        if self.head is not None:
            slots |= self.head.slots()
        for i, layer in enumerate(cast("Iterable[Layer]", self.layers)):
            slots |= layer.slots(f"model.layers.{i}.")
        return slots

    def ignored_weights(self) -> set[str]:
        """Rotary frequencies, which old checkpoints hold once or for every layer."""
        layers = range(self.config.num_layers)
        each = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers}
        return each | {"model.rotary_emb.inv_freq"}

    def finish_loading(self) -> None:
        pack_weights(self)
        c = self.config
        layers = [
            layer.spec(self.table(i))
            for i, layer in enumerate(cast("Iterable[Layer]", self.layers))
        ]
        gelu = c.activation != "silu"
        self.fused = self.ops.fuse(
            DecoderSpec(
                layers, self.norm, c.num_heads, c.num_kv_heads, c.head_dim, c.norm_eps, c.scale, gelu, self.dtype,
                (self.head or self.embed).weight,
            )
        )  # fmt: skip
        # half the bytes to read: docs/decisions/0006
        if self.fused is not None and self.dtype == torch.float32:
            self.kv_dtype = torch.float16

    def table(self, layer: int) -> Tensor:
        """The cosines and sines that this layer rotates by."""
        local = self.local_rope is not None and self.config.window(layer)
        return cast("Tensor", self.local_rope if local else self.rope)

    def angles(self, layer: int) -> Tensor | None:
        """None for dynamic scaling: its frequencies differ by position, so a key cannot be moved by a fixed angle."""
        dynamic = self.config.rope.scaling.get("rope_type") == "dynamic"
        return None if dynamic else self.table(layer)

    @classmethod
    def parse_config(cls, hf: dict[str, Any]) -> ModelConfig:
        name = next(name for name in hf["architectures"] if name in DEFAULTS)
        f = Fields(hf, DEFAULTS[name])
        hidden = f.whole("hidden_size")
        heads = f.whole("num_attention_heads")
        layers = f.whole("num_hidden_layers", most=MAX_LAYERS)
        kv_heads = f.whole("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
            )
        if f["head_dim"] is None and hidden % heads:
            raise ModelError(
                f"config.json: num_attention_heads ({heads}) must divide hidden_size ({hidden}), or head_dim be given"
            )
        head_dim = f.whole("head_dim", hidden // heads)
        if head_dim % 2:
            raise ModelError(
                f"config.json: head_dim ({head_dim}) must be even for rotary embedding"
            )
        refuse_fields(f, name)
        gemma = name == "Gemma3ForCausalLM"
        bias = f.flag("attention_bias")
        turns = ropes(f, gemma)
        trained = f.whole("max_position_embeddings")
        # Gemma 3's max_position_embeddings is the length after scaling.
        context = trained if gemma else context_length(turns["rope"], trained)
        return ModelConfig(
            architecture=name,
            vocab_size=f.whole("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=f.whole("intermediate_size"),
            max_position=context,
            norm_eps=f.real("rms_norm_eps", 1e-6),
            tied=f.flag("tie_word_embeddings"),
            dtype=f.dtype(),
            activation=f.choice(
                "hidden_activation" if gemma else "hidden_act", ACTIVATIONS, "silu"
            ),
            qkv_bias=name == "Qwen2ForCausalLM" or (bias and name != "MistralForCausalLM"),
            out_bias=bias and name not in ("Qwen2ForCausalLM", "MistralForCausalLM"),
            mlp_bias=f.flag("mlp_bias") and name == "LlamaForCausalLM",
            qk_norm=gemma or name == "Qwen3ForCausalLM",
            post_norms=gemma,
            norm_offset=1.0 if gemma else 0.0,
            embed_scale=hidden**0.5 if gemma else 1.0,
            attention_scale=f.real("query_pre_attn_scalar") ** -0.5 if gemma else None,
            windows=windows(name, f, layers),
            eos_ids=f.token_ids("eos_token_id"),
            bos_id=next(iter(f.token_ids("bos_token_id")), None),
            **turns,
        )


def norm_slot(weight: Tensor, config: ModelConfig) -> Slot:
    """The offset is folded in when the weight is loaded."""
    offset = config.norm_offset
    return Slot(weight, (lambda w: w.float() + offset) if offset else None)


def ropes(f: Fields, gemma: bool) -> dict[str, RopeConfig]:
    """The rotation of all layers; Gemma 3's windowed layers have another base, and only the others are scaled."""
    scaling = f.table("rope_scaling")
    parameters = f.table("rope_parameters")
    theta = f.real("rope_theta", 10_000.0)
    if not gemma:
        return {"rope": rope_config(f, scaling or parameters, theta)}
    nested = Fields(parameters)
    everywhere = nested.table("full_attention")
    local = nested.table("sliding_attention")
    return {
        "rope": rope_config(f, {**everywhere, **scaling}, theta),
        "local_rope": rope_config(f, local, f.real("rope_local_base_freq")),
    }


def windows(name: str, f: Fields, layers: int) -> tuple[int, ...]:
    """How many latest positions each layer sees, 0 for all of them; empty where every layer sees all."""
    types = f["layer_types"]
    if types is not None and (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in ("sliding_attention", "full_attention") for kind in types)
    ):
        raise ModelError(
            f"config.json: layer_types must be {layers} times sliding_attention or full_attention, got {types}"
        )
    if "sliding_window" in f.nulls or not has_windows(name, f):
        window = 0
    else:
        window = f.whole("sliding_window")
    if types is None:
        types = default_layer_types(name, f, layers)
        if not window:
            return ()
    elif name == "MistralForCausalLM" and window and "full_attention" in types:
        raise ModelError(
            "config.json: layer_types names full_attention, but all layers of a Mistral have the same window"
        )
    if not window and "sliding_attention" in types:
        raise ModelError(
            f"config.json: layer_types names sliding_attention, but {name} has no sliding_window here"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types) if window else ()


def has_windows(name: str, f: Fields) -> bool:
    if name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        return f.flag("use_sliding_window")
    return name != "LlamaForCausalLM"


def default_layer_types(name: str, f: Fields, layers: int) -> list[str]:
    """The kind of each layer of a model with windows, where config.json does not list them."""
    if name == "Gemma3ForCausalLM":
        pattern = f.whole("sliding_window_pattern")
        full = [(i + 1) % pattern == 0 for i in range(layers)]
    elif name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        full = [i < f.count("max_window_layers") for i in range(layers)]
    else:
        full = [False] * layers
    return ["full_attention" if whole else "sliding_attention" for whole in full]
