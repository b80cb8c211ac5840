"""A draft head as jobs of the CPU kernels: the drafts of the head computed op by op, and tokens that
do not depend on either."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.ops.cpu.cpu_draft_head import CpuDraftHead
from octavo.ops.cpu.thread_pool import thread_pool
from octavo.runner.batch_slots import BatchSlots
from octavo.train.train_draft import head_config, write_head
from octavo.train.trainable_head import TrainableHead
from tests import tiny

pytestmark = pytest.mark.skipif(thread_pool() is None, reason="the CPU kernels cannot run here")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41, 42], list(range(60, 90))]


@pytest.fixture(scope="module")
def head_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head with random weights for the tiny model."""
    llm = LLM(tiny.model_dir("qwen3"), device="cpu", quantization="int8-g32", max_model_len=128)
    torch.manual_seed(1)
    token_ids = torch.arange(0, llm.config.vocab_size, 2)
    head = TrainableHead(head_config(llm.config, len(token_ids)), llm.model, token_ids)
    for weight in head.parameters():
        weight.data += torch.randn_like(weight) * 0.2
    directory = tmp_path_factory.mktemp("head")
    write_head(head, {}, directory)
    return directory


def make(head_directory: Path, **options: Any) -> LLM:
    method = f"head,model={head_directory},k=3,adaptive=no"
    settings: dict[str, Any] = {"quantization": "int8-g32", "max_model_len": 128, "max_num_seqs": 4}
    return LLM(
        tiny.model_dir("qwen3"),
        device="cpu",
        speculative_config=method,
        **(settings | options),
    )


def record_drafts(llm: LLM) -> list[list[int]]:
    recorded: list[list[int]] = []
    drafter: Any = llm.runner.drafter
    draft = drafter.draft

    def recording(passes: list[Tensor], max_len: int, batch_slots: BatchSlots) -> None:
        draft(passes, max_len, batch_slots)
        counts = Counter(slot for slots in passes for slot in slots.tolist())
        for slot, count in sorted(counts.items()):
            first = int(batch_slots.computed[slot]) + 1
            recorded.append(batch_slots.tokens[slot, first : first + count].tolist())

    drafter.draft = recording
    return recorded


def generate(llm: LLM, temperature: float) -> list[list[int]]:
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=12 + seed, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}], ids=str)
def test_drafts_are_those_of_the_head_op_by_op(
    head_directory: Path, temperature: float, options: dict[str, Any]
) -> None:
    """Norms are rounded in another order, so a draft may differ where two tokens are close."""
    fused = make(head_directory, **options)
    plain = make(head_directory, **options)
    fused_drafter: Any = fused.runner.drafter
    plain_drafter: Any = plain.runner.drafter
    assert isinstance(fused_drafter.head.fused, CpuDraftHead)
    plain_drafter.head.fused = None
    fused_drafts = record_drafts(fused)
    plain_drafts = record_drafts(plain)
    tokens = generate(fused, temperature)
    assert tokens == generate(plain, temperature)
    without = LLM(tiny.model_dir("qwen3"), device="cpu", quantization="int8-g32", max_model_len=128)
    assert tokens == generate(without, temperature)
    assert [len(drafts) for drafts in fused_drafts] == [len(drafts) for drafts in plain_drafts]
    pairs = [
        one == other
        for drafts, others in zip(fused_drafts, plain_drafts, strict=True)
        for one, other in zip(drafts, others, strict=True)
    ]
    assert len(pairs) > 30
    assert sum(pairs) > 0.95 * len(pairs)
