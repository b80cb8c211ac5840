"""Configs of real models, for benches with random weights.

Speed depends on the shapes and not on the values.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.engine_options import EngineOptions

if TYPE_CHECKING:
    from octavo.llm import LLM

TINYLLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

GPT2_124M: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}

QWEN3_17B: dict[str, Any] = QWEN3_06B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
}

SHAPES = {
    "tinyllama-1.1b": TINYLLAMA_1B,
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-1.7b": QWEN3_17B,
    "llama-8b": LLAMA_8B,
    "gpt2": GPT2_124M,
}


def load_shape(options: EngineOptions, model: str | None) -> LLM:
    """Load a model, or random weights if `model` names a shape. None is the embedded model.

    No progress is shown, because the benches show their own progress.
    """
    from octavo.llm import LLM

    if model not in SHAPES:
        return LLM.from_options(model, options, progress=False)
    shape = SHAPES[model]
    max_model_len = options.max_model_len
    if max_model_len is not None:
        positions = shape.get("max_position_embeddings") or shape["n_positions"]
        max_model_len = min(max_model_len, positions)
    options = replace(
        options, load_format="dummy", max_model_len=max_model_len, skip_tokenizer_init=True
    )
    return LLM.from_options(shape, options, progress=False)


def write_directory(hf_config: dict[str, Any], directory: Path) -> None:
    """Write a model directory without weights, for load_format "dummy".

    It contains the config and a tokenizer in which every token is one character, so that a text
    shows how many tokens it has. The tokenizer encodes ASCII. The other tokens occur only in
    output.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from octavo.text.detokenize import BYTE_OF_CHARACTER

    spelling = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    code_points = chain(range(128), range(0x4E00, 0xD800), range(0x10000, 0x110000))
    vocabulary = {
        "".join(spelling[byte] for byte in chr(code_point).encode()): token_id
        for token_id, code_point in enumerate(islice(code_points, hf_config["vocab_size"]))
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    (directory / "config.json").write_text(json.dumps(hf_config))
