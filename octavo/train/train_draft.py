"""The recipe of `octavo train-draft`: from a model to a draft head that fits it.

    texts      the model writes questions and answers them              (texts.py)
    states     its hidden states and choices, from one forward pass      (states.py)
    training   AdamW on chained steps                                    (trainable_head.py)
    result     int4 weights and the acceptance on held-out texts, in a directory

The same seed gives the same texts and the same first weights. A limit on the time ends the
generation and the training early, and the result is written in any case.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.config import ModelConfig, RopeConfig
from octavo.errors import InvalidRequest
from octavo.llm import LLM
from octavo.model import quant, quantized
from octavo.model.draft_head import ARCHITECTURE, DRAFT_TO_TARGET, DraftConfig, draft_config_json
from octavo.ops.weight import QuantWeight, WeightFormat
from octavo.train.states import TextStates, read_states
from octavo.train.texts import TextOptions, generate_texts
from octavo.train.trainable_head import (
    TextBatch,
    TrainableHead,
    accepted_counts,
    batch_texts,
    chain_loss,
)

# 4 bits cost a draft head one percent of its accepted drafts, and save half of its time.
FORMAT = WeightFormat(bits=4, group_size=32, asymmetric=True)
TEXT_SHARE = 0.6  # fraction of a limited time that goes into generating texts
FINISH_SHARE = 0.06  # fraction of the time that is kept for writing the result
HELD_OUT_SHARE = 0.02  # fraction of the texts
MAX_HELD_OUT = 256  # texts
EVALUATED_STEPS = 5
WARM_UP_STEPS = 50  # the learning rate rises during these; afterwards their speed is known
SHARE_BETWEEN_SAVES = 0.25  # fraction of the training
MAX_GRADIENT = 0.5

# Receives a stage of the work, how much of it is finished, and how much there is.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TrainOptions:
    texts: TextOptions = field(default_factory=TextOptions)
    draft_vocab_size: int = 8192
    chained_steps: int = 3
    epochs: int = 20
    batch_tokens: int = 16384
    learning_rate: float = 1e-3
    seconds: float = math.inf  # the time that everything may take, from the call on


def train_draft(
    llm: LLM, out: Path, options: TrainOptions, on_progress: OnProgress
) -> dict[str, Any]:
    """Train a draft head for the model of `llm` and write it to `out`. Return the metrics."""
    if out.exists() and any(out.iterdir()):
        raise InvalidRequest(
            f"{out} is not empty: give a directory that is empty or does not exist"
        )
    started = time.monotonic()
    torch.manual_seed(options.texts.seed)
    texts = generate_texts(
        llm=llm,
        options=options.texts,
        deadline=started + TEXT_SHARE * options.seconds,
        on_progress=lambda done, total: on_progress("texts", done, total),
    )
    texts_seconds = time.monotonic() - started
    states = read_states(
        llm.model, texts, lambda done, total: on_progress("hidden states", done, total)
    )
    train_states, held_out = split(states, options.texts.seed)
    token_ids = frequent_tokens(train_states, options.draft_vocab_size, llm.config.vocab_size)
    head = TrainableHead(head_config(llm.config, len(token_ids)), llm.model, token_ids)
    head.to(llm.device)
    trainer = Trainer(head, train_states, options, llm.config.vocab_size)

    def save() -> dict[str, Any]:
        metrics = {
            "texts": len(texts),
            "tokens": sum(len(text.token_ids) for text in texts),
            "texts_seconds": round(texts_seconds, 1),
            "seconds": round(time.monotonic() - started, 1),
            "steps": trainer.num_steps,
            "loss": round(trainer.loss, 4),
            "options": asdict(options) | {"seconds": min(options.seconds, 1e9)},
            **evaluate(head, held_out, options.batch_tokens),
        }
        write_head(head, metrics, out)
        return metrics

    trainer.run(
        deadline=started + (1 - FINISH_SHARE) * options.seconds,
        on_progress=lambda done, total: on_progress("training", done, total),
        save=save,
    )
    round_weights(head)
    return save()


def split(states: list[TextStates], seed: int) -> tuple[list[TextStates], list[TextStates]]:
    """Return the texts to train on, and held-out texts, which are greedy."""
    shuffled = random.Random(seed).sample(states, len(states))
    greedy = [index for index, state in enumerate(shuffled) if state.is_greedy]
    num_held_out = min(MAX_HELD_OUT, max(1, int(HELD_OUT_SHARE * len(states))))
    held_out = set(greedy[:num_held_out])
    return (
        [state for index, state in enumerate(shuffled) if index not in held_out],
        [state for index, state in enumerate(shuffled) if index in held_out],
    )


def frequent_tokens(states: list[TextStates], count: int, vocab_size: int) -> Tensor:
    """Return the ids of the most frequent tokens of answers, in ascending order."""
    answers = torch.cat([state.token_ids[state.answer_start :] for state in states])
    counts = torch.bincount(answers, minlength=vocab_size)
    frequent = counts.argsort(descending=True, stable=True)[: min(count, vocab_size)]
    return frequent.sort().values


def head_config(target: ModelConfig, draft_vocab_size: int) -> DraftConfig:
    """Return a head with the sizes of the target's layers. Its rope is not scaled."""
    return DraftConfig(
        architecture=ARCHITECTURE,
        vocab_size=draft_vocab_size,
        hidden_size=target.hidden_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        max_position=target.max_position,
        norm_eps=target.norm_eps,
        rope=RopeConfig(theta=target.rope.theta),
        target_vocab_size=target.vocab_size,
        owns_head=False,
    )


