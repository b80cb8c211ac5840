"""Lists which fields of a config.json each architecture honours, refuses or may ignore.

A field that would change the result and is not implemented is refused when the config is read, so
that a model is never subtly wrong. A test checks that the tables cover every field of the
configuration classes of transformers. A field in no table, such as the version of a training tool,
is ignored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.model.fields import Fields


class Refusal(NamedTuple):
    """A field that is refused unless it has one of the `neutral` values; null is always neutral."""

    neutral: tuple[Any, ...]
    reason: str


COMMON_REFUSED = {
    "is_causal": Refusal((True,), "attention is causal"),
    "is_encoder_decoder": Refusal((False,), "there is no encoder"),
    "add_cross_attention": Refusal((False,), "there is no encoder"),
    "pruned_heads": Refusal(({},), "all layers have all heads"),
    "per_layer_config": Refusal(({},), "all layers have the same shape"),
    "transformers_weights": Refusal((), "weights are read from *.safetensors alone"),
}
DECODER_REFUSED = COMMON_REFUSED | {
    "partial_rotary_factor": Refusal((1,), "all dimensions of a head are rotated"),
    "attn_logit_softcapping": Refusal((), "attention computes no soft cap"),
    "final_logit_softcapping": Refusal((), "logits are not soft-capped"),
    "use_bidirectional_attention": Refusal((False,), "attention is causal"),
    "attention_chunk_size": Refusal((), "attention is not cut into chunks"),
}
# transformers computes a prompt of such a Llama without the window and its cache with it.
LLAMA_REFUSED = DECODER_REFUSED | {
    "sliding_window": Refusal((), "every layer of a Llama sees all positions"),
}
GPT2_REFUSED = COMMON_REFUSED | {
    "scale_attn_by_inverse_layer_idx": Refusal((False,), "all layers scale attention alike"),
}

COMMON_HONOURED = {
    "architectures",
    "vocab_size",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "quantization_config",
}
DECODER_HONOURED = COMMON_HONOURED | {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "layer_types",
}
QWEN_HONOURED = {"hidden_act", "sliding_window", "use_sliding_window", "max_window_layers"}
HONOURED: dict[str, set[str]] = {
    "LlamaForCausalLM": DECODER_HONOURED | {"hidden_act", "attention_bias", "mlp_bias"},
    "MistralForCausalLM": DECODER_HONOURED | {"hidden_act", "sliding_window"},
    "Qwen2ForCausalLM": DECODER_HONOURED | QWEN_HONOURED,
    "Qwen3ForCausalLM": DECODER_HONOURED | QWEN_HONOURED | {"attention_bias"},
    "Gemma3ForCausalLM": DECODER_HONOURED
    | {
        "hidden_activation",
        "attention_bias",
        "sliding_window",
        "sliding_window_pattern",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
    },
    "GPT2LMHeadModel": COMMON_HONOURED
    | {
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
        "n_positions",
        "activation_function",
        "layer_norm_epsilon",
        "scale_attn_weights",
    },
}
REFUSED: dict[str, dict[str, Refusal]] = {
    "LlamaForCausalLM": LLAMA_REFUSED,
    "MistralForCausalLM": DECODER_REFUSED,
    "Qwen2ForCausalLM": DECODER_REFUSED,
    "Qwen3ForCausalLM": DECODER_REFUSED,
    "Gemma3ForCausalLM": DECODER_REFUSED,
    "GPT2LMHeadModel": GPT2_REFUSED,
}
# Fields without effect on what a trained model computes.
HARMLESS = {
    # initialisation and training
    "initializer_range",
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    # how transformers computes the same numbers
    "use_cache",
    "pretraining_tp",
    "chunk_size_feed_forward",
    "reorder_and_upcast_attn",
    "cache_implementation",
    # other results of transformers than logits
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    # classification heads
    "id2label",
    "label2id",
    "problem_type",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    # notes
    "_name_or_path",
    "model_type",
    "transformers_version",
    "pad_token_id",
    "_sliding_window_pattern",
    "n_ctx",
}


def refuse_fields(fields: Fields, architecture: str) -> None:
    """Raise a ModelError for the first field that asks for arithmetic which is not implemented."""
    for name, refusal in REFUSED[architecture].items():
        fields.refuse(name, refusal.reason, refusal.neutral)
