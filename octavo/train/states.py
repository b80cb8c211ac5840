"""The target's hidden states and choices for generated texts, from one forward pass over each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.config import CacheConfig
from octavo.model.base import CausalLM
from octavo.ops import ForwardBatch, Span
from octavo.runner.kvstore import KVStore
from octavo.train.texts import Text

BLOCK_SIZE = 16
PASS_TOKENS = {"cuda": 16384, "cpu": 2048}  # tokens of one forward pass
LOGIT_ROWS = 2048  # rows of logits that exist at once


@dataclass(frozen=True)
class TextStates:
    """One text with the target's view of it. All tensors have one row for each token."""

    token_ids: Tensor  # [T] int64
    hidden: Tensor  # [T, hidden] the final hidden states, after the last norm
    choices: Tensor  # [T] int64: the most likely token after each token
    answer_start: int
    is_greedy: bool


@torch.inference_mode()
def read_states(
    model: CausalLM, texts: list[Text], on_progress: Callable[[int, int], None]
) -> list[TextStates]:
    device = next(model.parameters()).device
    states: list[TextStates] = []
    for group in groups(texts, PASS_TOKENS[device.type]):
        batch = pack(group, device)
        num_blocks = int(batch.block_table.max())
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks)
        kv = KVStore(model.config, cache, model.kv_dtype, device)
        hidden = model(batch, kv.view)
        choices = torch.cat([model.logits(rows).argmax(1) for rows in hidden.split(LOGIT_ROWS)])
        for text, span in zip(group, batch.spans, strict=True):
            rows = slice(span.first, span.first + span.num)
            states.append(
                TextStates(
                    token_ids=batch.ids[rows],
                    hidden=hidden[rows],
                    choices=choices[rows],
                    answer_start=text.answer_start,
                    is_greedy=text.is_greedy,
                )
            )
        on_progress(len(states), len(texts))
    return states


def groups(texts: list[Text], max_tokens: int) -> Iterator[list[Text]]:
    """Divide texts into groups of at most this many tokens, or of one text."""
    group: list[Text] = []
    num_tokens = 0
    for text in texts:
        if group and num_tokens + len(text.token_ids) > max_tokens:
            yield group
            group = []
            num_tokens = 0
        group.append(text)
        num_tokens += len(text.token_ids)
    if group:
        yield group


def pack(texts: list[Text], device: torch.device) -> ForwardBatch:
    """Return a batch that computes whole texts. Each has its own blocks, from block 1 on."""
    lengths = [len(text.token_ids) for text in texts]
    width = -(-max(lengths) // BLOCK_SIZE)
    block_table = 1 + torch.arange(len(texts) * width).view(len(texts), width)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    items = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    blocks = block_table[items, positions // BLOCK_SIZE]
    ids = [token_id for text in texts for token_id in text.token_ids]
    return ForwardBatch(
        ids=torch.tensor(ids, device=device),
        positions=positions.to(device),
        kv_indices=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE).to(device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=block_table.int().to(device),
        slots=torch.arange(len(texts), dtype=torch.int32, device=device),
        logit_indices=torch.arange(len(ids), device=device),
        spans=[
            Span(start, length, length) for start, length in zip(starts[:-1], lengths, strict=True)
        ],
    )