class Trainer:
    """Trains a head on batches of texts of similar length, in a random order in each epoch."""

    def __init__(
        self,
        head: TrainableHead,
        states: list[TextStates],
        options: TrainOptions,
        vocab_size: int,
    ):
        self.head = head
        self.options = options
        self.batches = make_batches(states, options.batch_tokens)
        self.device = head.norm.device
        self.is_draft = torch.zeros(vocab_size, dtype=torch.bool, device=self.device)
        self.is_draft[head.token_ids] = True
        # Outputs begin at the size of the target's hidden states, which the head's rows expect.
        size = torch.cat([state.hidden for state in states[:64]]).float().square().mean().sqrt()
        head.norm.data.fill_(float(size))
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.num_steps = 0
        self.total_steps = options.epochs * len(self.batches)
        self.loss = math.nan  # a running mean

    def run(
        self,
        deadline: float,
        on_progress: Callable[[int, int], None],
        save: Callable[[], dict[str, Any]],
    ) -> None:
        """Train until all epochs are finished or the deadline (time.monotonic()) is reached."""
        generator = random.Random(self.options.texts.seed)
        measured_from = time.monotonic()
        saved_at = 0
        while self.num_steps < self.total_steps:
            for batch in generator.sample(self.batches, len(self.batches)):
                self._step(batch_texts(batch))
                if self.num_steps == WARM_UP_STEPS // 2:
                    measured_from = time.monotonic()  # kernels are compiled by now
                if self.num_steps == WARM_UP_STEPS:
                    self._fit_steps(measured_from, deadline)
                on_progress(self.num_steps, self.total_steps)
                if self.num_steps >= self.total_steps or time.monotonic() > deadline:
                    return
                if self.num_steps - saved_at >= SHARE_BETWEEN_SAVES * self.total_steps:
                    saved_at = self.num_steps
                    save()

    def _fit_steps(self, measured_from: float, deadline: float) -> None:
        """Lower the number of steps to those that end before the deadline."""
        now = time.monotonic()
        seconds = (now - measured_from) / (WARM_UP_STEPS - WARM_UP_STEPS // 2)
        if math.isfinite(deadline):
            affordable_steps = self.num_steps + int((deadline - now) / seconds)
            self.total_steps = min(self.total_steps, affordable_steps)

    def _step(self, batch: TextBatch) -> None:
        self.num_steps += 1
        progress = min(1.0, self.num_steps / self.total_steps)
        rate = min(self.num_steps / WARM_UP_STEPS, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * rate
        with autocast(self.device):
            loss = chain_loss(self.head, batch, self.options.chained_steps, self.is_draft)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRADIENT)
        self.optimizer.step()
        value = float(loss.detach())
        self.loss = value if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * value


def autocast(device: torch.device) -> torch.autocast:
    """On a GPU matrix products are computed in bfloat16, on a CPU in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def make_batches(states: list[TextStates], batch_tokens: int) -> list[list[TextStates]]:
    """Divide texts into batches of similar length, with at most this many padded tokens."""
    batches: list[list[TextStates]] = []
    for state in sorted(states, key=lambda state: len(state.token_ids)):
        if not batches or (len(batches[-1]) + 1) * len(state.token_ids) > batch_tokens:
            batches.append([])
        batches[-1].append(state)
    return batches


def evaluate(head: TrainableHead, held_out: list[TextStates], batch_tokens: int) -> dict[str, Any]:
    """Return the acceptance of each chained step on held-out texts, for greedy decoding.

    `acceptance` is the share of drafts that equal the target's choice, among those whose earlier
    drafts all do. `accepted_tokens` is the mean number of accepted drafts for 1, 2, ... drafts.
    """
    counts = torch.zeros(2, EVALUATED_STEPS, dtype=torch.int64)
    for batch in make_batches(held_out, batch_tokens):
        with autocast(head.norm.device):
            counts += accepted_counts(head, batch_texts(batch), EVALUATED_STEPS)
    reached, accepted = counts.tolist()
    rates = [part / max(1, whole) for part, whole in zip(accepted, reached, strict=True)]
    lengths: list[float] = []
    product = 1.0
    for rate in rates:
        product *= rate
        lengths.append((lengths[-1] if lengths else 0.0) + product)
    return {
        "held_out_texts": len(held_out),
        "held_out_tokens": reached[0],
        "acceptance": [round(rate, 4) for rate in rates],
        "accepted_tokens": [round(length, 3) for length in lengths],
    }


# ---- writing -------------------------------------------------------------------------------------


def quantise(weight: Tensor) -> QuantWeight:
    numbers = weight.detach().cpu()
    quantised = QuantWeight.empty(FORMAT, *numbers.shape)
    quant.fill(quantised, numbers)
    return quantised


@torch.no_grad()
def round_weights(head: TrainableHead) -> None:
    """Round the matrices as a loaded head has them, so that they can be evaluated."""
    for weight in (*head.tensors().values(), head.head_rows):
        if weight.dim() == 2:
            weight.copy_(quantise(weight).dequantize())


def write_head(head: TrainableHead, metrics: dict[str, Any], directory: Path) -> None:
    """Write config.json and model.safetensors. An earlier state of the same head is replaced."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    formats: dict[str, list[Any]] = {}
    for name, weight in head.tensors().items():
        if weight.dim() == 2:
            quantised = quantise(weight)
            tensors |= {f"{name}.{part}": buffer for part, buffer in quantised.named_buffers()}
            formats[name] = [str(FORMAT), weight.shape[1]]
        else:
            tensors[name] = weight.detach().cpu().contiguous()
    offsets = head.token_ids.cpu() - torch.arange(len(head.token_ids))
    tensors[DRAFT_TO_TARGET] = offsets
    config = draft_config_json(head.config)
    config["quantization_config"] = {"quant_method": quantized.METHOD, "weights": formats}
    config["training"] = metrics
    directory.mkdir(parents=True, exist_ok=True)
    config_json = directory / "config.json"
    config_json.write_text(json.dumps(config, indent=1) + "\n")
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"training": json.dumps(metrics)})
    weights.chmod(config_json.stat().st_mode)  # save_file makes it readable by its owner only
