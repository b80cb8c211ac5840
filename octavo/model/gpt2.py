"""GPT-2: learned positions, LayerNorm, biases everywhere, and checkpoints that hold matrices as [in, out].

It must not know: batching, paging (ops does both), devices, checkpoint files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.model.base import CausalLM, Slot, registry
from octavo.model.fields import MAX_LAYERS, Fields
from octavo.model.known_fields import refuse_fields
from octavo.model.layers import Embedding, Linear, norm_weight, pack_weights
from octavo.ops import ForwardBatch, Ops
from octavo.ops.kv import KV


class LayerNorm(nn.Module):
    def __init__(self, ops: Ops, size: int, eps: float):
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = norm_weight(size)
        self.bias = norm_weight(size)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Of x + add, which x then is."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, add)

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {f"{prefix}.weight": Slot(self.weight), f"{prefix}.bias": Slot(self.bias)}


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.config = config
        self.ops = ops
        hidden = config.hidden_size
        inter = config.intermediate_size
        self.attn_norm = LayerNorm(ops, hidden, config.norm_eps)
        self.mlp_norm = LayerNorm(ops, hidden, config.norm_eps)
        self.qkv = Linear(ops, hidden, {"c_attn": 3 * hidden}, bias=True)
        self.out = Linear(ops, hidden, {"c_proj": hidden}, bias=True)
        self.up = Linear(ops, hidden, {"c_fc": inter}, bias=True)
        self.down = Linear(ops, inter, {"c_proj": hidden}, bias=True)

    def forward(self, x: Tensor, batch: ForwardBatch, kv: KV) -> Tensor:
        """x [T, hidden], which is overwritten; kv [N, 2, H, B, D]: this layer's."""
        ops = self.ops
        q = ops.rope_and_cache(self.qkv(self.attn_norm(x)), kv, batch, None)
        heads = self.out(ops.attention(q, kv, batch, self.config.scale).flatten(1))
        return x + self.down(ops.gelu(self.up(self.mlp_norm(x, heads))))

    def slots(self, prefix: str) -> dict[str, Slot]:
        slots = self.attn_norm.slots(prefix + "ln_1") | self.mlp_norm.slots(prefix + "ln_2")
        for linear, owner in (
            (self.qkv, "attn."),
            (self.out, "attn."),
            (self.up, "mlp."),
            (self.down, "mlp."),
        ):
            slots |= linear.slots(prefix + owner, transform=Tensor.t)
        return slots


@registry.add("GPT2LMHeadModel")
class GPT2(CausalLM):
    tied_weight = "transformer.wte.weight"

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config, ops)
        self.tokens = Embedding(ops, config.vocab_size, config.hidden_size)
        self.positions = Embedding(ops, config.max_position, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, ops) for _ in range(config.num_layers))
        self.norm = LayerNorm(ops, config.hidden_size, config.norm_eps)
        self.head = (
            None if config.tied else Linear(ops, config.hidden_size, {"lm_head": config.vocab_size})
        )

    def forward(self, batch: ForwardBatch, kv: KV) -> Tensor:
        x = self.tokens(batch.ids) + self.positions(batch.positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, batch, kv[:, i])
        return self.norm(x if batch.last is None else x[batch.logit_indices])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.logits(hidden, (self.head or self.tokens).weight)

    def weight_map(self) -> dict[str, Slot]:
        slots = {
            "transformer.wte.weight": self.tokens.slot(),
            "transformer.wpe.weight": self.positions.slot(),
        }
        slots |= self.norm.slots("transformer.ln_f")
        if self.head is not None:
            slots |= self.head.slots()
        for i, layer in enumerate(cast("Iterable[Layer]", self.layers)):
            slots |= layer.slots(f"transformer.h.{i}.")
        return slots

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """The first checkpoints were saved without the head, and so without `transformer.` before every name."""
        return name if name.startswith(("transformer.", "lm_head.")) else "transformer." + name

    def ignored_weights(self) -> set[str]:
        """The causal mask, which old checkpoints hold for every layer."""
        layers = range(self.config.num_layers)
        return {
            f"transformer.h.{i}.attn.{mask}" for i in layers for mask in ("bias", "masked_bias")
        }

    def finish_loading(self) -> None:
        pack_weights(self)

    @classmethod
    def parse_config(cls, hf: dict[str, Any]) -> ModelConfig:
        f = Fields(hf)
        hidden = f.whole("n_embd")
        heads = f.whole("n_head")
        if hidden % heads:
            raise ModelError(
                f"config.json: n_embd ({hidden}) must be a multiple of n_head ({heads})"
            )
        refuse_fields(f, "GPT2LMHeadModel")
        gelu = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
        return ModelConfig(
            architecture="GPT2LMHeadModel",
            vocab_size=f.whole("vocab_size"),
            hidden_size=hidden,
            num_layers=f.whole("n_layer", most=MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            intermediate_size=f.whole("n_inner", 4 * hidden),
            max_position=f.whole("n_positions"),
            norm_eps=f.real("layer_norm_epsilon", 1e-5),
            tied=f.flag("tie_word_embeddings", True),
            dtype=f.dtype(),
            activation=f.choice("activation_function", gelu, "gelu_new"),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            attention_scale=None if f.flag("scale_attn_weights", True) else 1.0,
            eos_ids=f.token_ids("eos_token_id"),
            bos_id=next(iter(f.token_ids("bos_token_id")), None),
        )
