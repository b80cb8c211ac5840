"""Quantised checkpoints as files: a Hugging Face directory whose weights are codes and scales, written and read here.

A weight NAME becomes the tensors NAME.codes, NAME.scale and perhaps NAME.least (octavo.ops.weight defines them), and config.json
lists each with its format and its number of inputs. Such a weight is stored [out, in], as the model multiplies by it; GPT-2's
are [in, out] in other checkpoints. All other tensors are as they were. Knows formats, no model's arithmetic.
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
from octavo.model.match import match_tensors
from octavo.model.tied import parse_checkpoint
from octavo.ops.reference import ReferenceOps
from octavo.ops.weight import Format, QuantWeight

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
    form: Format,
    directory: Path,
    done: Callable[[int, int], None] = lambda count, total: None,
) -> None:
    """Write the checkpoint with every matrix in this format to a directory that must not exist, and copy the tokenizer's files
    if the checkpoint is a directory too. `done` is called with the number of tensors that are finished, and of all."""
    from safetensors.torch import save_file

    cls, config = parse_checkpoint(checkpoint)
    model = build(config, cls, ReferenceOps(), torch.float32, "meta", quant.choose(form))
    places = match_tensors(model, checkpoint)
    tensors: dict[str, Tensor] = {}
    listed: dict[str, list[Any]] = {}
    for i, (name, slot) in enumerate(places.items()):
        stored = checkpoint.tensors[name]
        if isinstance(slot.dest, QuantWeight):
            weight = QuantWeight.empty(slot.dest.form, *slot.dest.shape)
            replace(slot, dest=weight).load(stored)
            tensors |= {f"{name}.{part}": buffer for part, buffer in weight.named_buffers()}
            listed[name] = [str(weight.form), weight.shape[1]]
        else:
            tensors[name] = stored.read().clone()
        done(i + 1, len(places))
    directory.mkdir(parents=True)
    about = {"quant_method": METHOD, "weights": listed}
    changed: dict[str, Any] = {"quantization_config": about}
    if not config.tied and checkpoint.config.get("tie_word_embeddings"):
        changed["tie_word_embeddings"] = False
    config_json = directory / "config.json"
    config_json.write_text(json.dumps(checkpoint.config | changed, indent=1) + "\n")
    weights = directory / "model.safetensors"
    save_file(tensors, weights)
    weights.chmod(config_json.stat().st_mode)  # save_file lets nobody else read it
    if checkpoint.directory is not None:
        for pattern in COPIED:
            for path in sorted(checkpoint.directory.glob(pattern)):
                shutil.copyfile(path, directory / path.name)


def quantised_bits(checkpoint: Checkpoint, form: Format) -> float | None:
    """Bits a weight of a checkpoint whose matrices are quantised in another format than this one; None where most have 16
    bits or more, or this format."""
    matrices = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2]
    count = sum(math.prod(tensor.shape) for tensor in matrices)
    same = sum(math.prod(tensor.shape) for tensor in matrices if tensor.form == form)
    bits = 8 * sum(tensor.nbytes for tensor in matrices) / max(count, 1)
    return bits if bits < 12 and same < count / 2 else None


def joined(
    tensors: dict[str, StoredTensor], config: dict[str, Any], source: str
) -> dict[str, StoredTensor]:
    """A directory's tensors, with those that belong to one of the weights that its config lists as one."""
    listed = config["quantization_config"].get("weights")
    found = dict(tensors)
    if not isinstance(listed, dict):
        raise CheckpointError(
            f"{source}/config.json: quantization_config has no list of weights. Quantise it again"
        )
    for name, entry in listed.items():
        pair = entry if isinstance(entry, list) and len(entry) == 2 else [None, None]
        form = quant.FORMATS.get(pair[0]) if isinstance(pair[0], str) else None
        if form is None or type(pair[1]) is not int or pair[1] < 1:
            raise CheckpointError(
                f"{source}/config.json: quantization_config says {entry!r} of {name}, which is no format"
            )
        found[name] = _join(name, form, pair[1], found, source)
    return found


def _join(
    name: str, form: Format, inputs: int, tensors: dict[str, StoredTensor], source: str
) -> StoredTensor:
    parts = ("codes", "scale", "least") if form.least else ("codes", "scale")
    given = [tensors.pop(f"{name}.{part}", None) for part in parts]
    groups = math.ceil(inputs / form.group) if form.group else 1
    widths = (inputs if form.bits == 8 else math.ceil(inputs / 2), groups, groups)
    outputs = given[0].shape[0] if given[0] is not None and given[0].shape else 0
    stored = [
        t
        for t, width in zip(given, widths, strict=False)
        if t is not None and t.shape == (outputs, width)
    ]
    if len(stored) != len(parts):
        raise CheckpointError(
            f"{source}: {name} in format {form} needs {', '.join(parts)} of {outputs} rows. Quantise it again"
        )

    def codes() -> QuantWeight:
        read = [t.read() for t in stored]
        if [t.dtype for t in read] != [torch.uint8, *[torch.float16] * (len(read) - 1)]:
            raise CheckpointError(
                f"{source}: {name} must have uint8 codes and float16 scales. Quantise it again"
            )
        return QuantWeight(form, inputs, read[0], read[1], read[2] if form.least else None)

    return StoredTensor(
        shape=(outputs, inputs),
        nbytes=sum(t.nbytes for t in stored),
        read=lambda: codes().dequantize(),
        form=form,
        codes=codes,
        rearranged=True,
    )
