"""Finds the files of a local model, and says what is missing.

This module imports nothing large, so that a command can refuse a wrong name before it imports
PyTorch.
"""

from __future__ import annotations

import re
from pathlib import Path

from octavo.config import EMBEDDED
from octavo.errors import CheckpointError, ModelError, ModelNotFound

HUB_PAGE = r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?"
PICKLES = ("*.bin", "*.pt", "*.pth")
CHOICES = (
    "Give a .gguf file, a directory with config.json and *.safetensors, a name on the Hugging Face "
    f"hub such as Qwen/Qwen3-0.6B, or {EMBEDDED}, the embedded model"
)


def find_model_files(
    model: str | Path, weights: bool = True, tokenizer: bool = False
) -> Path | None:
    """Return the .gguf file or the directory of a model, or None for a name that only the hub or
    the embedded model can have.

    Without `weights`, a directory needs only its config.json. With `tokenizer`, it also needs a
    tokenizer.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is not a .gguf file. If it belongs to a model in safetensors, give the "
                "directory that holds its config.json"
            )
        return path
    if path.is_dir():
        files = _find_in_directory(path, weights)
        if tokenizer and files.is_dir():
            check_tokenizer(files)
        return files
    name = str(model)
    if page := re.fullmatch(HUB_PAGE, name):
        raise ModelNotFound(
            f"{name} is a page of the Hugging Face hub: give the name of the model, {page[1]}"
        )
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII) or name.endswith(".gguf"):
        raise ModelNotFound(f"no such directory or file: {name}. {CHOICES}")
    return None


def _find_in_directory(directory: Path, weights: bool) -> Path:
    ggufs = sorted(directory.glob("*.gguf"))
    if ggufs and not any(directory.glob("*.safetensors")):
        if len(ggufs) > 1:
            raise CheckpointError(
                f"{directory} holds {len(ggufs)} .gguf files, give one: "
                f"{', '.join(gguf.name for gguf in ggufs)}"
            )
        return ggufs[0]
    check_directory(directory, weights)
    return directory


def check_tokenizer(directory: Path) -> None:
    """Raise ModelError if a directory has no tokenizer that Octavo can read."""
    if (directory / "tokenizer.json").is_file():
        return
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        return
    if (directory / "tokenizer.model").is_file():
        raise ModelError(
            f"{directory} has only a SentencePiece tokenizer.model. Convert it once, in that "
            'directory: python -c "from transformers import AutoTokenizer as T; '
            "T.from_pretrained('.').save_pretrained('.')\" (needs: pip install transformers "
            "sentencepiece protobuf), which writes tokenizer.json"
        )
    raise ModelError(
        f"{directory} has no tokenizer: it needs tokenizer.json, or vocab.json and merges.txt. "
        "Name a directory that has them with tokenizer=DIRECTORY (--tokenizer). In Python, "
        "skip_tokenizer_init=True takes token ids instead of texts"
    )


def check_directory(directory: Path, weights: bool = True) -> None:
    """Raise CheckpointError if a directory has no config.json, or no file with weights."""
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{directory} holds an adapter (LoRA), which Octavo cannot load: merge the adapter "
                "into its base model, and give the directory of the result"
            )
        raise CheckpointError(
            f"{directory} has no config.json: "
            "give a directory in Hugging Face's layout, or a .gguf file"
        )
    has_index = (directory / "model.safetensors.index.json").is_file()
    if not weights or has_index or any(directory.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickled:
        shown = ", ".join(pickled[:3]) + (", ..." if len(pickled) > 3 else "")
        raise CheckpointError(
            f"{directory} holds its weights as pickles ({shown}), which can run "
            "any code when opened and are never read here. Convert them to safetensors: load "
            "the model in transformers and call save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(
        f"{directory} holds no *.safetensors file: download the weights into it, or use random "
        'weights with load_format="dummy" (--load-format dummy)'
    )
