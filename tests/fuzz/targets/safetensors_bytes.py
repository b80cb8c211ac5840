"""safetensors files, byte by byte."""

from __future__ import annotations

import json

from octavo.errors import OctavoError
from octavo.model.checkpoint import Checkpoint, open_safetensors
from tests.fuzz.model_files import (
    LLAMA,
    LLAMA_TENSORS,
    WORDS,
    folder,
    header_of,
    outcome,
    prepare,
    safetensors_file,
)

__all__ = ["SEEDS", "WORDS", "one_input"]

HEADER, SIZE = header_of(LLAMA_TENSORS)
SMALL = {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "__metadata__": {"format": "pt"}}  # fmt: skip
SEEDS = [
    safetensors_file(json.dumps(HEADER).encode(), bytes(SIZE)),
    safetensors_file(json.dumps(SMALL).encode(), b"ab"),
    safetensors_file(b"{}", b""),
]


def one_input(data: bytes) -> object:
    path = folder() / "model.safetensors"
    path.write_bytes(data)
    try:
        tensors = open_safetensors(path)
    except OctavoError as error:
        return outcome(error)
    return prepare(Checkpoint("fuzz", dict(LLAMA), tensors))
