"""Whether a model's head is its embedding: config.json says so, and the tensors of the checkpoint have the last word.

Fine-tunes of tied models are often saved with a head of their own, under a config.json that still ties it. As transformers
does: a head that differs from the embedding is used, and one that equals it is the embedding.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from octavo.config import ModelConfig
from octavo.errors import CheckpointError
from octavo.model.base import HEAD, CausalLM, registry
from octavo.model.checkpoint import Checkpoint

log = logging.getLogger(__name__)


def parse_checkpoint(checkpoint: Checkpoint) -> tuple[type[CausalLM], ModelConfig]:
    """The class of a checkpoint's model and its config, tied or not as the tensors are. A second copy of a tied weight is
    taken out of the checkpoint; a tied weight that is stored as the head alone becomes the embedding."""
    cls = registry.find(checkpoint.config)
    config = cls.parse_config(checkpoint.config)
    if checkpoint.tensors and config.num_layers > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.source} says that the model has {config.num_layers} layers, but holds {len(checkpoint.tensors)} "
            "tensors. Does config.json belong to these weights?"
        )
    if not config.tied or cls.tied_weight is None:
        return cls, config
    stored = {cls.canonical_name(name): name for name in checkpoint.tensors}
    head = stored.get(HEAD)
    embedding = stored.get(cls.tied_weight)
    if head is None:
        return cls, config
    if embedding is None:
        checkpoint.tensors[cls.tied_weight] = checkpoint.tensors.pop(head)
        return cls, config
    if same_values(checkpoint, head, embedding):
        del checkpoint.tensors[head]
        return cls, config
    log.warning(
        "%s: config.json ties the head to the embedding (tie_word_embeddings), but %s and %s differ: the head is used as it "
        "is stored",
        checkpoint.source,
        head,
        embedding,
    )
    return cls, replace(config, tied=False)


def same_values(checkpoint: Checkpoint, one: str, other: str) -> bool:
    if checkpoint.tensors[one].shape != checkpoint.tensors[other].shape:
        return False
    first = checkpoint.read(one)
    second = checkpoint.read(other)
    return first.dtype == second.dtype and torch.equal(first, second)
