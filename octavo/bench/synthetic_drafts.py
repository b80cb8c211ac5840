"""Drafts with a given acceptance rate, to measure what an acceptance rate gains.

A model with random weights is changed so that it repeats its last token: its embedding is scaled
up, and its output head is a copy of the embedding. Its speed does not change. The next token is
then known, and a draft is right or wrong by a hash of the sequence and the position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.config import SpeculativeConfig
from octavo.core.draft_methods import from_text, parse_method
from octavo.errors import InvalidRequest
from octavo.model.base import CausalLM
from octavo.ops.reference import noise_key
from octavo.runner.batch_slots import BatchSlots
from octavo.runner.drafter import Observed

METHOD = "synthetic"
EMBEDDING_SCALE = 1000.0  # The layers of random weights then hardly change a hidden state.


class SyntheticDrafter:
    """Drafts the last known token with a probability, and another token otherwise."""

    kv = None
    needs_hidden = False

    def __init__(self, acceptance: float):
        self.acceptance = acceptance

    def observe(self, step: Observed, batch_slots: BatchSlots) -> None:
        """Do nothing: the drafter has no KV."""

    def draft(self, passes: Sequence[Tensor], max_len: int, batch_slots: BatchSlots) -> None:
        for index, slots in enumerate(passes):
            rows = slots.long()
            known = batch_slots.computed[rows]
            positions = known + 1 + index
            seed = batch_slots.sampling.seed_low[rows]
            bits = noise_key(seed, torch.zeros_like(seed), positions).long() & 0xFFFFFFFF
            is_right = bits.double() * 2.0**-32 < self.acceptance
            token = batch_slots.tokens[rows, known.long()]
            batch_slots.tokens[rows, positions.long()] = torch.where(is_right, token, token ^ 1)


def parse_synthetic(name: str, text: str) -> tuple[SpeculativeConfig, float]:
    """Return the config of `synthetic,acceptance=X[,k=N...]`, and the acceptance."""
    settings = from_text(name, text)
    value = settings.pop("acceptance", "")
    try:
        acceptance = float(value)
    except ValueError:
        acceptance = -1.0
    if not 0.0 <= acceptance <= 1.0:
        raise InvalidRequest(
            f"{name}: {METHOD} needs acceptance=X with X from 0 to 1, as in "
            f"{METHOD},acceptance=0.7,k=3",
            name,
        )
    # Any method that drafts on the device has the same settings.
    config = parse_method(name, {**settings, "method": "early_exit", "layer": 1})
    return config, acceptance


@torch.inference_mode()
def make_repeating(model: CausalLM) -> None:
    """Change random weights so that the model repeats its last token."""
    embedding = model.embed.weight
    head = getattr(model, "head", None)
    for weight in (embedding, None if head is None else head.weight):
        if weight is not None and (not isinstance(weight, Tensor) or weight.is_mkldnn):
            raise InvalidRequest(
                f"--methods {METHOD} needs weights in float16 or bfloat16 on a GPU: use another "
                "method on this device",
                "methods",
            )
    embedding.mul_(EMBEDDING_SCALE)
    if head is not None:
        head.weight.copy_(embedding)
