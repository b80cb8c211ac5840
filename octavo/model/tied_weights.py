"""Decides whether the output head of a model shares the weights of its embedding.

Fine-tunes of tied models are often saved with a separate head under a config.json that still ties
it. As in transformers, the tensors decide: a head that differs from the embedding is used, and a
head that equals it is dropped.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from octavo.config import ModelConfig
from octavo.errors import CheckpointError
from octavo.model.base import HEAD, CausalLM, find_model_class, registry
from octavo.model.checkpoint import Checkpoint

log = logging.getLogger(__name__)


def parse_checkpoint(
    checkpoint: Checkpoint, class_name: str | None = None
) -> tuple[type[CausalLM], ModelConfig]:
    """Return the model class and the config of a checkpoint, with `tied` as the tensors imply. The
    class may be given as package.module:Class.

    A second copy of a tied weight is removed from the checkpoint. A tied weight that is stored
    only under the name of the head is renamed to the embedding.
    """
    model_class = (
        registry.find(checkpoint.config) if class_name is None else find_model_class(class_name)
    )
    config = model_class.parse_config(checkpoint.config)
    if checkpoint.tensors and config.num_layers > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.source} says that the model has {config.num_layers} layers, but holds "
            f"{len(checkpoint.tensors)} tensors. Does config.json belong to these weights?"
        )
    if not config.tied or model_class.tied_weight is None:
        return model_class, config
    stored = {model_class.canonical_name(name): name for name in checkpoint.tensors}
    head = stored.get(HEAD)
    embedding = stored.get(model_class.tied_weight)
    if head is None:
        return model_class, config
    if embedding is None:
        checkpoint.tensors[model_class.tied_weight] = checkpoint.tensors.pop(head)
        return model_class, config
    if same_values(checkpoint, head, embedding):
        del checkpoint.tensors[head]
        return model_class, config
    log.warning(
        "%s: config.json ties the head to the embedding (tie_word_embeddings), but %s and %s "
        "differ: the head is used as it is stored",
        checkpoint.source,
        head,
        embedding,
    )
    return model_class, replace(config, tied=False)


def same_values(checkpoint: Checkpoint, first_name: str, second_name: str) -> bool:
    if checkpoint.tensors[first_name].shape != checkpoint.tensors[second_name].shape:
        return False
    first = checkpoint.read(first_name)
    second = checkpoint.read(second_name)
    return first.dtype == second.dtype and torch.equal(first, second)
