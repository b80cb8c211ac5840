"""The embedded model through the whole engine: the text transformers would write, and sensible
English."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.model import embedded
from octavo.model.load import open_checkpoint
from tests.marks import slow_after

pytestmark = pytest.mark.skipif(
    embedded.find_spec(embedded.PACKAGE) is None, reason=embedded.INSTALL
)

QUESTIONS = [
    "What is the capital of France?", "Name three colours.", "What is 2 + 2?", "Write a haiku about rain.",
    "Who was Marie Curie?", "Explain gravity to a child.", "What do bees make?", "Translate 'good morning' into French.",
    "List two prime numbers.", "What is the largest ocean?", "How do I boil an egg?", "Give me a synonym for happy.",
    "What is Python used for?", "Why is the sky blue?", "Tell me a short joke.", "What is the opposite of hot?",
    "How many days are in a week?", "Name a famous painter.", "What is photosynthesis?", "Say hello in Spanish.",
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Transformers' model with the weights of the same file, dequantised."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(None)
    config = {
        k: v for k, v in checkpoint.config.items() if k not in ("architectures", "torch_dtype")
    }
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    weights = {name: checkpoint.read(name).float() for name in checkpoint.shapes}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


@pytest.mark.parametrize("questions", slow_after(1, [QUESTIONS[:6], QUESTIONS]), ids=len)
def test_greedy_answers_equal_transformers(theirs: Any, questions: list[str]) -> None:
    """At every position of our answer its next token is the likeliest under transformers' logits,
    with nothing close to it: so transformers' own greedy loop takes the same path."""
    llm = LLM(quantization="none", progress=False, max_num_seqs=20, max_model_len=256)
    chats = [[{"role": "user", "content": q}] for q in questions]
    answers = llm.chat(chats, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    for question, answer in zip(questions, answers, strict=True):
        prompt, out = answer.prompt_token_ids, answer.outputs[0].token_ids
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + out])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == out, question


def test_it_answers_in_english() -> None:
    llm = LLM(progress=False, max_num_seqs=2, max_model_len=256)
    question = "What is the opposite of hot?"
    answer = llm.chat(
        [{"role": "user", "content": question}],
        SamplingParams(temperature=0, max_tokens=24),
        use_tqdm=False,
    )
    assert "cold" in answer[0].outputs[0].text
