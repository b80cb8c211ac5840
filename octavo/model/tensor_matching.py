"""Compares the tensors of a checkpoint with those that a model needs, before reading any tensor."""

from __future__ import annotations

import torch

from octavo.errors import CheckpointError
from octavo.model.base import CausalLM, WeightTarget
from octavo.model.checkpoint import MAX_LISTED, Checkpoint, StoredTensor


def match_tensors(model: CausalLM, checkpoint: Checkpoint) -> dict[str, WeightTarget]:
    """Return the weight target of every tensor that the model needs, by its name in the checkpoint.

    One error lists all tensors that are missing, unexpected or of the wrong shape.
    """
    targets = model.weight_map()
    ignored = model.ignored_weights()
    target_by_name: dict[str, WeightTarget] = {}
    matched_names: set[str] = set()
    unexpected = []
    misshapen = []
    for name, tensor in checkpoint.tensors.items():
        canonical = model.canonical_name(name)
        if canonical in targets and canonical not in matched_names:
            matched_names.add(canonical)
            target = target_by_name[name] = targets[canonical]
            if (actual_shape := _shape_after(target, tensor)) != target.shape:
                rearranged = f", rearranged {actual_shape}" if actual_shape != tensor.shape else ""
                misshapen.append(
                    f"{name} {list(tensor.shape)}{rearranged}: must be {list(target.shape)}"
                )
        elif canonical not in ignored:
            unexpected.append(f"{name} {list(tensor.shape)}")
    missing = [
        f"{name} {list(target.shape)}"
        for name, target in targets.items()
        if name not in matched_names
    ]
    if missing or unexpected or misshapen:
        reports = [
            _report("missing", missing),
            _report("unexpected", unexpected),
            _report("of the wrong shape", misshapen),
        ]
        raise CheckpointError(
            f"the tensors in {checkpoint.source} are not those that "
            f"{model.config.architecture} needs:{''.join(reports)}\n"
            "Does config.json belong to these weights?"
        )
    return target_by_name


def _shape_after(target: WeightTarget, tensor: StoredTensor) -> tuple[int, ...] | str:
    """Return the shape of the tensor after the target's transform, or the transform's error."""
    if target.transform is None or tensor.rearranged:
        return tensor.shape
    try:
        return tuple(target.transform(torch.empty(tensor.shape, device="meta")).shape)
    except (RuntimeError, IndexError, ValueError) as error:
        return str(error).splitlines()[0]


def _report(problem: str, lines: list[str]) -> str:
    if not lines:
        return ""
    remainder = [f"... and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return f"\n{len(lines)} {problem}:" + "".join(
        f"\n  {line}" for line in lines[:MAX_LISTED] + remainder
    )
