"""GGUF files whose fields are changed: metadata, tensors and offsets, in a file that is well formed
otherwise."""

from __future__ import annotations

import json
import struct

from tests.fuzz.model_files import GGUF_ABOUTS, WORDS, as_json, gguf_file
from tests.fuzz.targets import gguf_bytes

__all__ = ["MAX_BYTES", "SEEDS", "WORDS", "one_input"]

SEEDS = as_json(GGUF_ABOUTS)
MAX_BYTES = 2**15


def one_input(data: bytes) -> object:
    try:
        file = gguf_file(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, struct.error):  # fmt: skip
        return "no description of a file"
    return gguf_bytes.one_input(file)
