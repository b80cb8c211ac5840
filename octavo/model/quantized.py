"""Writes and reads quantised checkpoints: Hugging Face directories with codes and scales.

A weight NAME becomes the tensors NAME.codes, NAME.scale and perhaps NAME.least, which
octavo.ops.weight defines. config.json lists each weight with its format and its number of inputs.
Such a weight is stored as [out, in], also for GPT-2, whose plain checkpoints have [in, out]. All
other tensors are unchanged.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.model import quant
from octavo.model.base import build
from octavo.model.checkpoint import Checkpoint, StoredTensor
from octavo.model.tensor_matching import match_tensors
from octavo.model.tied_weights import parse_checkpoint
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import QuantWeight, WeightFormat

METHOD = "octavo"
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "generation_config.json",
    "*.jinja",
    "merges.txt",
    "vocab.*",
)


def write(
    checkpoint: Checkpoint,
    weight_format: WeightFormat,
    directory: Path,
    on_progress: Callable[[int, int], None] = lambda finished, total: None,
) -> None:
    """Write the checkpoint with every matrix in this format to a directory that must not exist.

    The tokenizer's files are copied if the checkpoint is a directory. `on_progress` is called with
    the number of finished tensors and the number of all tensors.
    """
    from safetensors.torch import save_file

    model_class, config = parse_checkpoint(checkpoint)
    model = build(
        config, model_class, ReferenceOps(), torch.float32, "meta", quant.choose(weight_format)
    )
    targets = match_tensors(model, checkpoint)
    tensors: dict[str, Tensor] = {}
    formats: dict[str, list[Any]] = {}
    for index, (name, target) in enumerate(targets.items()):
        stored = checkpoint.tensors[name]
        if isinstance(target.dest, QuantWeight):
            weight = QuantWeight.empty(target.dest.format, *target.dest.shape)
            replace(target, dest=weight).load(stored)
            tensors |= {f"{name}.{part}": buffer for part, buffer in weight.named_buffers()}
            formats[name] = [str(weight.format), weight.shape[1]]
        else:
            tensors[name] = stored.read().clone()
        on_progress(index + 1, len(targets))
    directory.mkdir(parents=True)
    quantization_config = {"quant_method": METHOD, "weights": formats}
    changed: dict[str, Any] = {"quantization_config": quantization_config}
    if not config.tied and checkpoint.config.get("tie_word_embeddings"):
        changed["tie_word_embeddings"] = False
    config_json = directory / "config.json"
    config_json.write_text(json.dumps(checkpoint.config | changed, indent=1) + "\n")
    weights = directory / "model.safetensors"
    save_file(tensors, weights)
    weights.chmod(config_json.stat().st_mode)  # save_file makes it readable by its owner only
    if checkpoint.directory is not None:
        for pattern in COPIED:
            for path in sorted(checkpoint.directory.glob(pattern)):
                shutil.copyfile(path, directory / path.name)


def quantised_bits(checkpoint: Checkpoint, weight_format: WeightFormat) -> float | None:
    """Return the bits per weight of a checkpoint that is quantised in another format.

    Return None if most of its weights have 16 bits or more, or have this format.
    """
    matrices = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2]
    num_values = sum(math.prod(tensor.shape) for tensor in matrices)
    same_format = sum(
        math.prod(tensor.shape) for tensor in matrices if tensor.format == weight_format
    )
    bits_per_weight = 8 * sum(tensor.nbytes for tensor in matrices) / max(num_values, 1)
    return bits_per_weight if bits_per_weight < 12 and same_format < num_values / 2 else None


def joined(
    tensors: dict[str, StoredTensor], config: dict[str, Any], source: str
) -> dict[str, StoredTensor]:
    """Return a directory's tensors, with the parts of each quantised weight joined."""
    weight_entries = config["quantization_config"].get("weights")
    result = dict(tensors)
    if not isinstance(weight_entries, dict):
        raise CheckpointError(
            f"{source}/config.json: quantization_config has no list of weights. "
            "Quantise the model again"
        )
    for name, entry in weight_entries.items():
        name_and_inputs = entry if isinstance(entry, list) and len(entry) == 2 else [None, None]
        weight_format = (
            quant.FORMATS.get(name_and_inputs[0]) if isinstance(name_and_inputs[0], str) else None
        )
        if weight_format is None or type(name_and_inputs[1]) is not int or name_and_inputs[1] < 1:
            raise CheckpointError(
                f"{source}/config.json: quantization_config has no valid format for {name}: "
                f"{entry!r}"
            )
        result[name] = _join(name, weight_format, name_and_inputs[1], result, source)
    return result


def _join(
    name: str,
    weight_format: WeightFormat,
    inputs: int,
    tensors: dict[str, StoredTensor],
    source: str,
) -> StoredTensor:
    parts = ("codes", "scale", "least") if weight_format.asymmetric else ("codes", "scale")
    candidates = [tensors.pop(f"{name}.{part}", None) for part in parts]
    groups = math.ceil(inputs / weight_format.group_size) if weight_format.group_size else 1
    widths = (inputs if weight_format.bits == 8 else math.ceil(inputs / 2), groups, groups)
    outputs = candidates[0].shape[0] if candidates[0] is not None and candidates[0].shape else 0
    stored = [
        tensor
        for tensor, width in zip(candidates, widths, strict=False)
        if tensor is not None and tensor.shape == (outputs, width)
    ]
    if len(stored) != len(parts):
        raise CheckpointError(
            f"{source}: {name} in format {weight_format} needs {', '.join(parts)} of {outputs} "
            "rows. Quantise it again"
        )

    def codes() -> QuantWeight:
        tensors = [tensor.read() for tensor in stored]
        if [tensor.dtype for tensor in tensors] != [
            torch.uint8,
            *[torch.float16] * (len(tensors) - 1),
        ]:
            raise CheckpointError(
                f"{source}: {name} must have uint8 codes and float16 scales. Quantise it again"
            )
        return QuantWeight(
            weight_format,
            inputs,
            tensors[0],
            tensors[1],
            tensors[2] if weight_format.asymmetric else None,
        )

    return StoredTensor(
        shape=(outputs, inputs),
        nbytes=sum(tensor.nbytes for tensor in stored),
        read=lambda: codes().dequantize(),
        format=weight_format,
        codes=codes,
        rearranged=True,
    )
