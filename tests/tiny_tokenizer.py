"""A byte-level tokenizer of 300 tokens. Imports no torch, so that tests of text alone start
quickly."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 300
EOS = 256
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(path: Path) -> None:
    """Bytes, then the special tokens: no merges, so every byte is a token."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|eos|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
