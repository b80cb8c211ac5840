"""Tiny random models of every architecture as Hugging Face directories, with a byte-level tokenizer
of 300 tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from tests.tiny_tokenizer import EOS, VOCAB, write_tokenizer

SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=1024, bos_token_id=257, eos_token_id=EOS, pad_token_id=EOS,
)  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(SMALL, tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(SMALL, sliding_window=20)),
    "qwen2": ("Qwen2", dict(SMALL)),
    "qwen3": ("Qwen3", dict(SMALL, head_dim=16)),
    "gemma3": (
        "Gemma3",
        dict(
            SMALL,
            head_dim=16,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "gpt2": (
        "GPT2",
        dict(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=1024,
            bos_token_id=257,
            eos_token_id=EOS,
        ),
    ),
}


@cache
def hf_model(architecture: str) -> Any:
    import transformers

    family, fields = ARCHITECTURES[architecture]
    name = f"{family}ForCausalLM" if family != "GPT2" else "GPT2LMHeadModel"
    config = getattr(
        transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    )(**fields)
    torch.manual_seed(len(architecture))
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        # weights so large that attention and position determine the token
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


@cache
def model_dir(architecture: str = "llama") -> str:
    path = Path(mkdtemp(prefix=f"octavo-{architecture}-"))
    hf_model(architecture).save_pretrained(path)
    write_tokenizer(path)
    return str(path)


@torch.no_grad()
def hf_logits(architecture: str, ids: list[int]) -> torch.Tensor:
    """Return logits [len(ids), vocab], without any cache."""
    return hf_model(architecture)(torch.tensor([ids]), use_cache=False).logits[0]


def hf_greedy(architecture: str, prompt: list[int], n: int, ignore_eos: bool = True) -> list[int]:
    """Generate with a naive loop, which computes the whole sequence again for every token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + n:
        ids.append(int(hf_logits(architecture, ids)[-1].argmax()))
        if ids[-1] == EOS and not ignore_eos:
            break
    return ids[len(prompt) :]
