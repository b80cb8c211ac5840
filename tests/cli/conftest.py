"""A tiny random model as a directory on disk, and a way to run commands as a user does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from octavo.cli import app
from octavo.model.base import build, registry
from octavo.ops.reference import ReferenceOps

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 259,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """One token a byte, and three special ones."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    words: dict[str, Any] = {"eos_token": "<|im_end|>"}
    if template is not None:
        words["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    cls = registry.find(config)
    generator = torch.Generator().manual_seed(1)
    targets = build(
        cls.parse_config(config), cls, ReferenceOps(), torch.float32, "cpu"
    ).weight_map()
    tensors = {n: torch.randn(s.dest.shape, generator=generator) * 0.3 for n, s in targets.items()}
    letters = torch.tensor([c.isascii() and c.isalpha() for c in alphabet] + [False] * 3)
    tensors["lm_head.weight"][~letters] = 0.0  # letters are what it says, mostly
    tensors["lm_head.weight"] *= 10
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `octavo ARGS` in this process; an exception that is not an exit is the test's failure."""
    monkeypatch.setenv("COLUMNS", "200")  # rich breaks no line that a test looks for

    def run(*args: object, stdin: str = "") -> Result:
        result = CliRunner().invoke(app, [str(a) for a in args], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
