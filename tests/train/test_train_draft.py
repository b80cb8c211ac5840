"""Training a draft head: on any architecture, to a head that loads, drafts as it was trained to,
and improves."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from octavo import LLM
from octavo.errors import InvalidRequest
from octavo.model.draft_head import load_draft_head
from octavo.train.states import TextStates, pack, read_states
from octavo.train.texts import Text, TextOptions, before_repetition, generate_texts
from octavo.train.train_draft import (
    Trainer,
    TrainOptions,
    evaluate,
    frequent_tokens,
    head_config,
    make_batches,
    round_weights,
    train_draft,
    write_head,
)
from octavo.train.trainable_head import TrainableHead, batch_texts
from tests import tiny
from tests.batch import empty_kv, make_batch, scattered_tables

OPTIONS = TrainOptions(
    texts=TextOptions(count=24, max_question=6, max_answer=16),
    draft_vocab_size=64,
    epochs=1,
    batch_tokens=256,
)


def make_llm(architecture: str = "llama") -> LLM:
    return LLM(tiny.model_dir(architecture), device="cpu", max_num_seqs=32, max_model_len=128)


def ignore(*_: object) -> None:
    pass


def make_states(llm: LLM, count: int = 8) -> list[TextStates]:
    generator = torch.Generator().manual_seed(3)
    texts = [
        Text(torch.randint(300, (12 + index,), generator=generator).tolist(), 4, True)
        for index in range(count)
    ]
    return read_states(llm.model, texts, ignore)


def test_an_answer_ends_where_it_repeats_itself() -> None:
    assert before_repetition([1, 2, 3, 4, 5], width=2) == [1, 2, 3, 4, 5]
    assert before_repetition([1, 2, 3, 1, 2, 3, 1, 2], width=2) == [1, 2, 3, 1, 2]
    assert before_repetition([7] * 10, width=4) == [7] * 5
    assert before_repetition([], width=4) == []


@pytest.mark.parametrize("architecture", list(tiny.ARCHITECTURES))
def test_every_architecture_gets_a_head_that_loads(architecture: str, tmp_path: Path) -> None:
    llm = make_llm(architecture)
    stages: list[str] = []
    metrics = train_draft(
        llm, tmp_path / "head", OPTIONS, lambda stage, done, total: stages.append(stage)
    )
    head = load_draft_head(tmp_path / "head", llm.model)
    assert head.config.vocab_size == len(head.token_ids) == 64
    assert len(metrics["acceptance"]) == 5
    assert list(dict.fromkeys(stages)) == ["texts", "hidden states", "training"]
    stored = json.loads((tmp_path / "head" / "config.json").read_text())
    assert stored["training"]["acceptance"] == metrics["acceptance"]
    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["training"])["steps"] == metrics["steps"]


def test_a_loaded_head_drafts_what_the_trained_head_predicts(tmp_path: Path) -> None:
    llm = make_llm()
    (state, *_) = states = make_states(llm)
    token_ids = frequent_tokens(states, 64, llm.config.vocab_size)
    torch.manual_seed(5)
    trained = TrainableHead(head_config(llm.config, 64), llm.model, token_ids)
    for weight in trained.parameters():
        weight.data += torch.randn_like(weight) * 0.2
    round_weights(trained)
    write_head(trained, {}, tmp_path)
    head = load_draft_head(tmp_path, llm.model)

    tokens = state.token_ids.tolist()
    length = len(tokens)
    tables = scattered_tables([length], 4)
    kv = empty_kv(head.config, tables, 4, "cpu")[:, 0]
    with torch.inference_mode():
        steps = list(trained.chain(batch_texts([state]), 3))
        # Step 0 at all positions, then the chain of one position, with the tokens of the text.
        batch = make_batch([(tokens[1:], 0)], tables, 4, "cpu")
        hidden = head.compute(batch, kv, state.hidden[:-1].clone())
        logits = [head.logits(hidden)[5]]
        output = hidden[5:6].clone()
        for step in (1, 2):
            batch = make_batch([([tokens[6 + step]], 5 + step)], tables, 4, "cpu")
            output = head.compute(batch, kv, output)
            logits.append(head.logits(output)[0])
            output = output.clone()
        for step, actual in zip(steps, logits, strict=True):
            expected = trained.logits(step.hidden)[0, 5]
            # The kernels of quantised weights round activations to 8 bits.
            assert torch.nn.functional.cosine_similarity(actual, expected, dim=0) > 0.999


def test_training_lowers_the_loss_and_raises_the_acceptance() -> None:
    llm = make_llm()
    states = make_states(llm)
    token_ids = frequent_tokens(states, 300, llm.config.vocab_size)
    torch.manual_seed(5)
    head = TrainableHead(head_config(llm.config, 300), llm.model, token_ids)
    options = TrainOptions(epochs=80, batch_tokens=1024, learning_rate=1e-2)
    trainer = Trainer(head, states, options, llm.config.vocab_size)
    before = evaluate(head, states, 1024)
    losses: list[float] = []
    trainer.run(math.inf, lambda done, total: losses.append(trainer.loss), dict)
    after = evaluate(head, states, 1024)
    assert losses[-1] < losses[0] - 1
    assert after["acceptance"][0] > before["acceptance"][0] + 0.2


def test_the_same_seed_generates_the_same_texts() -> None:
    llm = make_llm()
    options = TextOptions(count=6, max_question=5, max_answer=8)
    first = generate_texts(llm, options, math.inf, ignore)
    assert first == generate_texts(llm, options, math.inf, ignore)
    other = TextOptions(count=6, max_question=5, max_answer=8, seed=1)
    assert first != generate_texts(llm, other, math.inf, ignore)
    assert {text.is_greedy for text in first} == {True, False}


def test_a_passed_deadline_still_writes_a_head(tmp_path: Path) -> None:
    llm = make_llm()
    options = TrainOptions(
        texts=TextOptions(count=10_000, max_question=4, max_answer=4),
        draft_vocab_size=64,
        epochs=10**6,
        seconds=1.0,
    )
    started = time.monotonic()
    metrics = train_draft(llm, tmp_path / "head", options, ignore)
    assert metrics["steps"] >= 1
    assert time.monotonic() - started < 60
    load_draft_head(tmp_path / "head", llm.model)


def test_a_directory_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="is not empty"):
        train_draft(make_llm(), tmp_path, OPTIONS, ignore)


def test_states_do_not_depend_on_the_texts_beside_them() -> None:
    llm = make_llm()
    together = make_states(llm)
    text = Text(together[3].token_ids.tolist(), 4, True)
    (alone,) = read_states(llm.model, [text], ignore)
    torch.testing.assert_close(alone.hidden, together[3].hidden, atol=1e-4, rtol=1e-4)
    assert torch.equal(alone.choices, together[3].choices)


def test_batches_hold_every_text_once_and_respect_the_limit() -> None:
    states = make_states(make_llm())
    batches = make_batches(states, 40)
    assert sorted(id(state) for batch in batches for state in batch) == sorted(map(id, states))
    for batch in batches:
        assert len(batch) * max(len(state.token_ids) for state in batch) <= 40


def test_packed_texts_do_not_share_blocks() -> None:
    texts = [Text(list(range(20)), 3, True), Text(list(range(33)), 3, True)]
    batch = pack(texts, torch.device("cpu"))
    assert len(set(batch.kv_indices.tolist())) == 53
    assert batch.kv_indices.min() >= 16  # block 0 is padding
