"""Describes the weights of a loaded model in a few words, such as "4-bit weights (GGUF)"."""

from __future__ import annotations

import math
from collections import Counter

from octavo.model.base import CausalLM, Matrix
from octavo.model.checkpoint import Checkpoint
from octavo.ops.weight import JoinedWeight, QuantWeight, WeightFormat

# The method in config.json's quantization_config, as people write it.
METHODS = {"awq": "AWQ", "gptq": "GPTQ", "compressed-tensors": "compressed-tensors"}


def summarize_weights(model: CausalLM, checkpoint: Checkpoint) -> str:
    """Return the format that most weights have, and where it comes from."""
    values: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, Matrix):
            for name, count in formats_of(module.weight):
                values[name] += count
    dtype = str(model.dtype).removeprefix("torch.")
    name = values.most_common(1)[0][0] if values else dtype
    description = f"{dtype} weights" if name == "plain" else f"{name} weights"
    origin = source_kind(checkpoint)
    return f"{description} ({origin})" if origin else description


def formats_of(weight: object) -> list[tuple[str, int]]:
    """Return the format of each part of a weight, and the number of its values."""
    if isinstance(weight, JoinedWeight):
        return [part_format for part in weight.parts for part_format in formats_of(part)]
    if isinstance(weight, QuantWeight):
        return [(format_words(weight.format), math.prod(weight.shape))]
    packed = getattr(weight, "format", None)  # a layout of a backend
    if isinstance(packed, WeightFormat):
        return [(format_words(packed), math.prod(weight.shape))]  # type: ignore[attr-defined]
    return [("plain", math.prod(getattr(weight, "shape", (0,))))]


def format_words(weight_format: WeightFormat) -> str:
    return "fp8" if weight_format.is_float else f"{weight_format.bits}-bit"


def source_kind(checkpoint: Checkpoint) -> str:
    if checkpoint.gguf_metadata is not None:
        return "GGUF"
    config = checkpoint.config.get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    return METHODS.get(str(method), "") if method else ""
