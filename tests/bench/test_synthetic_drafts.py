"""Synthetic drafts: a model that repeats its last token, and drafts that are right so often."""

from __future__ import annotations

import pytest
import torch

from octavo.bench.synthetic_drafts import SyntheticDrafter, make_repeating, parse_synthetic
from octavo.errors import InvalidRequest
from octavo.model import build, registry
from octavo.model.load import dummy_weights
from octavo.ops.reference import ReferenceOps
from octavo.runner.batch_slots import BatchSlots, IntColumn
from tests import tiny
from tests.batch import empty_kv, make_batch, scattered_tables


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@torch.inference_mode()
def test_the_model_repeats_its_last_token(architecture: str) -> None:
    hf_model = tiny.hf_model(architecture)
    hf_config = hf_model.config.to_dict() | {"architectures": [type(hf_model).__name__]}
    config = registry.parse(hf_config)
    model = build(config, registry.find(hf_config), ReferenceOps(), torch.float32, "cpu")
    dummy_weights(model, seed=1)
    make_repeating(model)
    tables = scattered_tables([4, 3], block_size=4)
    batch = make_batch([([5, 9, 17, 4], 0), ([80, 3, 60], 0)], tables, 4, "cpu")
    hidden = model(batch, empty_kv(config, tables, 4, "cpu"))
    assert model.logits(hidden).argmax(1).tolist() == [5, 9, 17, 4, 80, 3, 60]


def test_drafts_are_right_with_the_given_probability() -> None:
    slots = BatchSlots(100, 200, 16, torch.device("cpu"))
    slots.tokens[:, 7] = torch.arange(101).int()
    slots.computed[:] = 7
    slots.ints[:, IntColumn.SEED_LOW] = torch.arange(101).int()
    passes = [torch.arange(100, dtype=torch.int32)] * 20
    SyntheticDrafter(0.7).draft(passes, 200, slots)
    is_right = slots.tokens[:100, 8:28] == slots.tokens[:100, 7:8]
    assert abs(float(is_right.float().mean()) - 0.7) < 0.03
    assert float(is_right.float().std(0).max()) > 0.3, "each place has right and wrong drafts"


def test_the_acceptance_is_read_and_checked() -> None:
    config, acceptance = parse_synthetic("--methods", "synthetic,acceptance=0.7,k=3,adaptive=no")
    assert (config.num_tokens, config.adaptive, acceptance) == (3, False, 0.7)
    assert config.drafts_on_device
    for text in ("synthetic", "synthetic,acceptance=2", "synthetic,acceptance=x"):
        with pytest.raises(InvalidRequest, match="needs acceptance=X with X from 0 to 1"):
            parse_synthetic("--methods", text)
