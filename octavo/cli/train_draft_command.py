"""`octavo train-draft`: trains a draft head for speculative decoding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from octavo.cli.options import Model, command, option, size
from octavo.engine_options import EngineOptions

# The share of the GPU's memory for the engine. The hidden states of the texts and the training use
# the other part.
MEMORY_SHARE = 0.4


@command
def train_draft(
    model: Model = None,
    *,
    out: Annotated[
        Path, option("Directory to write; it must be empty or not exist.", None, "DIR", "--out")
    ],
    texts: Annotated[
        int, option("Number of texts to generate.", None, "N", parser=size, show_default=True)
    ] = 30_000,
    draft_vocab: Annotated[
        int,
        option(
            "Vocabulary of the draft head: the number of tokens that it can draft.",
            None,
            "N",
            parser=size,
            show_default=True,
        ),
    ] = 8192,
    max_answer: Annotated[
        int, option("Maximum tokens per answer.", None, "N", parser=size, show_default=True)
    ] = 320,
    epochs: Annotated[
        int, option("Number of passes over the texts.", None, "N", parser=size, show_default=True)
    ] = 20,
    minutes: Annotated[
        float | None, option("Finish within this time, with fewer texts and epochs.", None, "X")
    ] = None,
    seed: Annotated[int, option("Seed of texts and weights.", None, "N", show_default=True)] = 0,
    device: Annotated[
        str, option("Device to train on: auto, cpu or cuda.", None, "NAME", show_default=True)
    ] = "auto",
) -> None:
    """Train a draft head for a model, on texts that the model writes itself."""
    from octavo.cli.options import load_llm
    from octavo.cli.progress import Steps
    from octavo.train.texts import TextOptions
    from octavo.train.train_draft import TrainOptions
    from octavo.train.train_draft import train_draft as train

    options = TrainOptions(
        texts=TextOptions(count=texts, max_answer=max_answer, seed=seed),
        draft_vocab_size=draft_vocab,
        epochs=epochs,
        seconds=math.inf if minutes is None else 60 * minutes,
    )
    llm = load_llm(model, EngineOptions(device=device, gpu_memory_utilization=MEMORY_SHARE))
    with Steps() as progress:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        metrics = train(llm, out, options, show)
    print(f"{out}: {metrics['tokens']:,} tokens of text, {metrics['steps']:,} training steps")
    print("drafts accepted on held-out texts, given that the earlier ones are:")
    for index, rate in enumerate(metrics["acceptance"]):
        print(f"  draft {index + 1}: {rate:.1%}")
    print(f"accepted per step with 3 drafts: {metrics['accepted_tokens'][2]:.2f}")
