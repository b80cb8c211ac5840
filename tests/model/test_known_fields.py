"""Every field of transformers' configuration classes is honoured, refused or harmless, and the
tables tell the truth."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch

from octavo.errors import ModelError
from octavo.model import registry
from octavo.model.known_fields import HARMLESS, HONOURED, REFUSED

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

FAMILIES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "GPT2LMHeadModel": "GPT2Config",
}
SMALL = dict(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=64,
)  # fmt: skip
SMALL_GPT2 = dict(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=48)
# another value of each honoured field, for configs in which it matters
WINDOWS = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "vocab_size": ({}, 61),
    "dtype": ({}, "bfloat16"),
    "torch_dtype": ({}, "bfloat16"),
    "tie_word_embeddings": ({"tie_word_embeddings": False}, True),
    "eos_token_id": ({}, [3, 4]),
    "bos_token_id": ({}, 5),
    "hidden_size": ({}, 64),
    "intermediate_size": ({}, 64),
    "num_hidden_layers": ({"layer_types": None}, 3),
    "num_attention_heads": ({}, 8),
    "num_key_value_heads": ({}, 4),
    "head_dim": ({}, 32),
    "max_position_embeddings": ({}, 128),
    "original_max_position_embeddings": (YARN, 32),
    "rms_norm_eps": ({}, 1e-3),
    "rope_parameters": ({}, {"rope_type": "linear", "factor": 2.0}),
    "rope_scaling": ({}, {"rope_type": "linear", "factor": 2.0}),
    "rope_theta": ({}, 77.0),
    "layer_types": (WINDOWS, ["sliding_attention", "full_attention"]),
    "hidden_act": ({}, "gelu_pytorch_tanh"),
    "hidden_activation": ({}, "silu"),
    "attention_bias": ({}, True),
    "mlp_bias": ({}, True),
    "sliding_window": (WINDOWS, 9),
    "use_sliding_window": (WINDOWS, False),
    "max_window_layers": (WINDOWS, 0),
    "sliding_window_pattern": ({"sliding_window": 8}, 2),
    "query_pre_attn_scalar": ({}, 64),
    "rope_local_base_freq": ({}, 77.0),
    "n_embd": ({}, 64),
    "n_layer": ({}, 3),
    "n_head": ({}, 8),
    "n_inner": ({}, 64),
    "n_positions": ({}, 128),
    "layer_norm_epsilon": ({}, 1e-3),
    "scale_attn_weights": ({}, False),
}
# What these ask for cannot be had: the test of honoured fields expects an error that names them.
CHECKED = {
    ("LlamaForCausalLM", "layer_types"),
    ("MistralForCausalLM", "layer_types"),
    ("GPT2LMHeadModel", "activation_function"),
}
CHANGES["activation_function"] = ({}, "relu")


def config_of(architecture: str) -> dict[str, Any]:
    return {
        **(SMALL_GPT2 if architecture.startswith("GPT2") else SMALL),
        "architectures": [architecture],
    }


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_field_of_transformers_is_in_one_table(architecture: str) -> None:
    fields = set(getattr(transformers, FAMILIES[architecture])().to_dict()) | {"is_causal"}
    tables = (HONOURED[architecture], set(REFUSED[architecture]), HARMLESS)
    assert fields <= set.union(*tables), f"unknown: {fields - set.union(*tables)}"
    for i, table in enumerate(tables):
        assert not table & set.union(*tables[:i], *tables[i + 1 :])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_honoured_field_changes_the_model(architecture: str) -> None:
    for field in sorted(HONOURED[architecture] - {"architectures", "quantization_config"}):
        given, value = CHANGES[field]
        base = config_of(architecture) | given
        if architecture == "LlamaForCausalLM":
            base.pop("sliding_window", None)
        changed = base | {field: value}
        if (architecture, field) in CHECKED:
            with pytest.raises(ModelError, match=field):
                registry.parse(changed | {"sliding_window": None})
        elif field == "rope_parameters" and architecture == "Gemma3ForCausalLM":
            changed[field] = {"full_attention": value, "sliding_attention": {}}
            assert registry.parse(changed) != registry.parse(base)
        else:
            assert registry.parse(changed) != registry.parse(base), field


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_refused_field_is_refused_unless_it_is_neutral(architecture: str) -> None:
    base = config_of(architecture)
    for field, refusal in REFUSED[architecture].items():
        for value in (None, *refusal.neutral):
            registry.parse(base | {field: value})
        other = (
            False if refusal.neutral == (True,) else {"1": {}} if refusal.neutral == ({},) else 3
        )
        with pytest.raises(ModelError, match=f"{field} = .*{re.escape(refusal.reason)}"):
            registry.parse(base | {field: other})


@cache
def theirs(architecture: str, field: str = "", value: Any = None) -> torch.Tensor:
    """Transformers' logits of one prompt, with one field set."""
    given = {**config_of(architecture), **({field: value} if field else {})}
    given = {name: value for name, value in given.items() if name != "architectures"}
    config = getattr(transformers, FAMILIES[architecture])(**copy.deepcopy(given))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return model(torch.tensor([list(range(20))]), return_dict=True).logits


HARMLESS_CHANGES = {
    "initializer_range": 0.5,
    "attention_dropout": 0.5,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
    "attn_pdrop": 0.5,
    "use_cache": False,
    "pretraining_tp": 2,
    "chunk_size_feed_forward": 4,
    "reorder_and_upcast_attn": True,
    "pad_token_id": 7,
    "output_hidden_states": True,
    "n_ctx": 32,
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_harmless_fields_change_nothing_in_transformers(architecture: str) -> None:
    for field, value in HARMLESS_CHANGES.items():
        torch.testing.assert_close(
            theirs(architecture, field, value), theirs(architecture), msg=field
        )
        registry.parse(config_of(architecture) | {field: value})


def test_a_window_that_a_config_leaves_out_is_the_one_that_transformers_assumes() -> None:
    base = config_of("MistralForCausalLM")
    assert transformers.MistralConfig().sliding_window == 4096
    assert registry.parse(base).windows == (4096, 4096)
    assert registry.parse(base | {"sliding_window": None}).windows == ()


def test_hidden_activation_is_read_for_gemma_alone() -> None:
    change = {"hidden_activation": "gelu_pytorch_tanh"}
    assert registry.parse(config_of("LlamaForCausalLM") | change).activation == "silu"
    gemma = config_of("Gemma3ForCausalLM")
    assert registry.parse(gemma | {"hidden_act": "silu"}).activation == "gelu_tanh"
    assert registry.parse(gemma | {"hidden_activation": "silu"}).activation == "silu"
