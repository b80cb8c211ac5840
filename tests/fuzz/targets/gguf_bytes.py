"""GGUF files, byte by byte."""

from __future__ import annotations

from octavo.errors import OctavoError
from octavo.model.gguf import open_gguf
from octavo.text.tokenizer import Tokenizer
from tests.fuzz.model_files import (
    GGUF_ABOUTS,
    WORDS,
    folder,
    gguf_file,
    outcome,
    prepare,
    tokenize,
)

__all__ = ["MAX_BYTES", "SEEDS", "WORDS", "one_input"]

SEEDS = [gguf_file(about) for about in GGUF_ABOUTS]
MAX_BYTES = 2**16


def one_input(data: bytes) -> object:
    path = folder() / "model.gguf"
    path.write_bytes(data)
    try:
        checkpoint = open_gguf(path)
    except OctavoError as error:
        return outcome(error)
    assert checkpoint.gguf_metadata is not None
    try:
        tokenize(Tokenizer.from_gguf(checkpoint.gguf_metadata))
        spoken = "tokenizer"
    except OctavoError as error:
        spoken = outcome(error)
    return prepare(checkpoint), spoken
