"""Quantised checkpoints as files: a Hugging Face directory whose weights are codes and scales, written and read here.

A weight NAME becomes the tensors NAME.codes, NAME.scale and perhaps NAME.least (octavo.ops.weight says what they mean), and
config.json lists each with its format and its number of inputs. All else is as it was. Knows formats, no model's arithmetic.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.model import quant
from octavo.model.base import build, registry
from octavo.model.checkpoint import Checkpoint, StoredTensor
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
    done: Callable[[float], None] = lambda part: None,
) -> None:
    """The checkpoint with every matrix in this format, in a directory that must not exist. The tokenizer's files come along
    if it has any; `done` is told which part of the tensors is quantised."""
    from safetensors.torch import save_file

    cls = registry.find(checkpoint.config)
    config = cls.parse_config(checkpoint.config)
    model = build(config, cls, ReferenceOps(), torch.float32, "meta", quant.choose(form))
    slots = model.weight_map()
    tensors: dict[str, Tensor] = {}
    listed: dict[str, list[Any]] = {}
    for i, (name, stored) in enumerate(checkpoint.tensors.items()):
        slot = slots.get(model.canonical_name(name))
        if slot is None or not isinstance(slot.dest, QuantWeight) or slot.transform is not None:
            tensors[name] = stored.read().clone()
        else:
            own = slot.dest.form
            weight = QuantWeight.empty(own, *stored.shape)
            quant.fill(
                weight,
                stored.codes()
                if stored.codes is not None and stored.form == own
                else stored.read(),
            )
            tensors |= {f"{name}.{part}": buffer for part, buffer in weight.named_buffers()}
            listed[name] = [str(own), stored.shape[1]]
        done((i + 1) / len(checkpoint.tensors))
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    config_json = checkpoint.config | {
        "quantization_config": {"quant_method": METHOD, "weights": listed}
    }
    (directory / "config.json").write_text(json.dumps(config_json, indent=1) + "\n")
    for pattern in COPIED if checkpoint.directory is not None else ():
        for path in (
            sorted(checkpoint.directory.glob(pattern)) if checkpoint.directory is not None else ()
        ):
            shutil.copyfile(path, directory / path.name)


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
        form = quant.FORMATS.get(entry[0]) if isinstance(entry, list) and len(entry) == 2 else None
        if form is None or type(entry[1]) is not int or entry[1] < 1:
            raise CheckpointError(
                f"{source}/config.json: quantization_config says {entry!r} of {name}, which is no format"
            )
        found[name] = _join(name, form, entry[1], found, source)
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
        (outputs, inputs), sum(t.nbytes for t in stored), lambda: codes().dequantize(), form, codes
    )
