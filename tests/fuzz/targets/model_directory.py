"""A model's directory: config.json, generation_config.json, an index of shards, and the header of a
safetensors file."""

from __future__ import annotations

import json
import shutil

from octavo.errors import OctavoError
from octavo.model.load import open_checkpoint
from tests.fuzz.model_files import (
    CODES,
    GEMMA,
    GPT2,
    GPTQ,
    GPTQ_TENSORS,
    LLAMA,
    LLAMA_TENSORS,
    OCTAVO_TENSORS,
    WORDS,
    as_json,
    folder,
    header_of,
    outcome,
    prepare,
    safetensors_file,
)

__all__ = ["MAX_BYTES", "SEEDS", "WORDS", "one_input"]

MAX_BYTES = 2**15
MOST = 2**16  # bytes of data
INDEX = {"weight_map": dict.fromkeys(LLAMA_TENSORS, "model.safetensors")}
SEEDS = as_json(
    [
        {"config": LLAMA, "header": header_of(LLAMA_TENSORS)[0], "index": INDEX},
        {"config": LLAMA, "header": header_of(LLAMA_TENSORS)[0], "generation_config": {"eos_token_id": [1, 2]}},
        {"config": LLAMA | {"quantization_config": CODES}, "header": header_of(OCTAVO_TENSORS)[0]},
        {"config": LLAMA | {"quantization_config": GPTQ}, "header": header_of(GPTQ_TENSORS)[0]},
        {"config": GEMMA, "header": {}},
        {"config": GPT2, "header": {}},
    ]
)  # fmt: skip


def data_size(header: object) -> int:
    """Bytes up to the last offset that is one."""
    entries = header.values() if isinstance(header, dict) else []
    offsets = [entry.get("data_offsets") for entry in entries if isinstance(entry, dict)]
    ends = [at for pair in offsets if isinstance(pair, list) for at in pair if type(at) is int]
    return min(max([0, *ends]), MOST)


def one_input(data: bytes) -> object:
    try:
        about = json.loads(data)
        parts = {name: json.dumps(value).encode() for name, value in about.items()}
        if not parts.keys() <= {"config", "header", "index", "generation_config"}:
            return "no description of a directory"
        size = data_size(about.get("header"))
    except (ValueError, AttributeError, RecursionError):
        return "no description of a directory"
    path = folder() / "directory"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    names = {"index": "model.safetensors.index.json", "header": "model.safetensors"}
    for name, content in parts.items():
        if name == "header":
            content = safetensors_file(content, bytes(size))
        (path / names.get(name, f"{name}.json")).write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
    except OctavoError as error:
        return outcome(error)
    return prepare(checkpoint)
