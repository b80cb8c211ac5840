"""Compares the tensors of a checkpoint with those that a model needs, before any of them is read."""

from __future__ import annotations

import torch

from octavo.errors import CheckpointError
from octavo.model.base import CausalLM, Slot
from octavo.model.checkpoint import MAX_LISTED, Checkpoint, StoredTensor


def match_tensors(model: CausalLM, checkpoint: Checkpoint) -> dict[str, Slot]:
    """The slot of every tensor that the model needs, by the tensor's name in the checkpoint. One error lists everything that
    is missing, unexpected or of the wrong shape."""
    slots = model.weight_map()
    ignored = model.ignored_weights()
    places: dict[str, Slot] = {}
    taken: set[str] = set()
    unexpected = []
    misshapen = []
    for name, tensor in checkpoint.tensors.items():
        known = model.canonical_name(name)
        if known in slots and known not in taken:
            taken.add(known)
            slot = places[name] = slots[known]
            if (got := _shape_after(slot, tensor)) != slot.dest.shape:
                rearranged = f", rearranged {got}" if got != tensor.shape else ""
                misshapen.append(
                    f"{name} {list(tensor.shape)}{rearranged}: must be {list(slot.dest.shape)}"
                )
        elif known not in ignored:
            unexpected.append(f"{name} {list(tensor.shape)}")
    missing = [
        f"{name} {list(slot.dest.shape)}" for name, slot in slots.items() if name not in taken
    ]
    if missing or unexpected or misshapen:
        parts = [
            _report("missing", missing),
            _report("unexpected", unexpected),
            _report("of the wrong shape", misshapen),
        ]
        raise CheckpointError(
            f"the tensors in {checkpoint.source} are not those that {model.config.architecture} needs:{''.join(parts)}\n"
            "Does config.json belong to these weights?"
        )
    return places


def _shape_after(slot: Slot, tensor: StoredTensor) -> tuple[int, ...] | str:
    """The tensor's shape once the slot's transform has rearranged it, found without data; or why that cannot be done."""
    if slot.transform is None or tensor.rearranged:
        return tensor.shape
    try:
        return tuple(slot.transform(torch.empty(tensor.shape, device="meta")).shape)
    except (RuntimeError, IndexError, ValueError) as error:
        return str(error).splitlines()[0]


def _report(what: str, lines: list[str]) -> str:
    if not lines:
        return ""
    more = [f"... and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return f"\n{len(lines)} {what}:" + "".join(f"\n  {line}" for line in lines[:MAX_LISTED] + more)
